"""``kvbench data fetch|check|path``: downloads task data, checks them, or shows their paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbench import registry
from kvbench.cli.index import flowing
from kvbench.cli.options import DataRevision, Document, Plugins, Text, Texts, group, plain
from kvbench.config.parsers import split
from kvbench.config.plugins import load_plugins
from kvbench.console import signals, terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import Progress, size
from kvbench.errors import SetupError, UserError, bare, quote
from kvbench.sources.data import Data
from kvbench.sources.data.export import fetch as fetch_data
from kvbench.task import Manifest
from kvbench.taskkit.names import LM_EVAL, expand, get_task

EPILOG = """Examples:
  kvbench data check
  kvbench data fetch gsm8k math500 --out data
  kvbench data path mt_bench
"""
FETCH = """Examples:
  kvbench data fetch gsm8k math500
  kvbench data fetch gpqa_diamond --out /media/stick/data
  KVBENCH_DATA=/media/stick/data kvbench run --method full --task gpqa_diamond
"""
CHECK = """Examples:
  kvbench data check
  kvbench data check gsm8k mt_bench
  kvbench data check --data /media/stick/data --json
"""
PATH = """Examples:
  kvbench data path mt_bench
  kvbench data path gsm8k --data /media/stick/data
"""
CONTINUES = "tasks fetched; the same command continues where it stopped."
FINE = ("ok", "generated", "by lm-eval")  # states that need no repair

app = group("Download the data of tasks, check them, or show their paths.")

Tasks = Annotated[
    list[str], typer.Argument(metavar="TASK...", help="Tasks, groups, or patterns (ruler/*).", show_default=False)
]
AnyTasks = Annotated[
    Texts,
    typer.Argument(metavar="[TASK...]", help="Tasks, groups, or patterns (ruler/*). Default: all.", show_default=False),
]
Folder = Annotated[
    Text, plain("--data", "Folder to look in. Default: KVBENCH_DATA, else bundled files, else the hub.", "DIR")
]
Target = Annotated[Text, plain("--out", "Folder for the data. Default: KVBENCH_DATA, else data.", "DIR")]


@app.command("fetch", epilog=flowing(FETCH))
def fetch(
    tasks: Tasks,
    out: Target = None,
    data_revision: DataRevision = None,
    plugin: Plugins = None,
    json: Document = False,
    quiet: Annotated[bool, plain("--quiet -q", "Print no progress and no tables.")] = False,
) -> None:
    """Download the data of tasks into a folder, for --data or KVBENCH_DATA on any machine.

    Data in the folder that are complete and correct are kept, except with --data-revision. After an interruption, the
    same command continues.
    """
    load_plugins(plugin or [])
    folder = Path(out or os.environ.get("KVBENCH_DATA") or "data").expanduser()
    if folder.exists() and not folder.is_dir():
        source = "--out" if out else "KVBENCH_DATA" if os.environ.get("KVBENCH_DATA") else "--out is not given, and"
        raise UserError(f"{source} {quote(folder)} is a file; give a folder.")
    problems, done = Problems(), list[dict[str, Any]]()
    wanted = _downloads(_manifests(tasks, problems), problems, quiet=quiet)
    progress = _Bytes(quiet=quiet)
    for name, manifest in wanted.items():
        with signals.phase(lambda: f"interrupted: {len(done)} of {len(wanted)} {CONTINUES}"), problems.collect():
            try:
                used = fetch_data(name, manifest, folder, revision=data_revision, bar=progress.show)
            finally:
                progress.end()
            if used.mismatch:
                problems.warn(f"data of task {quote(name)} differ: {used.mismatch}.")
            done.append(_about(name, manifest, "ok") | {"location": used.location, "rows": used.rows})
    if json:
        terminal.data({"folder": str(folder), "tasks": done})
    elif done and not quiet:
        _print_fetched(done)
    problems.stop()
    if wanted and not quiet:
        terminal.note(
            f"{len(done)} of {len(wanted)} tasks are in {folder}; --data {folder} or KVBENCH_DATA={folder} uses them."
        )


def _downloads(named: dict[str, Manifest | None], problems: Problems, *, quiet: bool) -> dict[str, Manifest]:
    """Return the named tasks that have data to download, with their manifests. Raises UserError for tasks of
    lm-eval."""
    for name in named:
        with problems.collect():
            if name.startswith(LM_EVAL):
                raise UserError(
                    f"lm-eval downloads the data of {quote(name)} itself. Run the task once with a network; later runs "
                    "with HF_HUB_OFFLINE=1 use the cached data. Or give --data (or KVBENCH_DATA) a folder that holds "
                    f"lm_eval/{bare(name.removeprefix(LM_EVAL))}.jsonl."
                )
    problems.stop()
    for name, manifest in named.items() if not quiet else ():
        if manifest is None:
            terminal.note(f"task {quote(name)} generates its data; nothing is downloaded.")
        elif manifest.gated:
            terminal.note(f"{quote(manifest.hub)} is gated: its terms have to be accepted on its page.")
    return {name: manifest for name, manifest in named.items() if manifest is not None}


def _print_fetched(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        gated = " (gated)" if row["gated"] else ""
        count = "-" if row["rows"] is None else str(row["rows"])
        lines.append((row["task"], count, (row["licence"] or "not stated") + gated, row["location"]))
    terminal.table(("task", "rows", "licence", "file"), lines, right=("rows",))


@app.command("check", epilog=flowing(CHECK))
def check(
    tasks: AnyTasks = None,
    data: Folder = None,
    data_revision: DataRevision = None,
    plugin: Plugins = None,
    json: Document = False,
) -> None:
    """Check which tasks' data are here, from which source, and whether rows and ids are the expected ones.

    Downloads nothing. Exit code 3 when a named task's data are missing, wrong or only a sample.
    """
    load_plugins(plugin or [])
    problems = Problems()
    wanted = _manifests(tasks or [name for name in registry.tasks.names() if name != "file"], problems)
    problems.stop()
    source = _source(data, data_revision)
    seen: dict[str, dict[str, Any]] = {}
    rows = []
    for name, manifest in wanted.items():
        if manifest is None:
            rows.append(_about(name, None, "by lm-eval" if name.startswith(LM_EVAL) else "generated"))
            continue
        same = repr((manifest.path, sorted(manifest.where.items())))  # tasks may share data
        state = seen.get(same) or _state(source, name, manifest)
        if state["state"] != "missing":
            seen[same] = state
        rows.append(_about(name, manifest, "") | state)
    bad = [row for row in rows if row["state"] not in FINE]
    if json:
        terminal.data({"ok": not bad, "tasks": rows})
    else:
        _print(rows)
    if bad and tasks:
        named = ", ".join(f"{row['task']} ({row['state']})" for row in bad)
        raise SetupError(
            f"data of {len(bad)} of {len(rows)} tasks are missing, wrong or only a sample: {named}. "
            "'kvbench data fetch TASK --out FOLDER' gets them."
        )


@app.command("path", epilog=flowing(PATH))
def path(tasks: Tasks, data: Folder = None, plugin: Plugins = None, json: Document = False) -> None:
    """Print the data files that a run of these tasks would read.

    Downloads nothing; exit code 3 when files are missing.
    """
    load_plugins(plugin or [])
    problems = Problems()
    wanted = _manifests(tasks, problems)
    problems.stop()
    source, files = _source(data), dict[str, list[str]]()
    for name, manifest in wanted.items():
        if manifest is None:
            continue
        with problems.collect():
            if (place := source.find(name, manifest)) is None:
                raise SetupError(f"data of task {quote(name)} are not here; 'kvbench data fetch {name}' gets them.")
            files[name] = [str(file) for file in place.files]
    if json:
        terminal.data(files)
    else:
        for file in dict.fromkeys(file for several in files.values() for file in several):
            print(file)
    problems.stop()


def _source(data: str | None, revision: str | None = None) -> Data:
    source = Data(data, revision=revision)
    for option, folder in (("--data", source.path), ("KVBENCH_DATA", source.env_path)):
        if folder is not None and not folder.exists():
            raise SetupError(f"{option} {quote(folder)} does not exist. Give an existing folder.")
    return source


def _manifests(names: list[str], problems: Problems) -> dict[str, Manifest | None]:
    """Return the manifest (source, size, hashes) of each named task's data; None for a task without data files. Errors,
    such as an unknown task, go to `problems`."""
    manifests: dict[str, Manifest | None] = {}
    for name in names:
        with problems.collect():
            for part in split("TASK", name, "'kvbench list tasks' shows them."):
                if part.strip().lower() == "file":
                    raise UserError(
                        "task 'file' reads only the file given with --task-file; 'kvbench data' takes other tasks."
                    )
                manifests |= {member: get_task(member).manifest for member in expand(part)}
    return manifests


def _about(name: str, manifest: Manifest | None, state: str) -> dict[str, Any]:
    """Return the facts about a task's data that `check` and `fetch` print: state, source, licence and number of rows.
    For a task without a manifest, return only its name and the state."""
    if manifest is None:
        return {"task": name, "state": state}
    where = manifest.hub or manifest.url or "bundled"
    about = {"expected_rows": manifest.rows, "licence": manifest.licence or None, "gated": manifest.gated}
    return {"task": name, "state": state, "from": where, **about}


def _state(source: Data, name: str, manifest: Manifest) -> dict[str, Any]:
    """Return a dictionary about a task's data on this machine.

    Its `state` is "ok"; "sample" (the data folder has only a few rows, or invented rows); "wrong" (the data cannot be
    read, or their rows or ids differ from the expected ones); or "missing". If the data can be read, the dictionary
    also has their source, number of rows and hashes.
    """
    try:
        if source.find(name, manifest) is None:
            return {"state": "missing", "note": "on the hub, not on this machine"}
    except SetupError as error:
        return {"state": "missing", "note": str(error)}
    try:
        used = source.check(name, manifest)
    except SetupError as error:
        return {"state": "wrong", "note": str(error)}
    assert used is not None
    state = "sample" if used.sample else "wrong" if used.mismatch else "ok"
    facts = ("source", "location", "revision", "rows", "sha256", "ids_sha256")
    return {"state": state, **{fact: getattr(used, fact) for fact in facts}, "note": used.mismatch}


def _print(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        hashed = (row.get("sha256") or row.get("revision") or "-")[:12]
        where = terminal.clean(row.get("note") or row.get("location") or "")
        count = "-" if row.get("rows") is None else str(row["rows"])
        lines.append((row["task"], row["state"], row.get("source", "-"), count, hashed, where))
    terminal.table(("task", "data", "source", "rows", "hash", "where"), lines, right=("rows",))


class _Bytes(Progress):
    """The progress display of a download, which counts bytes instead of rows."""

    def show(self, name: str, done: int, total: int | None) -> None:
        if bare(name) != self._cell:
            self.end()
            self.begin(total or 0, 0)
            self.cell(name)
        self.update(done, tokens=0, kv_bytes_now=0, kv_bytes_peak=0)

    def line(self) -> str:
        of = f" of {size(self._total)}" if self._total else ""
        return "  ".join(part for part in (f"{size(self._done)}{of}", self._cell, self._left()) if part)
