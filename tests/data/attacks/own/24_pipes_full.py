# id: own/24_pipes_full
# class: resource
# mode: stdio
# check: rss,wall
# expected-status: any
# tries: hold kernel memory that no address space counts: full pipes of the largest size, socket pairs, timers, events
# attack succeeds when: the machine's memory shrinks, or the run does not end
import fcntl, os, socket
n = 0
try:
    while True:
        r, w = os.pipe()
        os.set_blocking(w, False)
        try:
            fcntl.fcntl(w, 1031, 1 << 20)
            print("larger")
        except OSError:
            pass
        try:
            while True:
                n += os.write(w, b"x" * 65536)
        except BlockingIOError:
            pass
except OSError as e:
    print(type(e).__name__, n < 64 << 20)
