"""Programs in a box: what they get, how they end, and what is left of them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sandboxes import LOCKED, run

from kvbench.scoring.sandbox import BoxError, Limits, inside
from kvbench.scoring.sandbox.box import Box
from kvbench.scoring.sandbox.tiers import Landlock, Tier, Unsafe

LIBC, SET_CHILD_SUBREAPER = ctypes.CDLL(None), 36

TIERS = [*LOCKED, pytest.param(Unsafe(), id="none")]

ANSWERS = """
def setup(options):
    pass

def main(program, ask, tell):
    tell(b"ready")
    seen = {}
    while (question := ask()) is not None:
        exec(program, {"question": question, "tell": tell, "seen": seen})
    return 0
"""


@pytest.mark.parametrize("tier", TIERS)
class TestOutcomes:
    def test_output_input_and_exit_code(self, tier: Tier) -> None:
        done = run(
            tier, "import sys\nprint(sys.stdin.read()[::-1])\nsys.stderr.write('e')\nsys.exit(3)", "xyé".encode()
        )
        assert (done.status, done.code) == ("runtime_error", 3)
        assert (done.stdout.decode(), done.stderr) == ("éyx\n", b"e")
        assert done.peak > 1 << 20

    def test_standard_input_as_a_file(self, tier: Tier) -> None:
        program = """
        import io, pathlib
        print(input())
        print(open("/dev/stdin").read())
        """
        assert run(tier, program, b"a", prelude="from io import *").stdout == b"a\n\n"
        for expression in (
            "open('/dev/stdin')",
            "io.open('/dev/stdin', encoding='utf-8')",
            "pathlib.Path('/dev/stdin').open()",
            "open(file='/dev/fd/0')",
        ):
            program = f"import io, pathlib\nwith {expression} as stream:\n    print([*stream])"
            assert run(tier, program, b"a\nb", prelude="from io import *").stdout == b"['a\\n', 'b']\n"

    def test_open_leaks_no_descriptor_and_is_no_method(self, tier: Tier) -> None:
        program = """
        import os
        class Streams:
            source = open
        for mode in ("zz", "zz", "r"):
            try:
                with Streams().source("/dev/stdin", mode) as stream:
                    print(stream.fileno())
            except ValueError as error:
                print(error)
        print(os.dup(0))
        """
        lines = run(tier, program, b"a").stdout.decode().splitlines()
        assert lines[:2] == ["invalid mode: 'zz'"] * 2
        assert lines[2] == lines[3]

    @pytest.mark.parametrize(
        ("program", "status"),
        [
            ("print(1)", "ok"),
            ("exit()", "ok"),
            ("raise SystemExit('text')", "runtime_error"),
            ("1/0", "runtime_error"),
            ("x = (", "runtime_error"),
            ("import os; os._exit(0)", "ok"),
            ("import ctypes; ctypes.string_at(0)", "runtime_error"),
            ("import os; os.kill(os.getpid(), 9)", "runtime_error"),
            ("while True: pass", "time_limit"),
            ("import time; time.sleep(60)", "time_limit"),
            ("while True: print('x' * 10000)", "output_limit"),
            ("import os\nwhile True: os.write(2, b'x' * 10000)", "output_limit"),
            ("x = bytearray(2 << 30)", "memory_limit"),
        ],
    )
    def test_status(self, tier: Tier, program: str, status: str) -> None:
        assert run(tier, program, seconds=0.4 if status == "time_limit" else 10).status == status

    def test_a_script_ends_as_scripts_do(self, tier: Tier) -> None:
        """Threads are waited for, exit functions run, and files that nobody closed are written."""
        program = """
        import atexit, os, threading, time
        late = open(1, "w", closefd=False)
        late.write("late ")
        atexit.register(lambda: os.write(1, b"exit "))
        threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"thread "))).start()
        """
        assert run(tier, program).stdout == b"thread exit late "

    def test_a_prelude_and_its_names(self, tier: Tier) -> None:
        done = run(
            tier, "print(stdin.readline().strip(), gcd(4, 6))", b"ab\n", prelude="from sys import *\nfrom math import *"
        )
        assert done.stdout == b"ab 2\n"

    def test_large_input_that_nobody_reads(self, tier: Tier) -> None:
        assert run(tier, "import os\nos.close(0)\nprint(1)", b"x" * (8 << 20)).stdout == b"1\n"

    def test_questions_and_answers(self, tier: Tier) -> None:
        with Box(tier, Limits()) as box:
            box.load(ANSWERS, "seen[question] = 1\ntell(b'%d ' % len(seen) + question)")
            assert box.open(seconds=5, total=20).answer == b"ready"
            big = os.urandom(1 << 19)
            assert [box.ask(q, seconds=5).answer for q in (b"a", b"b", big)] == [b"1 a", b"2 b", b"3 " + big]
            assert box.close_program().peak > 1 << 20
            box.load(ANSWERS, "import os; os._exit(4)")
            box.open(seconds=5, total=20)
            assert (done := box.ask(b"q", seconds=5)).status == "runtime_error"
            assert done.code == 4
            box.load(ANSWERS, "while True: pass")
            box.open(seconds=5, total=20)
            assert box.ask(b"q", seconds=0.2).status == "time_limit"


@pytest.mark.parametrize("tier", LOCKED)
class TestLimits:
    def test_each_program_its_own(self, tier: Tier) -> None:
        """Two runs in one box know nothing of each other."""
        with Box(tier, Limits()) as box:
            box.load(inside.text("script"), "import builtins\nprint(hasattr(builtins, 'mark'))\nbuiltins.mark = 1")
            assert [box.run(seconds=5).stdout for _ in range(2)] == [b"False\n"] * 2

    def test_memory_threads_and_recursion(self, tier: Tier) -> None:
        program = """
        import functools, sys, threading
        sys.setrecursionlimit(10**6)
        @functools.lru_cache(None)
        def down(n):
            return 0 if n == 0 else 1 + down(n - 1)
        print(down(40000))
        threading.stack_size(1 << 27)
        t = threading.Thread(target=lambda: print(down(41000)))
        t.start(); t.join()
        """
        assert run(tier, program).stdout == b"40000\n41000\n"

    def test_nothing_is_writable_and_little_is_there(self, tier: Tier) -> None:
        program = """
        import os
        for place in ("new", "/tmp/new", "/dev/shm/new", "/new"):
            try:
                open(place, "w")
                print(place)
            except OSError:
                pass
        print(sorted(os.environ), os.getcwd(), open("/dev/null", "w").write("x"))
        """
        assert run(tier, program).stdout == b"['OMP_NUM_THREADS'] / 1\n"

    def test_an_allowed_package_and_nothing_beside_it(self, tier: Tier) -> None:
        program = (
            "import numpy\nprint(numpy.arange(3).sum())\ntry:\n    import scipy\nexcept ImportError as e:\n    print(e)"
        )
        with Box(tier, Limits(), packages=("numpy",)) as box:
            box.load(inside.text("script"), program)
            done = box.run(seconds=20)
        assert done.stdout == b"3\nNo module named 'scipy'\n", done.stderr

    def test_the_cpu_limit_is_the_last_resort(self, tier: Tier) -> None:
        done = run(tier, "import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))", seconds=2.5)
        assert done.stdout == b"(4, 5)\n"

    def test_many_programs_leave_nothing(
        self, tier: Tier, orphans: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        before = set(_below(os.getpid()))
        for _ in range(3):
            run(
                tier,
                "import threading, time\n[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(5)]",
                seconds=0.2,
            )
        assert _end(lambda: [pid for pid in _below(os.getpid()) if pid not in before])
        assert list(tmp_path.iterdir()) == []


@pytest.fixture
def orphans() -> Iterator[None]:
    """Give this process every descendant whose parent ends: `_below` then sees all of them, and no other test's."""
    assert LIBC.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    before = set(_below(os.getpid()))
    yield
    assert LIBC.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    for pid in set(_below(os.getpid())) - before:
        with contextlib.suppress(ChildProcessError):  # a grandchild; its parent waits for it
            os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("tier", LOCKED)
def test_a_box_dies_with_the_process_that_made_it(tier: Tier) -> None:
    code = (
        "import sys, time\n"
        "from kvbench.scoring.sandbox import Limits, inside\n"
        "from kvbench.scoring.sandbox.box import Box\n"
        f"from kvbench.scoring.sandbox.tiers import {type(tier).__name__} as Tier\n"
        "box = Box(Tier(), Limits())\n"
        "box.load(inside.text('script'), 'import time; time.sleep(100)')\n"
        "print(box._process.pid, flush=True)\n"
        "box.run(seconds=100)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    box = int(holder.stdout.readline())
    time.sleep(0.3)
    family = [box, *_below(box)]
    assert len(family) > 1
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert _end(lambda: family), "something outlives the grader"


def _end(processes: Callable[[], list[int]]) -> bool:
    """Whether all end within five seconds: the kernel takes down a killed box's processes one after another."""
    for _ in range(100):
        if not any(_alive(pid) for pid in processes()):
            return True
        time.sleep(0.05)
    return False


def _below(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process or its thread has ended
            found += [int(p) for p in children.read_text().split()]
    return found + [q for p in found for q in _below(p)]


def _alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


class TestFailures:
    """What is wrong with the box is never taken for what is wrong with the program."""

    def test_no_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Landlock, "command", lambda self, plan: ["/nonexistent/python"])
        with pytest.raises(BoxError, match=r"tier landlock cannot be started: No such file"):
            Box(Landlock(), Limits())

    def test_no_file_for_its_errors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The working directory, which was made before, is deleted."""
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda: os.open("/nonexistent", os.O_RDONLY))
        with pytest.raises(BoxError, match=r"tier none cannot be started: No such file"):
            Box(Unsafe(), Limits())
        assert not [*tmp_path.iterdir()]

    def test_a_command_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        command = [sys.executable, "-c", "import sys; sys.exit('no permissions here')"]
        monkeypatch.setattr(Landlock, "command", lambda self, plan: command)
        with pytest.raises(BoxError, match="no permissions here"):
            Box(Landlock(), Limits())

    def test_a_step_that_fails(self) -> None:
        plan = Unsafe().plan(Limits())
        bad = dataclasses.replace(plan, inner=(*plan.inner, ("limit", ["UNHEARD_OF", 1])))
        with Box(Unsafe(), Limits(), plan=bad) as box:
            box.load(inside.text("script"), "print('ran')")
            with pytest.raises(BoxError, match="lockdown step limit failed"):
                box.run(seconds=5)

    def test_the_driver_dies(self) -> None:
        with Box(Unsafe(), Limits()) as box:
            box.load(inside.text("script"), "print(1)")
            box._process.kill()
            with pytest.raises(BoxError, match="driver"):
                box.run(seconds=5)
