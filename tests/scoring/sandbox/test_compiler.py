"""A compiler in a box: what it can read, write and reach, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sandboxes import LOCKED, compiles

from kvbench.scoring.longproc import cpp
from kvbench.scoring.sandbox import BoxError, Limits, Sandbox, inside, toolchain
from kvbench.scoring.sandbox.plan import machine
from kvbench.scoring.sandbox.syscalls import NUMBERS
from kvbench.scoring.sandbox.tiers import Container, Tier, Unsafe

SECRET = b"expected output"
GXX = next(iter(toolchain.compilers()), "")
SLOW = """
template<int N, int M> struct T { enum { v = T<N - 1, 2 * M>::v + T<N - 1, 2 * M + 1>::v }; };
template<int M> struct T<0, M> { enum { v = 1 }; };
int main() { return T<28, 0>::v; }
"""


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file that every user may read, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "secret")
        file.write_bytes(SECRET)
        file.chmod(0o644)
        yield file


@compiles
@pytest.mark.parametrize("how", ['asm(".incbin \\"{}\\"");', '#include "{}"', 'asm(".include \\"{}\\"");'])
@pytest.mark.parametrize("tier", LOCKED)
def test_a_program_cannot_put_a_file_into_its_binary(tier: Tier, how: str, secret: Path) -> None:
    outcome = cpp.compiled(how.format(secret) + "\nint main() {}", Sandbox(tier, ""), GXX)
    assert outcome.status == "runtime_error"
    assert SECRET not in outcome.stdout + outcome.stderr


@compiles
def test_without_a_sandbox_it_can(secret: Path) -> None:
    outcome = cpp.compiled(f'asm(".incbin \\"{secret}\\"");\nint main() {{}}', Sandbox(Unsafe(), ""), GXX)
    assert SECRET in outcome.stdout


@pytest.mark.parametrize("tier", LOCKED)
def test_all_that_a_compiler_may_do(tier: Tier, secret: Path) -> None:
    """Here a script stands in for a compiler that a program has taken over."""
    program = f"""
    import ctypes, os, socket, subprocess
    def attempt(name, action):
        try:
            action()
            print(name, end=" ")
        except (OSError, subprocess.SubprocessError):
            pass
    attempt("run", lambda: subprocess.run(["/usr/bin/env", "true"], check=True))
    attempt("write", lambda: open("new", "w").write("x"))
    attempt("read-own", lambda: open("new").read())
    attempt("read-secret", lambda: open({str(secret)!r}).read())
    attempt("read-secret-elsewhere", lambda: subprocess.run(["/usr/bin/head", {str(secret)!r}], check=True))
    attempt("change-secret", lambda: open({str(secret)!r}, "a"))
    attempt("write-beside-secret", lambda: open({str(secret.parent / "new")!r}, "w"))
    attempt("write-tool", lambda: open("/usr/bin/new", "w"))
    attempt("link", lambda: os.symlink({str(secret)!r}, "link"))
    attempt("hard-link", lambda: os.link({str(secret)!r}, "hard"))
    attempt("read-passwords", lambda: open("/etc/passwd").read())
    def user_namespace():
        child = ctypes.CDLL(None).syscall({NUMBERS[machine()]["clone"]}, 0x10000011, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        if child < 0:
            raise OSError
    attempt("user-namespace", user_namespace)
    attempt("connect", lambda: socket.socket())
    attempt("kill", lambda: os.kill({os.getpid()}, 0))
    """
    with Sandbox(tier, "").compiler_box(toolchain.folders("/usr/bin/g++"), Limits()) as box:
        box.load(inside.text("script"), textwrap.dedent(program))
        outcome = box.run(seconds=20)
    assert outcome.stdout == b"run write read-own ", outcome.stderr
    assert os.listdir(secret.parent) == ["secret"]


@compiles
@pytest.mark.parametrize("tier", LOCKED)
def test_nothing_is_left_of_a_compiler_that_takes_too_long(
    tier: Tier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp, "COMPILE_SECONDS", 2.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cpp.compiled(SLOW, Sandbox(tier, ""), GXX).status == "time_limit"
    assert any(not _work_in(tmp_path) or time.sleep(0.1) for _ in range(100))
    assert list(tmp_path.iterdir()) == []


def _work_in(folder: Path) -> list[str]:
    """The processes whose working folder lies in this one."""
    found = []
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            found += [process] if os.readlink(f"/proc/{process}/cwd").startswith(str(folder)) else []
    return found


def test_the_image_of_a_container_has_no_compiler() -> None:
    with (
        pytest.raises(BoxError, match="tier container has no compiler"),
        Sandbox(Container(), "").compiler_box([], Limits()),
    ):
        pass


def test_the_folders_of_a_compiler(tmp_path: Path) -> None:
    prefix = tmp_path / "conda"
    for name in ("bin", "libexec", f"{machine()}-conda-linux-gnu", "share"):
        (prefix / name).mkdir(parents=True)
    (prefix / "bin" / "g++").touch(mode=0o755)
    (links := tmp_path / "links").mkdir()
    (links / "g++").symlink_to(prefix / "bin" / "g++")
    found = [path for path in toolchain.folders(str(links / "g++")) if path.startswith(str(tmp_path))]
    names = ("bin", "libexec", f"{machine()}-conda-linux-gnu")
    assert found == [str(links), *(str(prefix / name) for name in names)]
