"""Starting the command line: help and lists import no command but the one asked for, and nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvbench.cli.app import _Group
from kvbench.cli.index import COMMANDS, load

HEAVY = ("torch", "transformers", "numpy", "pandas", "pyarrow", "scipy", "datasets", "httpx", "huggingface_hub")
IMPORTED = """
import contextlib, io, json, sys
from kvbench.cli.app import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]))
"""


def imported(*argv: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", IMPORTED, *argv], capture_output=True, text=True, timeout=300)
    code, modules = json.loads(done.stdout)
    assert code == 0, done.stderr
    return set(modules)


@pytest.fixture(scope="module")
def of_help() -> set[str]:
    return imported("--help")


@pytest.mark.parametrize("line", ["list methods", "list tasks", "run --help", "report --help", "train --help"])
def test_a_light_command_imports_nothing_heavy_and_no_other_command(line: str) -> None:
    modules = imported(*line.split())
    assert not modules & {*HEAVY, "asyncio"}
    files = {name.split(".")[3] for name in modules if name.startswith("kvbench.cli.commands.")}
    assert files <= {line.split()[0]}


def test_help_imports_no_command(of_help: set[str]) -> None:
    assert not of_help & {*HEAVY, "asyncio"}
    own = {name for name in of_help if name.startswith("kvbench")}
    assert own <= {
        "kvbench", "kvbench.cli", "kvbench.cli.app", "kvbench.cli.commands", "kvbench.cli.index", "kvbench.errors",
        "kvbench.console", "kvbench.console.terminal", "kvbench.console.faults", "kvbench.console.signals",
        "kvbench.console.streams",
    }  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_the_commands_say(name: str) -> None:
    command = load(name, _Group)
    assert command.name == name
    paragraph = (command.help or "").strip().split("\n\n")[0]
    assert " ".join(paragraph.split()) == COMMANDS[name]
