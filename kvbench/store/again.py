"""Finds the settings that the user must give again to continue a run, and writes command lines that repeat them.

These settings are plug-ins, task files, tasks whose data lm-eval loads from the hub, and the settings of a judge. A
judge's settings are, for example, its address and the name of the environment variable that holds its key. A run's
record states all these settings only as information for the user; kvbench never takes them from a record. Continuing a
run from someone else's folder therefore neither runs foreign code nor contacts a server.
"""

from __future__ import annotations

import shlex
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import KVBenchError
from kvbench.store import manifest

OUT = "results"  # where runs are when --out is not given
JUDGE = ("judge", "judge_model", "judge_key_env", "judge_mode")
CODE = ("plugin", "task_file")
SCORING = (*JUDGE, "unsafe_run_code")
AGAIN = (*CODE, *SCORING)
_USUAL = {"judge_key_env": "OPENAI_API_KEY", "judge_mode": "single"}


def used(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that the user must give again to continue it. info: the content of run.json.

    The user gives a setting by a flag or an environment variable. All settings but `task` may also stand in the
    configuration file. `unsafe_run_code` is never returned: without this setting, a continued run executes
    model-written programs in a sandbox or not at all.
    """
    environment = info["environment"]
    settings = {
        "plugin": environment.get("plugin"),
        "task_file": info["config"].get("task_file"),
    }
    if not names_no_judge(environment.get("judge")):
        settings |= {name: environment.get(name) for name in JUDGE if environment.get(name) != _USUAL.get(name)}
    tasks = environment.get("tasks", {})
    if any(task["data"].get("source") == "lm-eval" for task in tasks.values()):  # loaded from the hub by lm-eval
        settings["task"] = list(tasks)
    return {name: value for name, value in settings.items() if value}


def names_no_judge(judge: str | None) -> bool:
    """Return whether this value of ``--judge`` means that answers are only stored and no judge is contacted."""
    return judge is None or judge.strip().lower() == "none"


def resume_command(run_dir: Path) -> str:
    """Return the command that continues a run. The command repeats the settings that the user must give again (`used`),
    unless the run's record cannot be read."""
    try:
        again = used(manifest.read(run_dir))
    except KVBenchError:  # the folder or its disk is gone; the rest of the command is still right
        again = {}
    return line(["kvbench", "run", "--resume", *_place(run_dir), *words(again)])


def repair_command(run_dir: Path) -> str:
    """Return the command that makes the tables of a run again. The command needs no settings."""
    return line(["kvbench", "repair", *_place(run_dir)])


def _place(run_dir: Path) -> list[str]:
    """Return the arguments that name a run: its name, and its results folder if this is not the default folder."""
    return [run_dir.name, *([] if run_dir.parent == Path(OUT) else ["--out", str(run_dir.parent)])]


def words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as options of a command line, such as ["--plugin", "mine.py"]."""
    typed: list[str] = []
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(one, bool):
                typed += [option] * one
            else:  # put = between an option and a value that itself looks like an option
                typed += [f"{option}={one}"] if str(one).startswith("-") else [option, str(one)]
    return typed


def line(command: Iterable[str]) -> str:
    r"""Return a command as one line for a shell. Control characters become escapes, as in ``$'a\x1bb'``."""
    return " ".join(_quote(word) for word in command)


def _quote(word: str) -> str:
    if not any(_is_control(character) for character in word):
        return shlex.quote(word)
    return "$'" + "".join(_escape(character) for character in word) + "'"


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escape(character: str) -> str:
    code = ord(character)
    if character in "\\'":
        return f"\\{character}"
    if not _is_control(character):
        return character
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
