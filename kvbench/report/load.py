"""Reads runs for a report and makes sure that what stands in one table may stand in one table. No torch.

    loaded = load([Path("results/a"), Path("results/b")])      # UserError when a and b are not comparable
    loaded.groups                                              # one for each task, more with --group-by

Rows compare when model, sampling, prompt, interval, seed and versions of task and method are the same, and equal
questions had equal prompts. A row that is in several runs counts once, an ok one before a failed one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KVBenchError, UserError, show
from kvbench.registry import did_you_mean
from kvbench.store import list_runs, manifest, read_run, read_table

if TYPE_CHECKING:
    import pandas as pd

RUN = "run"  # column with the run's name, added here
# What must be equal in one table, and how it is called in the message.
SAME = {
    "model": "model",
    "model_revision": "model revision",
    "dtype": "dtype",
    "seed": "seed",
    "interval": "interval",
    "compress": "compression",
    "prefill": "prefill",
    "prefill_chunk": "prefill chunk",
    "prompt_style": "prompt style",
    "thinking": "thinking",
    "temperature": "temperature",
    "top_p": "top-p",
    "top_k": "top-k",
    "min_p": "min-p",
    "max_new_tokens": "max new tokens",
    "stop": "stop strings",
    "attention": "attention",
    "multi_turn_cache": "later turns",
    "task_version": "task version",
}
# A task may draw its questions differently, and a long prompt leaves less room for the answer.
BY_QUESTION = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"  # when a judge was asked does not matter
FIRST_FORMAT = {"compress": "query-aware", "prefill": "full"}  # of rows that evict and do not say


@dataclass(frozen=True, slots=True)
class Group:
    """Comparable rows of one task. `label` says what sets them apart from the task's other groups."""

    task: str
    label: str
    rows: pd.DataFrame


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows of all runs in comparable groups. `unfinished` maps a run to its "412 of 960 rows"."""

    groups: list[Group]
    runs: list[dict[str, Any]]
    unfinished: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def find_runs(names: Sequence[str], results: Path = Path("results")) -> list[Path]:
    """Run folders and tables from what was typed: a run's folder or name, a folder of runs, a rows.parquet."""
    found: list[Path] = []
    for name in names or [str(results)]:
        if not name.strip():
            raise UserError("the name of a run is empty; 'kvbench report' without one takes all.")
        path = Path(name)
        if not os.path.exists(path) and os.path.exists(results / name):  # of `os`, for names that are no path
            path = results / name
        if os.path.isfile(path) or os.path.isfile(path / manifest.NAME):
            found.append(path)
        elif os.path.isdir(path):
            inside = [path / run for run in list_runs(path)]
            if not inside:
                raise UserError(f"{show(name)} has no kvbench run (no {manifest.NAME}).")
            found += inside
        else:
            runs = list_runs(results)
            known = f" Runs in {show(results)[1:-1]}: {', '.join(runs)}." if runs else ""
            raise UserError(f"no run {show(name)}.{did_you_mean(name, runs)}{known}")
    return list(dict.fromkeys(found))


def load(paths: Sequence[Path], group_by: Sequence[str] = (), *, split: bool = False, skip: bool = False) -> Loaded:
    """Read runs and group their rows.

    Args:
        group_by: columns that may differ; each of their values gets tables of its own.
        split: group by everything that differs, instead of an error.
        skip: leave out runs that cannot be read, with a notice, instead of an error.
    """
    import pandas as pd

    for name in group_by:
        if name not in SAME:
            raise UserError(f"--group-by {show(name)}.{did_you_mean(name, list(SAME))} Columns: {', '.join(SAME)}.")
    frames, runs, unfinished, notices = [], [], {}, []
    for path in paths:
        name = path.name if path.is_dir() else path.parent.name
        if path.is_dir():
            try:
                snapshot = read_run(path)
            except KVBenchError as error:
                if not skip:
                    raise
                notices.append(f"run {show(name)} is left out: {error}")
                continue
            frame = snapshot.rows
            notices += [f"{name}: {text}" for text in snapshot.notices]
            if snapshot.planned is not None and snapshot.saved < snapshot.planned:
                unfinished[name] = snapshot.progress
        else:
            frame = read_table(path)
        frames.append(_filled(frame).assign(**{RUN: name}))
        runs.append({"run": name, "path": str(path), "rows": len(frame)})
    rows = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    if rows.empty:
        there = ", ".join(show(r["run"]) for r in runs)
        raise UserError("\n".join([*notices, f"there are no rows yet in {there}." if there else "no run can be read."]))
    ok_first = rows.sort_values("status", key=lambda status: status != "ok", kind="stable")
    rows = ok_first.drop_duplicates("row_key").sort_index()
    groups = []
    for task, part in rows.groupby("task", observed=True, sort=False):
        columns = [column for column in SAME if values_of(part, column)[1:]] if split else group_by
        for label, group in _groups(part, columns):
            _check(str(task), group)
            groups.append(Group(str(task), label, group))
    return Loaded(groups, runs, unfinished, notices)


def _filled(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with what is left out where it is the usual, so that they do not agree with everything."""
    old = rows["interval"].notna()
    filled = {c: rows[c].where(rows[c].notna() | ~old, value) for c, value in FIRST_FORMAT.items()}
    return rows.assign(**filled, stop=rows["stop"].astype(object).fillna("[]"))


def values_of(rows: pd.DataFrame, column: str) -> list[Any]:
    """The values of a column in order. Rows without one (the full cache has no interval) agree with every value, and so
    do questions with each other that are drawn differently by the task itself.
    """
    values = sorted(rows[column].dropna().unique())
    by_question = column in BY_QUESTION and len(values) > 1
    if by_question and rows.groupby("doc_id", observed=True)[column].nunique().max() <= 1:
        return [None]
    return values or [None]


def _groups(rows: pd.DataFrame, columns: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """Rows apart by the values of the columns; a row without a value is in every group."""
    groups = [("", rows)]
    for column in columns:
        groups = [
            (
                ", ".join(filter(None, (label, f"{SAME[column]} {value}"))),
                part if value is None else part[_agrees(part[column], value)],
            )
            for label, part in groups
            for value in values_of(part, column)
        ]
    return groups


def _agrees(values: Any, value: Any) -> Any:
    return (values == value).fillna(False) | values.isna()


def _check(task: str, rows: pd.DataFrame) -> None:
    """Raise UserError naming two runs and what differs between them."""
    for column, word in SAME.items():
        _check_column(rows, column, word, f"--group-by {column} makes one table each.")
    for method, mine in rows.groupby("method", observed=True, sort=False):
        _check_column(mine, "method_version", f"{method} version", "Report them one by one.")
        for _, same in mine.groupby("options", observed=True, sort=False):
            _check_column(same, "artefacts", f"tables, drafts or plug-in of {method}", "Report them one by one.")
    judges = rows.assign(judge=rows["judge"].str.replace(_DATE, "", regex=True))
    judges = judges[~judges["judge"].str.startswith("nobody", na=False)]  # the full cache is its own equal
    _check_column(judges, "judge", "judge", "'kvbench score RUN --all' with one judge makes them alike.")
    prompts = rows.groupby("doc_id", observed=True)["prompt_sha256"].nunique()
    if (prompts > 1).any():
        question = prompts.index[prompts > 1][0]
        raise UserError(
            f"question {show(question)} of task {show(task)} had two different prompts (other data or template); "
            "scores are not comparable. Report the runs one by one."
        )


def _check_column(rows: pd.DataFrame, column: str, word: str, remedy: str) -> None:
    if len(values_of(rows, column)) > 1:
        found = rows.dropna(subset=[column]).drop_duplicates(column)
        a, b = found.iloc[0], found.iloc[1]
        of = f"{a[RUN]} is of {word} {a[column]} and {b[RUN]} of {word} {b[column]}"
        raise UserError(f"{of}; scores are not comparable. {remedy}")
