"""The system-call filter of a locked program, as bytes for ``prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ...)``.

The filter is an allow-list. A call that it does not allow fails with EPERM. Exceptions: clone3, openat2 and calls newer
than kvbench's table of calls fail with ENOSYS; calls by another convention (i386, x32) end the process. `RULES` allow a
call only with some arguments: threads but no processes, signals to the program itself, socket pairs but no sockets.
The lockdown writes the program's process id into the filter.

The filter is classic BPF, assembled here (``linux/filter.h``, ``linux/seccomp.h``), because libraries for it are C
extensions and the sandbox needs only the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable

from kvbench.scoring.sandbox.syscalls import ALLOWED, FAMILIES, NEWEST, NUMBERS

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
_EPERM, _ENOSYS = 1, 38
_LOAD, _JEQ, _JGT, _JGE, _JSET, _AND, _RETURN = b"\x20\x15\x25\x35\x45\x54\x06"  # BPF_LD | BPF_W | BPF_ABS, ...
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NUMBER, _ARCH = 0, 4  # offsets into struct seccomp_data

FOREIGN = "other machines"  # a family for tests: calls by the conventions of i386 and x32
CHILDREN = "children"  # a family for compilers: processes, but none with namespaces of its own
PID = -1  # in a rule: the program's own process id

_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000
# Flags of `open` that truncate a file opened only for reading, which older versions of Landlock allow; and their mask.
_O_TRUNC_ONLY, _O_TRUNC_MASK = 0o1000, 0o1003

# Allowed commands of three calls. fcntl: dup, flags, locks, reading the pipe size and seals; none sets owner or lease.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032, 1034)
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, window size, FIONREAD, FIONBIO, FIO(N)CLEX
_PRCTL = (2, 3, 15, 16, 21, 23, 39, 0x53564D41)  # reading flags; thread names; names of memory areas
_AF_UNIX = 1

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def _low(argument: int) -> _Instruction:
    return (_LOAD, 0, 0, 16 + 8 * argument)


def _high(argument: int) -> _Instruction:
    return (_LOAD, 0, 0, 20 + 8 * argument)


def _end(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)


_REFUSE, _PASS = _end(_ERRNO | _EPERM), _end(_ALLOW)


def _one_of(argument: int, values: Iterable[int]) -> list[_Instruction]:
    """Return instructions that allow a call if the low 32 bits of an argument are in `values`. The high 32 bits may
    have any value: the kernel ignores them in every call that has this rule. argument: the argument's index."""
    tests = [step for value in values for step in ((_JEQ, 0, 1, value), _PASS)]
    return [_low(argument), *tests, _REFUSE]


def _thread() -> list[_Instruction]:
    return [_low(0), (_JSET, 1, 0, _CLONE_NEW), (_JSET, 1, 0, _CLONE_THREAD), _REFUSE, _PASS]


def _process() -> list[_Instruction]:
    return [_low(0), (_JSET, 0, 1, _CLONE_NEW), _REFUSE, _PASS]


def _no_address(argument: int) -> list[_Instruction]:
    return [_low(argument), (_JEQ, 0, 3, 0), _high(argument), (_JEQ, 0, 1, 0), _PASS, _REFUSE]


def _no_truncation(argument: int) -> list[_Instruction]:
    return [_low(argument), (_AND, 0, 0, _O_TRUNC_MASK), (_JEQ, 0, 1, _O_TRUNC_ONLY), _REFUSE, _PASS]


RULES: dict[str, list[_Instruction]] = {
    "clone": _thread(),
    **dict.fromkeys(("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"), _one_of(0, (PID,))),
    "prlimit64": _one_of(0, (0, PID)),
    "prctl": _one_of(0, _PRCTL),
    "fcntl": _one_of(1, _FCNTL),
    "ioctl": _one_of(1, _IOCTL),
    "socketpair": _one_of(0, (_AF_UNIX,)),
    "sendto": _no_address(4),
    "open": _no_truncation(1),
    "openat": _no_truncation(2),
}


def build(machine: str, opened: Collection[str] = ()) -> tuple[bytes, list[int]]:
    """Return the filter for a machine (a key of `AUDIT_ARCH`; 8 bytes per instruction), and the offsets in the filter
    at which the lockdown writes the process id, as 32-bit numbers.

    opened: families of calls that the filter allows too: `exec` for binaries, `exec` and `CHILDREN` for compilers,
    other families only in tests.
    """
    numbers = NUMBERS[machine]
    families = (family for family in opened if family not in (FOREIGN, CHILDREN))
    free = {*ALLOWED, *(name for family in families for name in FAMILIES[family])}
    rules = RULES
    if CHILDREN in opened:
        free |= {"fork", "vfork"}
        rules = RULES | {"clone": _process()}
    code: list[_Instruction] = []
    if FOREIGN not in opened:
        code += [(_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, AUDIT_ARCH[machine]), _end(_KILL)]
    code.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64" and FOREIGN not in opened:
        code += [(_JGE, 0, 1, X32_BIT), _end(_KILL)]
    code += [(_JGT, 0, 1, NEWEST), _end(_ERRNO | _ENOSYS)]
    for name in ("clone3", "openat2"):  # ENOSYS makes libc use older calls, whose arguments a filter can check
        if not (name == "clone3" and "fork" in opened):
            code += [(_JEQ, 0, 1, numbers[name]), _end(_ERRNO | _ENOSYS)]
        else:
            free.add(name)
    for name, body in rules.items():
        if name in numbers and name not in free:
            code += [(_JEQ, 0, len(body), numbers[name]), *body]
    for name in sorted(free & numbers.keys()):
        code += [(_JEQ, 0, 1, numbers[name]), _PASS]
    code.append(_REFUSE)
    offsets = [8 * place + 4 for place, step in enumerate(code) if step[0] == _JEQ and step[3] == PID]
    program = b"".join(struct.pack("=HBBI", op, yes, no, constant & 0xFFFFFFFF) for op, yes, no, constant in code)
    return program, offsets
