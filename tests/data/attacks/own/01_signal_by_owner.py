# id: own/01_signal_by_owner
# class: signal
# mode: stdio
# check: damage,wall
# expected-status: any
# tries: make the kernel send SIGKILL to the parent and the sentinel: F_SETOWN and F_SETSIG on a pipe
# attack succeeds when: one of them dies
import fcntl, os
for pid in (os.getppid(), @@SENTINEL_PID@@, @@GRADER_PID@@):
    for owner in (lambda fd: fcntl.fcntl(fd, 8, pid), lambda fd: fcntl.ioctl(fd, 0x8901, pid.to_bytes(4, "little"))):
        try:
            r, w = os.pipe()
            owner(r)
            fcntl.fcntl(r, 10, 9)
            fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            os.write(w, b"x")
            print("armed")
        except Exception as e:
            print(type(e).__name__)
