# id: own/06_io_uring
# class: kernel
# mode: stdio
# check: marker
# expected-status: any
# tries: set up io_uring, bpf, userfaultfd, perf, keys, fanotify: ways around a filter of single calls
# attack succeeds when: one of them gives a descriptor
import ctypes
L = ctypes.CDLL(None, use_errno=True)
buf = ctypes.create_string_buffer(256)
for n, args in ((425, (8, buf)), (321, (0, buf, 72)), (323, (1,)), (298, (buf, 0, -1, -1, 0)), (300, (0, 0)), (250, (0, -3, 1)), (447, (0,)), (294, (0,))):
    if L.syscall(n, *args) >= 0:
        print("REACHED-@@TOKEN@@", n)
