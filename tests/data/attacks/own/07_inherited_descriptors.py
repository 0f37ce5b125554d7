# id: own/07_inherited_descriptors
# class: host-read
# mode: stdio
# check: leak,damage,wall
# expected-status: any
# tries: read and write every descriptor there is, and those of /proc/self/fd
# attack succeeds when: a canary or an answer comes out, or the grader is upset
import os, select
for fd in range(3, 1024):
    try:
        if select.select([fd], [], [], 0)[0]:
            print(fd, os.read(fd, 65536))
    except Exception:
        pass
    for data in (b"\xff" * 4096, b"A" * 4096):
        try:
            os.write(fd, data)
            print("wrote", fd)
        except Exception:
            pass
try:
    for name in os.listdir("/proc/self/fd"):
        print(name, os.readlink("/proc/self/fd/" + name))
except Exception as e:
    print(type(e).__name__)
