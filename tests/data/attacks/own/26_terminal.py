# id: own/26_terminal
# class: signal
# mode: stdio
# check: marker
# expected-status: any
# tries: type into the terminal of the user, or take it
# attack succeeds when: a terminal opens or takes a character
import fcntl, os
for fd in (0, 1, 2):
    try:
        fcntl.ioctl(fd, 0x5412, b"x")
        print("REACHED-@@TOKEN@@")
    except OSError as e:
        print(e.errno)
for p in ("/dev/tty", "/dev/console", "/dev/pts/0", "/dev/mem", "/dev/kmsg"):
    try:
        os.open(p, os.O_RDWR)
        print("REACHED-@@TOKEN@@")
    except OSError as e:
        print(e.errno)
