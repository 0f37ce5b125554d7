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
MOVED = ("model", "revision", "chat_template", "device")  # a continued run may have other values than `config` states
DATA = ("data_revision", "allow_data_mismatch", "keep_prompts")  # or than `environment` states
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


def in_force(info: Mapping[str, Any], config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user must give again to continue a run as the present command does. These are the
    settings of `used` with their present values, and settings whose present value is not the recorded one.

    info: the content of run.json. config: the present settings. environment: the record that a new run would have.
    """
    began = info["environment"]
    settings = used({"config": config, "environment": environment})
    if environment.get("unsafe_run_code"):
        settings["unsafe_run_code"] = True
    for names, now, recorded in ((MOVED, config, info["config"]), ((*DATA, *JUDGE), environment, began)):
        for name in names:
            was = recorded.get(name) or _USUAL.get(name)
            if (value := now.get(name)) not in (None, was):
                settings[name] = value
    places = [stated.get("data") or stated.get("data_variable") for stated in (environment, began)]
    if places[0] not in (None, places[1]):
        settings["data"] = places[0]
    return settings


def resume_command(run_dir: Path, settings: Mapping[str, Any] | None = None) -> str:
    """Return the command that continues a run. settings: those that the command repeats; None: the recorded settings
    that the user must give again (`used`), or no settings if the run's record cannot be read."""
    if settings is None:
        try:
            settings = used(manifest.read(run_dir))
        except KVBenchError:  # the folder or its disk is gone; the rest of the command is still right
            settings = {}
    return line(["kvbench", "run", "--resume", *_place(run_dir), *words(settings)])


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
