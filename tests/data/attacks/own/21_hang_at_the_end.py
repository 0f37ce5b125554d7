# id: own/21_hang_at_the_end
# class: resource
# mode: stdio
# check: wall,survivor
# expected-status: time_limit
# tries: answer, then never end: an exit function, a thread that is waited for, a finaliser
# attack succeeds when: the run lasts longer than the wall limit + 2 s
import atexit, threading, time
class Last:
    def __del__(self):
        while True:
            pass
keep = Last()
atexit.register(lambda: time.sleep(100))
threading.Thread(target=time.sleep, args=(100,)).start()
a, b = map(int, input().split())
print(a + b, flush=True)
