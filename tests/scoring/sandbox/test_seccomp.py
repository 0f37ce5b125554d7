"""The filter, interpreted: what it says to a call, on both machines, without installing it."""

from __future__ import annotations

import struct
from itertools import chain

import pytest

from kvbench.scoring.sandbox.seccomp import AUDIT_ARCH, CHILDREN, FOREIGN, RULES, build
from kvbench.scoring.sandbox.syscalls import ALLOWED, FAMILIES, NEWEST, NUMBERS

ALLOW, EPERM, ENOSYS, KILL = "allow", "EPERM", "ENOSYS", "kill"
ANSWERS = {0x7FFF0000: ALLOW, 0x00050001: EPERM, 0x00050026: ENOSYS, 0x80000000: KILL}
PID = 4321
MACHINES = list(AUDIT_ARCH)


class Filter:
    """A filter with its process id filled in, and an interpreter for the instructions that it uses."""

    def __init__(self, machine: str, opened: tuple[str, ...] = ()) -> None:
        made, offsets = build(machine, opened)
        program = bytearray(made)
        for offset in offsets:
            struct.pack_into("=I", program, offset, PID)
        self.code = list(struct.iter_unpack("=HBBI", bytes(program)))
        self.arch, self.numbers = AUDIT_ARCH[machine], NUMBERS[machine]

    def says(self, call: str | int, *arguments: int, arch: int | None = None) -> str:
        number = self.numbers[call] if isinstance(call, str) else call
        six = [a & 0xFFFFFFFFFFFFFFFF for a in (*arguments, *[0] * 6)][:6]
        data = struct.pack("=IIQ6Q", number, self.arch if arch is None else arch, 0, *six)
        place = accumulator = 0
        while True:
            op, yes, no, constant = self.code[place]
            place += 1
            if op == 0x06:
                return ANSWERS[constant]
            if op == 0x20:
                (accumulator,) = struct.unpack_from("=I", data, constant)
            elif op == 0x54:
                accumulator &= constant
            else:
                tests = {
                    0x15: accumulator == constant,
                    0x25: accumulator > constant,
                    0x35: accumulator >= constant,
                    0x45: accumulator & constant,
                }
                place += yes if tests[op] else no


@pytest.mark.parametrize("machine", MACHINES)
def test_only_what_is_allowed_passes(machine: str) -> None:
    filter_ = Filter(machine)
    by_number = {number: name for name, number in NUMBERS[machine].items()}
    for number in range(NEWEST + 1):
        name = by_number.get(number)
        if name in RULES:
            continue
        expected = ENOSYS if name in ("clone3", "openat2") else ALLOW if name in ALLOWED else EPERM
        assert filter_.says(number) == expected, name or number
    assert filter_.says(NEWEST + 1) == filter_.says(4000) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_rules_by_argument(machine: str) -> None:
    says = Filter(machine).says
    thread = 0x3D0F00  # of pthread_create
    assert says("clone", thread) == ALLOW
    for flags in (17, 0x4111, thread & ~0x10000, thread | 0x10000000, thread | 0x40000000, thread | 0x20000):
        assert says("clone", flags) == EPERM
    for call in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        assert says(call, PID, 9) == ALLOW
        for other in (PID + 1, 1, 0, -1, -PID):
            assert says(call, other, 9) == EPERM
    assert [says("prlimit64", pid) for pid in (0, PID, 1, -1)] == [ALLOW, ALLOW, EPERM, EPERM]
    assert [says("socketpair", family) for family in (1, 2, 10, 16)] == [ALLOW, EPERM, EPERM, EPERM]
    assert [says("sendto", 3, 0, 1, 0, where, 16) for where in (0, 1, 1 << 40)] == [ALLOW, EPERM, EPERM]
    assert [says("fcntl", 0, c) for c in (1, 3, 1030, 8, 10, 15, 1024, 1026, 1031, 1033)] == [ALLOW] * 3 + [EPERM] * 7
    assert [says("ioctl", 0, c) for c in (0x5401, 0x541B, 0x5412, 0x541C, 0x8901)] == [ALLOW] * 2 + [EPERM] * 3
    assert [says("prctl", option) for option in (15, 3, 1, 4, 8, 22, 36, 38)] == [ALLOW] * 2 + [EPERM] * 6
    flags = (0, 0o100, 0o1101, 0o1102, 0o1000, 0o2001000)
    assert [says("openat", -100, 1, f) for f in flags] == [ALLOW] * 4 + [EPERM] * 2


def test_other_conventions_end_the_process() -> None:
    intel, arm = Filter("x86_64"), Filter("aarch64")
    assert intel.says(20, arch=0x40000003) == KILL  # i386
    assert arm.says(20, arch=0x40000028) == KILL  # 32-bit arm
    assert intel.says(0x40000000 | 39) == KILL  # x32
    assert intel.says(0xFFFFFFFF) == KILL
    assert Filter("x86_64", (FOREIGN,)).says(0x40000000 | 39) == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_opened_for_tests_of_the_selftest(machine: str, family: str) -> None:
    opened = Filter(machine, (family,))
    for name in FAMILIES[family]:
        if name in NUMBERS[machine]:
            assert opened.says(name, -1, -1, -1, -1, -1) == ALLOW, name


@pytest.mark.parametrize("machine", MACHINES)
def test_a_compiler_gets_children_without_namespaces(machine: str) -> None:
    says = Filter(machine, ("exec", CHILDREN)).says
    assert [says("clone", flags) for flags in (17, 0x4111, 0x3D0F00)] == [ALLOW] * 3
    assert [says("clone", 17 | new) for new in (0x20000, 0x02000000, 0x10000000, 0x40000000)] == [EPERM] * 4
    assert [says(call) for call in ("clone3", "execve", "unshare", "socket")] == [ENOSYS, ALLOW, EPERM, EPERM]
    assert says("kill", PID + 1, 9) == EPERM


def test_families_and_what_is_allowed_are_disjoint() -> None:
    denied = list(chain.from_iterable(FAMILIES.values()))
    assert len(set(denied)) == len(denied)
    assert not set(denied) & set(ALLOWED)
    assert set(RULES) <= set(denied)


def test_numbers_of_this_machine() -> None:
    """Against the kernel's own header, where it is installed."""
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    try:
        with open(header, encoding="ascii") as file:
            lines = [line.split() for line in file if line.startswith("#define __NR_")]
    except OSError:
        pytest.skip("no kernel headers")
    known = {words[1].removeprefix("__NR_"): int(words[2]) for words in lines}
    for name, number in NUMBERS["x86_64"].items():
        assert known[name] == number
