"""The container tier, with a command in place of docker that runs what it is given in the same place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvbench.scoring.sandbox import Limits, inside
from kvbench.scoring.sandbox.box import Box, BoxError
from kvbench.scoring.sandbox.selection import Sandbox, _kept
from kvbench.scoring.sandbox.tiers import Container, Landlock

ENGINE = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    start = sys.argv.index("python3")
    os.execv({python!r}, [{python!r}, *sys.argv[start + 1 :]])
sys.exit({code})
"""

pytestmark = pytest.mark.skipif(bool(Landlock().missing()), reason=Landlock().missing())


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def install(code: int = 0) -> Path:
        log = tmp_path / "log"
        file = tmp_path / "docker"
        file.write_text(ENGINE.format(python=sys.executable, log=str(log), code=code))
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return log

    return install


def _calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_command(engine) -> None:
    log = engine()
    tier = Container()
    assert tier.missing() == ""
    with Box(tier, Limits(memory=1 << 29)) as box:
        box.load(inside.text("script"), "print(input())")
        assert box.run(b"7\n", seconds=5).stdout == b"7\n"
    words = next(call for call in _calls(log) if call[0] == "run")
    line = " ".join(words[: words.index("python3")])
    for part in (
        *("run --rm --interactive --pull never", "--network none", "--read-only", "--cap-drop ALL"),
        *("--user 65534:65534", "--pids-limit 66", f"--memory {768 << 20}"),
        *(f"--memory-swap {768 << 20}", f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"),
    ):
        assert part in line


def test_one_container_for_many_programs(engine) -> None:
    log = engine()
    tier = Container()
    assert tier.missing() == ""
    sandbox = Sandbox(tier, "digest")
    for number in range(3):
        with sandbox.box() as box:
            box.load(inside.text("script"), f"print({number})")
            assert box.run(seconds=5).stdout == f"{number}\n".encode()
    assert sum(call[0] == "run" for call in _calls(log)) == 1
    with sandbox.box() as box:
        box._process.kill()
    with pytest.raises(BoxError), sandbox.box() as box:  # a broken one is not used again
        box.run(seconds=5)
    with sandbox.box() as box:
        box.load(inside.text("script"), "print(4)")
        assert box.run(seconds=5).stdout == b"4\n"
        box.close()
    assert sum(call[0] == "run" for call in _calls(log)) == 2
    _kept.boxes.clear()


def test_why_it_is_missing(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(engine(code=1).parent))
    assert Container().missing() == "docker does not answer"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert Container().missing() == "no docker or podman"
