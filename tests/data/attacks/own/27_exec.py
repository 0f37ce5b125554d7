# id: own/27_exec
# class: kernel
# mode: stdio
# check: marker,survivor
# expected-status: any
# tries: run a program: execve, posix_spawn, vfork, os.system, the loader
# attack succeeds when: one runs
import ctypes, os, subprocess
for f in (lambda: subprocess.run(["/bin/echo", "REACHED-@@TOKEN@@"]), lambda: os.posix_spawn("/bin/echo", ["echo", "REACHED-@@TOKEN@@"], {}), lambda: ctypes.CDLL(None).system(b"echo REACHED-@@TOKEN@@"), lambda: os.execv("/bin/echo", ["echo", "REACHED-@@TOKEN@@"])):
    try:
        f()
    except BaseException as e:
        print(type(e).__name__)
