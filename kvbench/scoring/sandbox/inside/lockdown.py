"""The steps of a lockdown, by which a process gives up its rights, and the Landlock rule set.

The driver must make the rule set before the fork. The order and the arguments of the steps come from
`kvbench.scoring.sandbox.plan`. A step that does not work raises an error; then no program is run. Outside Linux, a
limit that cannot be set is left out instead.
"""

import base64
import ctypes
import fcntl
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

LINUX = sys.platform == "linux"
STATUS = 5  # the last descriptor that a child keeps
DRIVER = os.getpid()
ruleset = -1  # descriptor of the Landlock rule set; -1 before `make_ruleset`

_libc = ctypes.CDLL(None, use_errno=True)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of Landlock, the same on every machine
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_REG, _TRUNCATE = (1 << bit for bit in (0, 1, 2, 3, 8, 14))
_SETUID_KEPT = ("=6I", 4, 4, 0, 0, 0, 0)  # CAP_DAC_READ_SEARCH, effective and permitted


def call(function: Any, *arguments: Any) -> int:
    """Call a C function with integers as longs. Raises OSError if it fails."""
    result: int = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(option: int, *arguments: Any) -> None:
    call(_libc.prctl, option, *arguments, *(0 for _ in range(4 - len(arguments))))


# --- steps, run in the child ------------------------------------------------------------------------------------------


def limit(value: tuple[str, int]) -> None:
    """Set a resource limit, [name, size], that the process cannot raise again."""
    name, size = value
    which = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(which)[1]
    last = size + (name == "CPU")  # the soft limit ends with SIGXCPU, the hard one cannot be caught
    if hard != resource.RLIM_INFINITY:
        size, last = min(size, hard), min(last, hard)
    try:
        resource.setrlimit(which, (size, last))
    except (ValueError, OSError):
        if LINUX:
            raise  # elsewhere some limits exist in name only


def environment(_: None) -> None:
    os.environ.clear()
    os.environ["OMP_NUM_THREADS"] = "1"


def session(_: None) -> None:
    os.setsid()


def user(value: tuple[int, bool]) -> None:
    """Become a user who owns no process and no file. value: uid, and whether to keep the right to read all files. An
    interpreter in root's private home needs that right; Landlock still limits which files it reaches."""
    uid, reads = value
    if reads:
        prctl(8, 1)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if reads:
        header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))  # _LINUX_CAPABILITY_VERSION_3
        call(_libc.capset, header, ctypes.create_string_buffer(struct.pack(*_SETUID_KEPT)))


def parent(_: None) -> None:
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != DRIVER:
        raise OSError("the driver is gone")


def privileges(_: None) -> None:
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS


def landlock(_: Any) -> None:
    call(_libc.syscall, _RESTRICT_SELF, ruleset, 0)


def descriptors(_: None) -> None:
    os.closerange(STATUS + 1, 4096)


def seccomp(value: tuple[str, list[int]]) -> None:
    """Install a system-call filter. value: the filter's program in base64, and the offsets at which this step writes
    the process's id."""
    program = bytearray(base64.b64decode(value[0]))
    for offset in value[1]:
        struct.pack_into("=I", program, offset, os.getpid())
    code = ctypes.create_string_buffer(bytes(program), len(program))
    prctl(22, 2, ctypes.create_string_buffer(struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))))


STEPS: dict[str, Callable[[Any], None]] = {
    step.__name__: step
    for step in (limit, environment, session, user, parent, privileges, landlock, descriptors, seccomp)
}


# --- made before the fork ---------------------------------------------------------------------------------------------


def make_ruleset(value: dict[str, Any]) -> None:
    """Make a Landlock rule set: only the standard library, system libraries, a few devices and the paths under "whole"
    may be read.

    Files and folders in a library folder are allowed one by one, so that installed packages there stay hidden. value:
    under "libraries" the folders of system libraries, under "whole" the paths that are allowed with all their content.
    "work" is "" or, for a compiler, a folder in which files may be made; then what may be read may also be executed.
    """
    global ruleset
    version = call(_libc.syscall, _CREATE_RULESET, 0, 0, 1)
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1  # what this kernel can restrict
    attributes = struct.pack("=QQQ", handled, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call(_libc.syscall, _CREATE_RULESET, ctypes.create_string_buffer(attributes), len(attributes), 0)
    library = os.path.dirname(os.__file__)
    parts = [e.path for e in os.scandir(library) if e.name not in ("site-packages", "dist-packages", "__pycache__")]
    parts += [e.path for e in os.scandir(os.path.dirname(library)) if ".so" in e.name]
    for folder in value["libraries"]:
        if os.path.isdir(folder):
            parts += [e.path for e in os.scandir(folder) if not e.name.startswith("python")]
    parts += value["whole"]
    work = value["work"]
    rules = [(path, _READ_FILE | _READ_DIR | (_EXECUTE if work else 0)) for path in parts]
    rules += [(f"{library}/__pycache__", _READ_FILE), (library, _READ_DIR)]
    rules += [("/dev/null", _READ_FILE | _WRITE_FILE), ("/dev/zero", _READ_FILE), ("/dev/urandom", _READ_FILE)]
    rules += [(work, (_READ_FILE | _WRITE_FILE | _MAKE_REG | _TRUNCATE) & handled)] if work else []
    for path, access in rules:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not on this system
        if not os.path.isdir(path):
            access &= ~_READ_DIR
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, place))
        call(_libc.syscall, _ADD_RULE, ruleset, 1, rule, 0)  # LANDLOCK_RULE_PATH_BENEATH
        os.close(place)


class Packages:
    """An import finder that finds only the packages that a task allows by name."""

    def __init__(self) -> None:
        self.specs: dict[str, Any] = {}

    def add(self, name: str, folder: str) -> None:
        import importlib.util  # here, because an import at the top would slow the start of every program

        start = os.path.join(folder, "__init__.py")
        self.specs[name] = importlib.util.spec_from_file_location(name, start, submodule_search_locations=[folder])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return self.specs.get(name)


def sealed(data: bytes, seals: bool) -> int:
    """Put the program's input (`data`) into a file in memory, and return the file's descriptor. seals: make the file
    unchangeable. Outside Linux, the file is on the disk, without a name."""
    if not LINUX:
        import tempfile

        with tempfile.TemporaryFile() as plain:
            plain.write(data)
            plain.seek(0)
            return os.dup(plain.fileno())
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    if seals:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | 1)
    return file
