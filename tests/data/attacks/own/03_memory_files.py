# id: own/03_memory_files
# class: resource
# mode: stdio
# check: shmem,rss,disk
# expected-status: any
# tries: hold 1 GiB outside the address space: memfd_create, /dev/shm, SysV segments, a shared mapping
# attack succeeds when: memory beyond the limit is held
import ctypes, mmap, os, time
block, held = b"x" * (16 << 20), []
def memfd():
    fd = os.memfd_create("m")
    for _ in range(64):
        os.write(fd, block)
def shm():
    with open("/dev/shm/evil-@@TOKEN@@", "wb") as f:
        for _ in range(64):
            f.write(block)
def sysv():
    L = ctypes.CDLL(None)
    L.shmat.restype = ctypes.c_void_p
    i = L.shmget(@@SHMKEY@@, 1 << 30, 0o1600)
    p = L.shmat(i, None, 0)
    ctypes.memset(p, 1, 1 << 30)
def shared():
    for _ in range(64):
        held.append(mmap.mmap(-1, 16 << 20))
        held[-1].write(block)
for f in (memfd, shm, sysv, shared):
    try:
        f()
        print("held", f.__name__)
    except BaseException as e:
        print(type(e).__name__)
time.sleep(1)
