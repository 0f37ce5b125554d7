"""A setting takes one edit: a field added to `Settings` becomes flag, key, variable, record and model_args."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FIELD = '    warmth: int = engine(7, whole(1), "Tokens read to warm up. Default: 7.")\n'
ADDED = f"""
import importlib.util, sys, types
path = importlib.util.find_spec("kvbench.config.settings").origin
source = open(path, encoding="utf-8").read()
place = source.index("    keep_prompts: bool")
module = sys.modules["kvbench.config.settings"] = types.ModuleType("kvbench.config.settings")
exec(compile(source[:place] + {FIELD!r} + source[place:], path, "exec"), module.__dict__)
"""
HELP = "from kvbench.cli.app import main\nmain(['run', '--help'])\nassert 'torch' not in sys.modules\n"
VALUES = """
import json
from pathlib import Path
from kvbench.cli.request import build
from kvbench.config.layers import gather
from kvbench.config.run_config import RunConfig
from kvbench.console.problems import Problems
from kvbench.integrations.model_args import read

def config(typed={}, environ={}, file=None):
    problems = Problems()
    made = build(gather({"method": ["full"], "task": ["walk"]} | typed, environ, config=file), problems)
    problems.stop()
    return made

file = Path(sys.argv[1])
default, flag = config(), config({"warmth": "9"})
found = {
    "default": default.warmth,
    "flag": flag.warmth,
    "file": config(file=file).warmth,
    "variable": config(environ={"KVBENCH_WARMTH": "11"}).warmth,
    "record": flag.stored()["warmth"],
    "read back": RunConfig.from_dict(flag.stored()).warmth,
    "another run": default.hash() != flag.hash(),
    "model_args": read({"warmth": 13}, device=None, batch_size=None).run.warmth,
}
try:
    config({"warmth": "0"})
except Exception as error:
    found["wrong"] = str(error)
print(json.dumps(found))
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", ADDED + code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("wide")
def test_a_new_field_is_in_the_help() -> None:
    (line,) = (line for line in run(HELP).splitlines() if "--warmth" in line)
    assert "Tokens read to warm up. Default: 7." in line


def test_a_new_field_is_read_from_everywhere_and_recorded(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("warmth = 10\n")
    assert json.loads(run(VALUES, str(tmp_path / "c.toml"))) == {
        "default": 7,
        "flag": 9,
        "file": 10,
        "variable": 11,
        "record": 9,
        "read back": 9,
        "another run": True,
        "model_args": 13,
        "wrong": "--warmth must be 1 or more; got 0.",
    }


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
