# id: own/05_sysv_residue
# class: resource
# mode: stdio
# check: residue,marker
# expected-status: any
# tries: leave a SysV segment, a semaphore set, a message queue and a POSIX queue behind
# attack succeeds when: one of them exists afterwards
import ctypes
L = ctypes.CDLL(None, use_errno=True)
for f in (lambda: L.shmget(@@SHMKEY@@, 4096, 0o1666), lambda: L.semget(@@SHMKEY@@, 1, 0o1666), lambda: L.msgget(@@SHMKEY@@, 0o1666), lambda: L.mq_open(b"/evil-@@TOKEN@@", 0o102, 0o600, None)):
    if f() >= 0:
        print("REACHED-@@TOKEN@@")
