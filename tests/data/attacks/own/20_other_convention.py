# id: own/20_other_convention
# class: kernel
# mode: stdio
# check: marker
# expected-status: any
# tries: make calls in the convention of x32, where a filter that looks at x86-64 numbers alone is blind
# attack succeeds when: getpid or fork by that way works
import ctypes, os
L = ctypes.CDLL(None, use_errno=True)
if L.syscall(0x40000000 | 39) == os.getpid():
    print("REACHED-@@TOKEN@@", flush=True)
if L.syscall(0x40000000 | 57) >= 0:
    print("REACHED-@@TOKEN@@", flush=True)
