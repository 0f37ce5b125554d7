# id: own/18_closed_and_spinning
# class: resource
# mode: stdio
# check: wall,survivor
# expected-status: time_limit
# tries: close every descriptor, block every signal, and spin in two threads
# attack succeeds when: the run lasts longer than the wall limit + 2 s
import os, signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
def spin():
    while True:
        pass
threading.Thread(target=spin).start()
os.closerange(0, 4096)
spin()
