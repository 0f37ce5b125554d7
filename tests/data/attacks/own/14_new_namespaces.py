# id: own/14_new_namespaces
# class: kernel
# mode: stdio
# check: marker
# expected-status: any
# tries: become root of a user namespace, enter others, mount, change the root
# attack succeeds when: one of the calls works
import ctypes, os
L = ctypes.CDLL(None, use_errno=True)
for f in (lambda: L.unshare(0x10000000), lambda: L.unshare(0x20000), lambda: L.unshare(0x40000000), lambda: L.chroot(b"/"), lambda: L.mount(b"x", b"/", b"tmpfs", 0, None), lambda: L.syscall(428, -100, b"/", 1)):
    if f() >= 0:
        print("REACHED-@@TOKEN@@")
