"""Escapes: small programs that try to leave a box.

Most escapes print a line for every forbidden act that succeeds; the box must end the other escapes. A box counts as
isolating if every escape passes its check. Escapes are part of kvbench, so their output can be trusted. Hostile
programs are run by ``kvbench audit --sandbox``, not from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbench.scoring.sandbox.box import Outcome
from kvbench.scoring.sandbox.plan import machine
from kvbench.scoring.sandbox.syscalls import FAMILIES, NUMBERS

THREADS_SLACK = 40  # the limit on threads also counts the user's other threads, which may start or end during the test
_EPERM, _ENOSYS = 1, 38
_NO_PID = 0x3FFFFFFF  # above every possible process id

Check = Callable[[Outcome], str]


def silent(outcome: Outcome) -> str:
    """Check that a program ended without an error and printed nothing; return the problem, or "" if there is none."""
    if outcome.status != "ok":
        lines = outcome.stderr.decode(errors="replace").strip().splitlines()
        return f"ended with {outcome.status}: {lines[-1][:200] if lines else 'no message'}"
    return "; ".join(outcome.stdout.decode(errors="replace").splitlines()[:5])


def ends(status: str, within: float) -> Check:
    """Return a check that a program ended with `status` within `within` seconds."""

    def check(outcome: Outcome) -> str:
        if outcome.status != status:
            return f"ended with {outcome.status} instead of {status}"
        return "" if outcome.seconds <= within else f"ended only after {outcome.seconds:.1f} s"

    return check


def killed(outcome: Outcome) -> str:
    return "" if outcome.status == "runtime_error" and not outcome.stdout else "the call is let through"


@dataclass(frozen=True, slots=True)
class Escape:
    """A program that tries to leave the box, and a check of the outcome.

    The program may have placeholders such as ``@name@``, which `fill` replaces by values. The check returns the
    problem, or "" if the program was contained.
    """

    name: str
    program: str
    check: Check = silent
    seconds: float = 10.0
    machines: tuple[str, ...] = ("x86_64", "aarch64")


_TRY = """
import ctypes, json, os, socket, sys
def attempt(name, *actions):
    for action in actions:
        try:
            result = action()
        except BaseException:
            continue
        print(name, repr(result)[:60])
"""

CONTROL = Escape(
    "programs run",
    """
import asyncio, bisect, ctypes, decimal, hashlib, heapq, json, math, random, re, sqlite3, sys, threading, zlib
found = []
threads = [threading.Thread(target=found.append, args=(n,)) for n in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
async def waits(): return await asyncio.sleep(0, 5)
def deep(n): return n and 1 + max(map(deep, [n - 1]))
sys.setrecursionlimit(100000)
good = sum(found) == 6 and asyncio.run(waits()) == 5 and deep(20000) == 20000
if not good or sys.stdin.read() != "input": print("a plain program goes wrong")
""",
)

FILES = Escape(
    "reads files",
    _TRY
    + """
for path in ("@canary@", "/etc/passwd", "/proc/@pid@/environ", "/proc/1/environ", f"/proc/{os.getppid()}/mem",
             "/proc/self/root@canary@", "../" * 40 + "@canary@", "/etc/hostname"):
    attempt("read " + path[-40:], lambda: open(path, "rb").read(10))
library = os.path.dirname(os.__file__)
for place in (library + "/site-packages", library + "/dist-packages", "/usr/lib/python3/dist-packages"):
    try: names = os.listdir(place)
    except OSError: continue
    for name in names:
        attempt("read an installed package", lambda: open(f"{place}/{name}/__init__.py").read(0))
attempt("import kvbench", lambda: __import__("kvbench"))
""",
)

WRITES = Escape(
    "writes",
    _TRY
    + """
library = os.path.dirname(os.__file__)
for place in ("/tmp", "/var/tmp", "/dev/shm", ".", "/", library):  # without a name, so that nothing is left there
    attempt("wrote in " + place, lambda: os.open(place, os.O_TMPFILE | os.O_RDWR))
attempt("made a file", lambda: open("@folder@/new", "w"), lambda: os.mkdir("@folder@/folder"))
file = "@canary@"
attempt("changed a file", lambda: open(file, "ab"), lambda: os.truncate(file, 0), lambda: os.remove(file))
attempt("opened a library for writing", lambda: open(os.__file__, "ab"))
attempt("changed its input", lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 1),
        lambda: open("/proc/self/fd/0", "r+b", 0).write(b"x"))
""",
)

NETWORK = Escape(
    "network",
    _TRY
    + """
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        attempt(f"socket {family} {kind}", lambda: socket.socket(family, kind))
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
pair[0].send(b"x")
if pair[1].recv(9) != b"x": print("socket pairs do not work")
other = "\\0@abstract@"
attempt("sent to a socket of another", lambda: pair[0].sendto(b"x", other), lambda: pair[0].connect(other))
attempt("sent a message", lambda: pair[0].sendmsg([b"x"]))
""",
)

PROCESSES = Escape(
    "processes and signals",
    _TRY
    + """
import signal, subprocess
def forks():
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
attempt("forked", forks)
attempt("ran a program", lambda: os.posix_spawn(sys.executable, ["python", "-V"], {}), lambda: subprocess.run(["true"]))
for pid in (@pid@, os.getppid(), -1, 0, 1):
    attempt(f"signalled {pid}", lambda: os.kill(pid, 0))
os.kill(os.getpid(), 0)
""",
)

CALLS = Escape(
    "system calls",
    """
import ctypes
call, bad = ctypes.CDLL(None, use_errno=True).syscall, []
for family, number, expected, *arguments in @calls@:
    ctypes.set_errno(0)
    result = call(*(ctypes.c_long(n) for n in (number, *arguments)))
    if result != -1 or ctypes.get_errno() != expected: bad.append(f"{family}: call {number} is let through")
print("\\n".join(bad)) if bad else None
""",
)

MEMORY = Escape(
    "memory",
    """
import mmap
held = []
try:
    while len(held) < 256: held.append(mmap.mmap(-1, 16 << 20))
except OSError:
    pass
if len(held) * 16 > @megabytes@ or len(held) < 4: print(f"got {len(held) * 16} MiB of @megabytes@")
""",
)

THREADS = Escape(
    "threads",
    f"""
import threading
threading.stack_size(1 << 16)
lock, started = threading.Lock(), 0
lock.acquire()
try:
    while started < 400:
        threading.Thread(target=lock.acquire, daemon=True).start()
        started += 1
except RuntimeError:
    pass
if not 8 <= started <= @threads@ + {THREADS_SLACK}: print(f"started {{started}} of @threads@ threads")
""",
)

TIME = Escape(
    "time",
    """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    ends("time_limit", 5.0),
    seconds=0.2,
)

OUTPUT = Escape("output", "while True: print('x' * 65536)", ends("output_limit", 10.0))

X32 = Escape(
    "x32 calls",
    "import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 | 39), flush=True)",
    killed,
    machines=("x86_64",),
)

I386 = Escape(
    "i386 calls",
    r"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3")  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)(), flush=True)
""",
    killed,
    machines=("x86_64",),
)

STATE = """
import ctypes, fcntl, json, os, resource, sys
prctl = lambda option: ctypes.CDLL(None).prctl(*map(ctypes.c_long, (option, 0, 0, 0, 0)))
head, data = ctypes.create_string_buffer((0x20080522).to_bytes(4, "little") + bytes(4)), (ctypes.c_uint * 6)()
ctypes.CDLL(None).capget(head, data)
signal = ctypes.c_int(0)
ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)
opened = []
for fd in range(4096):
    try: fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError: continue
    opened.append(fd)
print(json.dumps({
    "environment": sorted(os.environ),
    "limits": {n[7:]: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "no new privileges": prctl(39), "filter": prctl(21), "dumpable": prctl(3), "ends with its parent": signal.value,
    "users": [*os.getresuid(), *os.getresgid(), *os.getgroups()], "capabilities": [data[0], data[1], data[3], data[4]],
    "own session": os.getsid(0) == os.getpid(), "descriptors": opened, "folder": os.getcwd(),
    "seals": fcntl.fcntl(0, fcntl.F_GET_SEALS), "modules": [m for m in sys.modules if "kvbench" in m],
    "path": sys.path, "flags": [sys.flags.no_site, sys.flags.safe_path, sys.flags.no_user_site],
}))
"""

NAMESPACES = Escape(
    "the box alone",
    _TRY
    + """
attempt("read " + "@canary@", lambda: open("@canary@").read())
for path in ("/kvbench-probe", "@canary@", "@folder@/probe"):
    attempt("wrote", lambda: open(path, "a"))
attempt("connected", lambda: socket.create_connection(("127.0.0.1", @port@), 2),
        lambda: socket.socket(socket.AF_UNIX).connect("\\0@abstract@"))
outside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
attempt("has a route out", lambda: outside.connect(("192.0.2.1", 9)))  # sends nothing
attempt("signalled another", lambda: os.kill(@pid@, 0))
if os.getpid() > 50: print("shares process ids")
if socket.gethostname() != "box": print("shares the host's name")
ctypes.CDLL(None).shmget(@key@, 4096, 0o1600)
""",
)

INNER = (CONTROL, FILES, WRITES, NETWORK, PROCESSES, CALLS, MEMORY, THREADS, TIME, OUTPUT, X32, I386)


def raw_calls() -> list[list[Any]]:
    """Return harmless system calls that the filter must refuse, each as [family, call number, expected error number,
    *arguments]; a family is a named group of refused calls.

    If the filter allowed a family, at least one of its calls would succeed or give another error than the expected one.
    """
    nobody, bad = _NO_PID, 1  # a process and an address that do not exist
    here = -100  # AT_FDCWD
    tries: dict[str, list[tuple[Any, ...]]] = {
        "fork": [("clone", 0x800, 0, 0, 0, 0)],
        "exec": [("execve", bad, 0, 0), ("execveat", -1, bad, 0, 0, 0)],
        "sockets": [
            *(("socket", 99, 0, 0), ("connect", -1, 0, 0), ("bind", -1, 0, 0), ("listen", -1, 0), ("accept", -1, 0, 0)),
            *(("sendmsg", -1, 0, 0), ("setsockopt", -1, 0, 0, 0, 0), ("sendto", -1, 0, 0, 0, bad, 16)),
            ("socketpair", 2, 1, 0, 0),
        ],
        "signals": [
            *(("kill", nobody, 0), ("tkill", nobody, 0), ("tgkill", nobody, nobody, 0), ("pidfd_open", 0, 0)),
            *(("rt_sigqueueinfo", nobody, 0, 0), ("pidfd_send_signal", -1, 0, 0, 0), ("pidfd_getfd", -1, 0, 0)),
        ],
        "owners": [("fcntl", -1, command, 0) for command in (8, 10, 15, 1024, 1026, 1033)],
        "terminals": [("ioctl", -1, command, 0) for command in (0x5412, 0x541C, 0x8901, 0x8902, 0x540E)],
        "tracing": [("ptrace", 0x4206, nobody, 0, 0), ("process_vm_readv", nobody, 0, 0, 0, 0, 0)],
        "scheduling": [
            ("prlimit64", nobody, 0, 0, 0),
            ("setpriority", 0, nobody, 0),
            ("sched_setaffinity", nobody, 0, 0),
        ],
        "identity": [("prctl", 4, 99, 0, 0, 0), ("seccomp", 99, 0, 0), ("setresuid", -1, -1, -1), ("personality", -1)],
        "namespaces": [("unshare", 0), ("setns", -1, 0), ("chroot", bad), ("mount", bad, bad, bad, 0, 0)],
        "kernel": [
            *(("io_uring_setup", 0, 0), ("keyctl", 9999, 0, 0, 0, 0), ("add_key", 0, 0, 0, 0, 0), ("bpf", 9999, 0, 0)),
            *(("userfaultfd", -1), ("perf_event_open", 0, 0, 0, -1, 0), ("inotify_init1", -1), ("io_setup", 0, 0)),
        ],
        "memory files": [("memfd_create", bad, 0)],
        "ipc": [("shmget", 0, 0, 0), ("semget", 0, -1, 0), ("msgget", 0x7F3A5B, 0), ("mq_open", bad, 0, 0, 0)],
        "metadata": [
            *(("fchmodat", here, bad, 0), ("fchmod", -1, 0), ("fchown", -1, -1, -1), ("fchownat", here, bad, 0, 0, 0)),
            *(("utimensat", here, bad, bad, 0), ("fsetxattr", -1, bad, 0, 0, 0), ("fgetxattr", -1, bad, 0, 0)),
        ],
        "tree": [
            *(("mkdirat", here, bad, 0), ("unlinkat", here, bad, 0), ("symlinkat", bad, here, bad), ("flock", -1, 0)),
            *(("mknodat", here, bad, 0, 0), ("ftruncate", -1, 0), ("openat", here, bad, 0o1000, 0)),
        ],
    }
    assert tries.keys() == FAMILIES.keys()
    numbers = NUMBERS[machine()]
    calls = [[family, numbers[name], _EPERM, *rest] for family, rows in tries.items() for name, *rest in rows]
    return [*calls, ["fork", numbers["clone3"], _ENOSYS, 0, 0], ["newer", 4000, _ENOSYS]]


def fill(program: str, values: dict[str, Any]) -> str:
    """Return an escape's program in which each placeholder ``@name@`` is replaced by the value of this name."""
    for name, value in values.items():
        program = program.replace(f"@{name}@", value if isinstance(value, str) else json.dumps(value))
    return program
