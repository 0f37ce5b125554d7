"""Finds the settings of a continued run. Most come from the run's record (run.json); the user must give the others
again.

A run's folder may come from a stranger, so kvbench does not take every setting from the record. It takes the settings
that determine what is in the rows. Other settings decide which code kvbench runs, where it sends data, and which
environment variable holds a key. kvbench takes these from the user's command line, environment or configuration file,
and only shows their recorded values. A file that the user gives again must have the hash that the record states.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvbench.cli.request import Builder, member_name, refuse_secrets
from kvbench.config.layers import Gathered, Given
from kvbench.config.parsers import parse
from kvbench.config.plugins import check_same, hashed, load_plugins
from kvbench.config.run_config import MethodChoice, RunConfig
from kvbench.config.settings import OPERATIONAL, PARSERS, SOURCES
from kvbench.console.problems import Problems
from kvbench.console.redact import HIDDEN, hide_keys
from kvbench.errors import NEW_RUN, SetupError, UserError, bare, few, quote
from kvbench.eviction import choose
from kvbench.eviction.budget import label
from kvbench.runner.workload import template_hash
from kvbench.sources import hub, models
from kvbench.store import again, existing, manifest

KEEPS = "A resumed run keeps its settings."
# A configuration file may give these to a continued run.
FREE = (*again.AGAIN, *SOURCES, "keep_prompts", *manifest.HOST)
TO_ASK = (*again.CODE, "chat_template", "task")  # the user gives these again, as prompts depend on them


def continued(
    out: Path,
    name: str,
    gathered: Gathered,
    *,
    needed: Collection[str] = (*TO_ASK, *again.SCORING),
    more_plugins: bool = False,
) -> RunConfig:
    """Return the settings of an existing run, from the run's record and from the settings that the user gave again.

    needed: settings that the user must give again if the run used them. more_plugins: allow plug-ins that the run did
    not have. Raises UserError if a needed setting is missing, or if a value that the user gave differs from the
    run's (see `_check_typed` for exceptions). Raises another KVBenchError for a damaged record or a missing model
    folder.
    """
    _check_layers(gathered)
    refuse_secrets(gathered)
    record = manifest.read(existing(out, name))
    given = {
        key: parse(typed.source, PARSERS[key], typed.value)
        for key in PARSERS
        if key in FREE and (typed := gathered.first(key))
    }
    stored = _stored(record)
    if stored.get("chat_template") and (typed := gathered.typed("chat_template")):
        given["chat_template"] = parse(typed.source, PARSERS["chat_template"], typed.value)
    _check_again(name, record, given, gathered, needed)
    _check_template(name, (stored | given).get("chat_template"), record)
    if "plugin" in given:
        check_same(hashed(given["plugin"]), record["environment"].get("plugins") or (), name, more=more_plugins)
    if "task_file" in given:
        _check_task_file(name, given["task_file"], record)
    load_plugins(given.get("plugin", ()))
    config = _config(out / name, stored | given)
    config = dataclasses.replace(
        config,
        moved_to=_moved_to(name, config.model, record, gathered),
        revision=_commit(record, gathered) or config.revision,
    )
    _check_typed(config, gathered)
    return config


def asked(config: RunConfig, gathered: Gathered) -> set[str]:
    """Return the model and the tasks that the user named, with flags or environment variables of this command. kvbench
    asks the hub only for these names, never for a name that comes only from a run's record."""
    named = {config.model} if gathered.typed("model") else set()
    return named | (set(config.tasks) if gathered.typed("task") else set())


def _check_layers(gathered: Gathered) -> None:
    if gathered.blocks:
        raise UserError(f"[[grid]] cannot be given for an existing run. {KEEPS}")
    for layer in gathered.files:
        for key, given in layer.items():
            if key not in FREE:
                where = given.source.removesuffix(f": {quote(key)}")
                raise UserError(f"{where}: {quote(key)} cannot be given for an existing run. {KEEPS}")
    for key in ("method_opt", "protect"):
        if (typed := gathered.typed(key)) is not None:
            raise UserError(f"{typed.source} cannot be given for an existing run. {KEEPS}")


def _stored(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that kvbench takes from a run's record, so that the user need not give these settings
    again."""
    environment = record["environment"]
    stored = record["config"] | {key: environment.get(key) for key in OPERATIONAL}
    stored = {key: value for key, value in stored.items() if key not in again.AGAIN}
    if stored["data"] is None and not os.environ.get("KVBENCH_DATA"):
        stored["data"] = environment.get("data_variable")  # the folder that KVBENCH_DATA named when the run began
    if (judge := environment.get("judge")) is not None and again.names_no_judge(judge):
        stored["judge"] = judge  # safe: no judge is contacted
    return stored


def _check_again(
    run: str,
    record: Mapping[str, Any],
    given: Mapping[str, Any],
    gathered: Gathered,
    needed: Collection[str],
) -> None:
    """Raise UserError if the user must give a setting again, and did not. The message shows the complete command."""
    missing = {key: value for key, value in again.used(record).items() if key in needed and key not in given}
    if gathered.typed("task"):
        missing.pop("task", None)
    if "judge" in given:  # another judge may have another name and key
        missing = {key: value for key, value in missing.items() if key not in ("judge_model", "judge_key_env")}
        if again.names_no_judge(given["judge"]):
            missing.pop("judge_mode", None)
    if not missing:
        return
    line = _typed_with(missing)
    hidden = f" ({HIDDEN} stands for a value that was not stored)" if HIDDEN in line else ""
    listed = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
    them = "it" if len(missing) == 1 else "them"
    raise UserError(
        f"run {quote(run)} used {listed}, which kvbench never takes from a run's folder. If you trust {them}, give "
        f"{them} again{hidden}: {line}"
    )


def _typed_with(settings: Mapping[str, Any]) -> str:
    """Return the command line that the user typed, with `settings` added as options. Messages show it."""
    typed = sys.argv[1:]
    end = typed.index("--") if "--" in typed else len(typed)  # arguments after it are no options
    return again.line(["kvbench", *typed[:end], *again.words(settings), *typed[end:]])


def _moved_to(run: str, was: str, record: Mapping[str, Any], gathered: Gathered) -> str | None:
    """Return the new folder of a local model that was moved; None if no local model was moved.

    was: the model's folder in the run's record. gathered: the settings that the user gave, which may name the new
    folder. Raises KVBenchError if the recorded folder does not exist and the user names no new folder. Also raises it
    if the files in the new folder are not the recorded files.
    """
    recorded = {entry["name"]: entry["hash"] for entry in record["environment"].get("model_files", [])}
    if not recorded or was == models.TINY:
        return None
    if (typed := gathered.typed("model")) is None:
        if not os.path.lexists(os.path.expanduser(was)):
            line = _typed_with({"model": "PATH"})
            raise SetupError(
                f"model folder {quote(was)} of run {quote(run)} does not exist. "
                f"If it was moved, give its new path: {line}"
            )
        return None
    place = parse(typed.source, PARSERS["model"], typed.value)
    if place == was:
        return None
    files = models.state(models.describe(place)).files
    if not files:
        raise UserError(
            f"{_said(typed, place)} is not a folder; run {quote(run)} began with the model in {quote(was)}. Give the "
            "folder of that model."
        )
    if differing := sorted(name for name in {*recorded, *files} if recorded.get(name) != files.get(name)):
        raise UserError(
            f"{_said(typed, place)} is not the model {quote(was)} that run {quote(run)} began with; files that differ: "
            f"{few(list(map(bare, differing)), 1)}. Give the folder as it was, or {NEW_RUN}."
        )
    return str(place)


def _commit(record: Mapping[str, Any], gathered: Gathered) -> str | None:
    """Return the commit that the user gave as --revision, if the run began with this commit of a hub model. The local
    cache may have a later commit under the name of the recorded revision."""
    began = (record["environment"].get("model") or {}).get("model_revision")
    typed = gathered.typed("revision")
    given = None if typed is None else parse(typed.source, PARSERS["revision"], typed.value)
    return given if given == began and hub.is_commit(given) else None


def _check_template(run: str, path: str | None, record: Mapping[str, Any]) -> None:
    """Raise UserError if the run's chat template has changed. The check comes before any code parses the template."""
    if path is not None:
        recorded = record["environment"].get("chat_template") or {}
        _check_hash(run, f"--chat-template {quote(path)}", recorded.get("sha256"), template_hash(path))


def _check_hash(run: str, file: str, was: str | None, now: str) -> None:
    if was != now:
        raise UserError(
            f"{file} (sha256 {now[:12]}) is not the file that run {quote(run)} began with (sha256 "
            f"{(was or 'unknown')[:12]}). Give the file as it was, or {NEW_RUN}."
        )


def _check_task_file(run: str, path: str, record: Mapping[str, Any]) -> None:
    """Raise UserError if the file of --task-file holds a task that the run does not have, or if the file has changed
    since the run began. path: the file that the user gave."""
    if record["config"].get("task_file") is None:
        raise UserError(f"--task-file {quote(path)}: the run has no task from a file. {KEEPS}")
    from kvbench.tasks.file import FileTask

    task = FileTask(path)
    tasks = record["environment"].get("tasks", {})
    if task.name not in tasks:
        raise UserError(
            f"--task-file {quote(path)} holds task {quote(task.name)}, but run {quote(run)} has only "
            f"{', '.join(tasks)}. Give the file that the run began with."
        )
    was = tasks[task.name]["data"].get("sha256")
    _check_hash(run, f"--task-file {quote(path)}", was, task.sources()["sha256"])


def _config(folder: Path, stored: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that a run's stored settings describe. Raises KVBenchError for invalid settings."""
    try:
        config = RunConfig.from_dict(stored)
        for method in config.methods:
            _check_options(method)
        if not config.cells():
            raise ValueError(config.grids)
    except UserError as error:
        raise UserError(f"{quote(folder / manifest.NAME)} holds a setting that kvbench cannot use: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SetupError(
            f"{quote(folder / manifest.NAME)} is damaged ({type(error).__name__} in its settings). Put back a copy of "
            f"it, or {NEW_RUN}."
        ) from None
    return config


def _check_options(method: MethodChoice) -> None:
    """Raise UserError if the method refuses a recorded option or its value, and ValueError if the value was recorded
    with another type than the option has."""
    pairs = [(name, "none" if value is None else str(value)) for name, value in method.options]
    parsed = choose.parse(method.name, pairs).options()
    for name, value in method.options:
        if parsed[name] != value or isinstance(parsed[name], bool) != isinstance(value, bool):
            raise ValueError(name)


def _check_typed(config: RunConfig, gathered: Gathered) -> None:
    """Raise UserError if a flag or an environment variable gives a value that differs from the run's.

    The settings in `OPERATIONAL` and `HOST` may differ. The paths of a moved model, of a task file and of a chat
    template may differ too, because kvbench has already compared the contents of these files.
    """
    for key in PARSERS:
        if key in (*OPERATIONAL, *manifest.HOST, "interval") or (given := gathered.typed(key)) is None:
            continue
        value, kept = parse(given.source, PARSERS[key], given.value), getattr(config, key)
        if key == "model" and value == config.moved_to:
            continue
        if value != kept:
            raise UserError(f"{_said(given, value)} differs from the run's {_value(kept)}. {KEEPS}")
    axes = {
        "method": [m.name for m in config.methods],
        "budget": [label(size) for size in config.budgets],
        "task": list(config.tasks),
        "interval": [str(interval) for interval in config.intervals],
    }
    typed = Builder(gathered, Problems())
    typed.settings["task_file"] = config.task_file
    for key, were in axes.items():
        if given := gathered.typed(key):
            members = [member_name(m) for m in typed.axis({}, key)]
            typed.problems.stop()
            if members and set(members) != set(were):
                asked_for = ",".join(members)
                raise UserError(f"{_said(given, asked_for)} differs from the run's {_value(','.join(were))}. {KEEPS}")


def _value(kept: Any) -> str:
    """Return a recorded value of a setting in the form that messages show: without secrets, and "default" for an empty
    value."""
    return "default" if kept in (None, "") else bare(hide_keys(str(kept)))


def _said(given: Given, value: Any) -> str:
    """Return where the user gave a setting, and its value: ``--seed 2`` or ``environment variable KVBENCH_SEED=2``."""
    return f"{given.source}{' ' if given.source.startswith('--') else '='}{bare(hide_keys(str(value)))}"
