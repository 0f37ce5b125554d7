"""Reads runs for a report and groups their rows into comparable tables. No torch.

    loaded = load([Path("results/a"), Path("results/b")])      # UserError when no task of a and b is comparable
    loaded.groups                                              # one for each task, more with --group-by
    loaded.clashes                                             # tasks left out, and why

`kvbench.report.agree` says which rows are comparable. A task whose rows are not comparable is left out and named; the
other tasks are not affected. Rows at several intervals get separate tables, because a run may use each method at the
interval of its paper; a note says so (`loaded.apart`). If several runs have rows with the same key, only one of these
rows is kept (`kvbench.report.repeated`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KVBenchError, UserError, bare, few, quote
from kvbench.registry import did_you_mean
from kvbench.report import agree
from kvbench.report.agree import NOTED, SAME, Mixture
from kvbench.report.cells import SCORES
from kvbench.report.repeated import each_once
from kvbench.report.rows import RUN, Rows
from kvbench.report.scoring import Scoring
from kvbench.store import list_runs, manifest, read_columns, read_run
from kvbench.store.cells import CELL, UnfinishedCell, cell_hash

if TYPE_CHECKING:
    import pyarrow as pa

# The columns that a report uses; the others are not read.
COLUMNS = (
    *SAME,
    *("row_key", "task", "doc_id", "sample", "cluster_id", "category", "method", "method_version", "options"),
    *("artefacts", "budget", "budget_share", "decode_bounded", "status", "stop_reason", "prompt_sha256"),
    *("prompt_tokens", "judge", "output_tokens", "extracted", "score", "score_partial", "score_strict", "floor"),
    *("no_answer", "entries_after_evict", "entries_peak", "entries_mean", "kv_bytes_peak", "kv_bytes_extra"),
    *("kv_bytes_mean", "kv_bytes_prefill_peak", "state_bytes", "decode_seconds", "evict_seconds", "roofline_share"),
    *("machine_load", "kept_text", "kept_images"),
    *(column for column, _, _ in NOTED),
)
MOST = 12  # cells without rows that a line lists


@dataclass(frozen=True, slots=True)
class Group:
    """Comparable rows of one task. `label` says how these rows differ from the task's other groups."""

    task: str
    label: str
    rows: Rows
    scoring: Scoring


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rows of all runs in comparable groups. `unfinished`: the progress of each unfinished run by its name, as in
    "412 of 960 rows". `cells`: for each unfinished run whose record states the rows of every cell, the cells that lack
    rows, by `cell_hash`. `unread`: the names of the runs that were left out because they cannot be read.

    `mixed`: each allowed difference between rows of one table, with the tasks whose tables have it. `repeated`: lines
    for the user on pairs of runs that have rows with the same keys. `apart`: a line for the user on rows at several
    intervals. `clashes`: lines for the user, one for each reason why tasks were left out; a line names the tasks.
    """

    groups: list[Group]
    runs: list[dict[str, Any]]
    unfinished: dict[str, str] = field(default_factory=dict)
    cells: dict[str, Mapping[str, UnfinishedCell]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    mixed: list[tuple[Mixture, list[str]]] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)

    def progress(self, rows: Rows) -> str:
        """Return how many of its planned rows a cell has, as in "3 of 16 rows", for each of its runs that lacks some of
        them; "" for a complete cell. A run whose record does not count the rows of cells has the count of the run."""
        runs = rows.text(RUN)
        return ", ".join(
            text
            for code in runs.present()
            if (text := self._progress_in(runs.names[code], rows.where(runs.codes == code)))
        )

    def _progress_in(self, run: str, rows: Rows) -> str:
        if run not in self.cells:
            return self.unfinished.get(run, "")
        first = rows.where([0])
        cell = self.cells[run].get(cell_hash({name: next(iter(first.values(name)), None) for name in CELL}))
        return cell.progress if cell else ""

    @property
    def without_rows(self) -> dict[str, list[str]]:
        """The planned cells of which an unfinished run has no row yet, by the run's name."""
        cells = {run: [cell.name for cell in found.values() if not cell.statuses] for run, found in self.cells.items()}
        return {run: names for run, names in cells.items() if names}

    def unfinished_lines(self) -> list[str]:
        """Return a line for each unfinished run, with its progress and the cells of which it has no row yet."""
        without = {run: f" No rows yet: {few(names, MOST)}." for run, names in self.without_rows.items()}
        return [f"Run {run} is not finished ({rows}).{without.get(run, '')}" for run, rows in self.unfinished.items()]


def find_runs(names: Sequence[str], results: Path = Path("results")) -> list[Path]:
    """Return the run folders and tables that the user names. A name is a run's folder, a run's name in `results`, a
    folder of runs, or a rows.parquet. Without names, return every run in `results`.

    Raises UserError for a name that is none of these, and for a folder without runs.
    """
    runs_and_tables: list[Path] = []
    for name in names or [str(results)]:
        if not name.strip():
            raise UserError("the name of a run is empty; 'kvbench report' without a name reports on all runs.")
        path = Path(name)
        if not os.path.exists(path) and os.path.exists(
            results / name
        ):  # `Path.exists` raises for names with a null byte
            path = results / name
        if os.path.isfile(path) or os.path.lexists(path / manifest.NAME):
            runs_and_tables.append(_with_name(path))
        elif os.path.isdir(path):
            inside = [path / run for run in list_runs(path)]
            if not inside:
                raise UserError(f"{quote(name)} has no kvbench run (no {manifest.NAME}). Name a folder with runs.")
            runs_and_tables += inside
        else:
            if not names:
                raise UserError(f"there is no folder {quote(results)}. Name a run's folder, or a folder with runs.")
            runs = list_runs(results)
            there = f"Runs in {bare(results)}: {', '.join(runs)}." if runs else f"There are no runs in {bare(results)}."
            raise UserError(f"no run {quote(name)}.{did_you_mean(name, runs)} {there}")
    return list(dict.fromkeys(runs_and_tables))


def _with_name(path: Path) -> Path:
    """Return the path in a form that shows the run's name: ``.`` and ``..`` become absolute paths."""
    folder, file = (path.parent, path.name) if os.path.isfile(path) else (path, "")
    return path if folder.name not in ("", "..") else folder.resolve() / file


def load(paths: Sequence[Path], group_by: Sequence[str] = (), *, skip: bool = False) -> Loaded:
    """Read runs and group their rows.

    Args:
        group_by: columns that may differ between rows; each of their values gets its own tables. "all" stands for all
        settings, versions, artefacts and judges that differ.
        skip: leave out run folders that cannot be read, and add a notice (`Loaded.unread`). Without `skip`, the error
        of such a run is raised.

    Raises:
        UserError: a column to group by is unknown, there are no rows, or no task has comparable rows.
        SetupError: a run is damaged.
    """
    known = [*SAME, agree.ALL]
    for name in group_by:
        if name not in known:
            raise UserError(
                f"--group-by {quote(name)}: no such column.{did_you_mean(name, known)} Columns: {', '.join(known)}."
            )
    tables: list[tuple[str, pa.Table]] = []
    runs: list[dict[str, Any]] = []
    unfinished: dict[str, str] = {}
    cells: dict[str, Mapping[str, UnfinishedCell]] = {}
    unread: list[str] = []
    notices: list[str] = []
    named = list(zip(_names(paths), paths))
    for name, path in named:
        try:
            tables.append((name, _read(path, name, unfinished, cells, notices)))
        except KVBenchError as error:
            if not skip or not path.is_dir():
                raise
            unread.append(name)
            notices.append(f"run {quote(name)} is left out: {error}")
        else:
            runs.append({"run": name, "path": str(path), "rows": len(tables[-1][1])})
    if not any(run["rows"] for run in runs):
        there = ", ".join(quote(r["run"]) for r in runs)
        cause = f"there are no rows yet in {there}. Report again when a run has rows."
        raise UserError("\n".join([*notices, cause if there else "no run can be read."]))
    rows, repeated = each_once(Rows.of(tables), dict(named))
    rows = _filled(rows)
    apart = [] if {"interval", agree.ALL} & {*group_by} else agree.intervals_apart(rows)
    records = [manifest.read(path)["environment"] for run in runs if (path := Path(run["path"])).is_dir()]
    groups, clashes = _grouped(rows, [*group_by, "interval"] if apart else group_by, records)
    if not groups:
        raise UserError("\n".join(clashes))
    notices += _unknown(groups)
    return Loaded(groups, runs, unfinished, cells, unread, notices, _mixed(groups), repeated, apart, clashes)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return each run's name, or the path of its folder if another run has the same name."""
    folders = [path if path.is_dir() else path.parent for path in paths]
    count = Counter(folder.name for folder in folders)
    return [folder.name if count[folder.name] == 1 else str(folder) for folder in folders]


def _grouped(
    rows: Rows, group_by: Sequence[str], records: Sequence[Mapping[str, Any]]
) -> tuple[list[Group], list[str]]:
    """Return the comparable groups, and a line for each reason why tasks are left out. The line names the tasks.
    records: the environments of the runs."""
    groups: list[Group] = []
    causes: dict[str, list[str]] = {}
    tasks = rows.text("task")
    for code in tasks.present():
        task, part = tasks.names[code], rows.where(tasks.codes == code) if len(tasks.present()) > 1 else rows
        scoring = Scoring.of(task, records)
        for label, group in agree.split_all(part) if agree.ALL in group_by else agree.split(part, group_by):
            try:
                agree.check(group)
            except UserError as clash:
                causes.setdefault(str(clash), []).append(task)
            else:
                groups.append(Group(task, label, group, scoring))
    return groups, [f"no table of {', '.join(dict.fromkeys(left))}: {cause}" for cause, left in causes.items()]


def _unknown(groups: Sequence[Group]) -> list[str]:
    """Return a list with one line that names the tasks of which the main score is unknown although their rows have
    several score columns; an empty list if there are none."""
    unknown = [
        group.task
        for group in groups
        if not group.scoring.known and any(len(group.rows.values(column)) for column in SCORES if column != "score")
    ]
    if not unknown:
        return []
    return [
        f"the main score of {', '.join(dict.fromkeys(unknown))} is unknown: not installed here, and the runs do not "
        "state it. Tables show the column 'score'."
    ]


def _read(
    path: Path,
    name: str,
    unfinished: dict[str, str],
    cells: dict[str, Mapping[str, UnfinishedCell]],
    notices: list[str],
) -> pa.Table:
    """Return the rows of a run or of a table. Adds the run's notices to `notices` and, if the run is not finished, its
    progress to `unfinished`, as in "412 of 960 rows", and the cells that lack rows to `cells`."""
    if not path.is_dir():
        return read_columns(path, COLUMNS)
    snapshot = read_run(path, COLUMNS)
    notices += [f"{name}: {text}" for text in snapshot.notices]
    if snapshot.unfinished:
        unfinished[name] = snapshot.progress
        if snapshot.unfinished_cells is not None:
            cells[name] = snapshot.unfinished_cells
    return snapshot.table


def _mixed(groups: Sequence[Group]) -> list[tuple[Mixture, list[str]]]:
    """Return the allowed differences of all groups, with the tasks that have them. If several tasks differ in the same
    column and values, their differences are merged into one, and the numbers of rows are added."""
    merged: dict[Any, tuple[Mixture, list[str]]] = {}
    for group in groups:
        for mixture in agree.mixtures(group.rows):
            former, tasks = merged.get(key := (mixture.column, mixture.method, *mixture.counts), (None, []))
            if former is not None:
                counts = {value: count + former.counts[value] for value, count in mixture.counts.items()}
                mixture = replace(mixture, counts=counts)
            merged[key] = mixture, list(dict.fromkeys([*tasks, group.task]))
    return list(merged.values())


def _filled(rows: Rows) -> Rows:
    """Return the rows with a text in place of missing stop strings, adapters, options and question ids. A missing value
    would otherwise agree with every value."""
    return rows.having(
        stop=rows.text("stop").filled("[]"),
        adapter=rows.text("adapter").filled("none"),
        options=rows.text("options").filled("{}"),
        doc_id=rows.text("doc_id").filled(""),
    )
