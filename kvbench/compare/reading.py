"""Reads one side of a comparison from run folders, tables or a baseline file.

read_side("today")                     # a run's name or folder, a folder of runs, or a rows.parquet
read_side("today,today-seed1")         # several of these, separated by commas
read_side("results/baselines/ci.json") # a file that `kvbench compare RUN --save FILE` wrote
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.compare import baseline
from kvbench.compare.cell import COUNTS, ENTRIES, FAILED, NO_MARK, Cell, Key, Question, Side, mark
from kvbench.compare.facts import FACTS, FILLED, of_record
from kvbench.errors import SetupError, UserError, bare, quote
from kvbench.report.agree import BY_QUESTION, OF_QUESTION, judge_of
from kvbench.report.cells import answered, cells_of, decode_bounded, mean, present, speed, speed_sd
from kvbench.report.load import find_runs
from kvbench.report.repeated import each_once
from kvbench.report.rows import KEY, RUN, Rows
from kvbench.report.scoring import Scoring
from kvbench.store import manifest, read_columns, read_run
from kvbench.store.schema import NAMES

if TYPE_CHECKING:
    import pyarrow as pa

    from kvbench.report.rows import Floats

# Without thinking: different thinking shows in the prompt's hash.
ASKED = ("prompt_tokens_cut", *(name for name in BY_QUESTION if name != "thinking"))
USED = (
    KEY,
    *FACTS,
    *ASKED,
    *("task", "doc_id", "sample", "cluster_id", "method", "options", "budget", "budget_share", "interval", "seed"),
    *("model", "decode_bounded", "status", "stop_reason", "output_sha256", "output_tokens", "no_answer", "score"),
    *("score_partial", "score_strict", "entries_after_evict", "entries_peak", "kv_bytes_peak", "kv_bytes_mean"),
    *("decode_seconds", "evict_seconds", "tokens_per_second", "prompt_sha256"),
)
COLUMNS = tuple(dict.fromkeys(name for name in USED if name in NAMES))
SAMPLES = 1 << 20  # a sample's number is below this


def read_sides(base: str, new: str) -> tuple[Side, Side]:
    """Return both sides of a comparison. If a task is not installed and the records of one side do not state its main
    score, the comparison uses the main score that the other side states. Raises UserError, SetupError."""
    old = read_side(base)
    now = read_side(new, stated=old.headlines())
    if old.assumed & now.headlines().keys():
        old = read_side(base, stated=now.headlines())
    return old, now


def read_side(text: str, results: Path = Path("results"), *, stated: Mapping[str, str] | None = None) -> Side:
    """Return one side. text: what the user typed as BASE or NEW. results: the folder of the runs that the user gives by
    name. stated: by task, the column of the main score if this side does not state it. Raises UserError, SetupError."""
    if os.path.isfile(text) and text.endswith(".json"):
        return baseline.read(Path(text))
    whole = os.path.exists(text) or os.path.exists(results / text)
    names = [text] if whole else text.split(",")
    return read_runs(find_runs(names, results), text, stated)


def read_runs(paths: Sequence[Path], name: str, stated: Mapping[str, str] | None = None) -> Side:
    tables: list[tuple[str, pa.Table]] = []
    records: dict[str, Mapping[str, Any]] = {}
    named: dict[str, Path] = {}
    unfinished: dict[str, str] = {}
    notices: list[str] = []
    for path in paths:
        run = path.name if path.is_dir() else path.parent.name
        if run in records:
            raise UserError(
                f"{quote(name)} has two runs with the name {quote(run)}; the runs of one side need different names. "
                "Rename one of the folders."
            )
        named[run] = path
        if path.is_dir():
            snapshot = read_run(path, COLUMNS)
            tables.append((run, snapshot.table))
            record = manifest.read(path)
            records[run] = record["environment"] | {"chunk": record["config"].get("prefill_chunk")}
            notices += [f"{run}: {text}" for text in snapshot.notices]
            if snapshot.planned is not None and snapshot.saved + snapshot.failed < snapshot.planned:
                unfinished[run] = snapshot.progress
        else:
            tables.append((run, read_columns(path, COLUMNS)))
            records[run] = {}
    side = of_tables(name, tables, records, named, stated)
    folders = tuple(path for path in paths if path.is_dir())
    return replace(side, folders=folders, unfinished=unfinished, notices=(*notices, *side.notices))


def of_tables(
    name: str,
    tables: list[tuple[str, pa.Table]],
    records: Mapping[str, Mapping[str, Any]],
    paths: Mapping[str, Path],
    stated: Mapping[str, str] | None = None,
) -> Side:
    """Return a side made of tables of rows. name: the side's name. tables: for each run its name and its rows, with the
    columns in `COLUMNS`. records: the environment of each run by the run's name; empty for a table without a folder.
    paths: the folder or table of each run by the run's name. stated: as for `read_side`.

    Raises UserError if there are no rows, if a cell has a sample twice, or if the rows of one question had different
    prompts or settings. Raises SetupError for an invalid number of a sample.
    """
    sources = tuple((run, len(table)) for run, table in tables)
    if not sum(rows for _, rows in sources):
        there = ", ".join(quote(run) for run, _ in sources)
        raise UserError(f"there are no rows yet in {there}. Compare again when the run has rows.")
    rows, repeated = each_once(Rows.of(tables), paths)
    filled = FILLED | {"options": "{}"}
    rows = rows.having(**{column: rows.text(column).filled(value) for column, value in filled.items()})
    scorings = {task: Scoring.of(task, records.values()) for task in rows.values("task")}
    headlines = {**(stated or {}), **{task: s.headline for task, s in scorings.items() if s.known}}
    assumed = frozenset(scorings.keys() - headlines.keys())
    cells = {cell.key: cell for cell in _cells(rows, records, headlines)}
    return Side(name=name, cells=cells, sources=sources, notices=tuple(repeated), assumed=assumed)


def _cells(rows: Rows, records: Mapping[str, Mapping[str, Any]], headlines: Mapping[str, str]) -> Iterator[Cell]:
    shared: dict[str, dict[str, Any]] = {name: {} for name in rows.text("method").names}
    for task, of_task in _split(rows, "task"):
        for model, of_model in _split(of_task, "model"):
            for seed, of_seed in _split(of_model, "seed"):
                for method, budget, part in cells_of(of_seed, shared):
                    for interval, of_interval in _intervals(part):
                        key = Key(model, task, method, budget, interval, seed)
                        yield _cell(key, of_interval, records, headlines.get(task, Scoring().headline))


def _split(rows: Rows, column: str) -> Iterator[tuple[str, Rows]]:
    text = rows.text(column).filled("")
    for code in text.present():
        yield text.names[code], rows.where(text.codes == code)


def _intervals(rows: Rows) -> Iterator[tuple[int | None, Rows]]:
    values = rows.number("interval")
    for interval in rows.values("interval"):
        yield interval, rows.where(values == interval)
    if (none := values != values).any():
        yield None, rows.where(none)


def _cell(key: Key, rows: Rows, records: Mapping[str, Mapping[str, Any]], headline: str) -> Cell:
    runs = rows.text(RUN)
    there = [runs.names[code] for code in runs.present()]
    answers = answered(rows)
    return Cell(
        key=key,
        run=", ".join(there),
        headline=headline,
        bounded=decode_bounded(rows),
        facts=_facts(key, rows, [records[run] for run in there]),
        figures=_figures(answers),
        questions=dict(_questions(key, rows, headline)),
        digest=_digest(answers),
        options=rows.values("options")[0],
    )


def _facts(key: Key, rows: Rows, records: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the value of each fact; None: unknown. If the rows of a cell have several values of a fact, the value is a
    list with commas. A setting in `BY_QUESTION` with several values is None: it is compared question by question, in
    `Question.asked`. Values in `OF_QUESTION` are left out."""
    facts: dict[str, str | None] = {}
    for name in FACTS:
        if name in NAMES:
            values = [str(value) for value in rows.values(name) if value != OF_QUESTION.get(name)]
            if name == "judge":
                values = sorted({judge for value in values if (judge := judge_of(value))})
            if name in BY_QUESTION and len(values) > 1:
                values = []
        else:
            values = sorted({value for record in records if (value := of_record(name, record, key.task)) is not None})
        facts[name] = ", ".join(values) if values else None
    return facts


def _questions(key: Key, rows: Rows, headline: str) -> Iterator[tuple[str, Question]]:
    """Yield (id, question) for the questions of a cell, in order of their ids. Raises UserError if the cell has a
    sample twice, or if samples of one question had different prompts or settings."""
    import numpy as np

    names = ("doc_id", "cluster_id", "status", "stop_reason", "prompt_sha256", "output_sha256")
    texts = {name: rows.text(name).list() for name in names}
    asked = {name: rows.number(name) for name in ASKED}
    entries = [*(rows.number(name) for name in ENTRIES[:-1]), _bounds(rows)]
    scores, tokens, silent = (rows.number(name) for name in (headline, "output_tokens", "no_answer"))
    places: dict[str, dict[int, int]] = {}
    for place, (question, sample) in enumerate(zip(texts["doc_id"], _samples(key, rows))):
        if sample in places.setdefault(question or "", {}):
            raise UserError(
                f"{key.cell}: run {quote(rows.text(RUN).names[rows.text(RUN).codes[place]])} repeats sample {sample} "
                f"of question {quote(question)}; BASE and NEW may each have a sample only once. Name fewer runs."
            )
        places[question or ""][sample] = place
    for question in sorted(places):
        mine = places[question]
        there = [p for p in mine.values() if texts["status"][p] in ("ok", "unscored")]
        first = next(iter(mine.values()))
        values: list[float | None] = [None] * (max(mine) + 1)
        marks = [NO_MARK] * len(values)
        for sample, place in mine.items():
            if texts["status"][place] == "ok" and scores[place] == scores[place]:
                values[sample] = float(scores[place])
            if place in there:
                marks[sample] = mark(f"{texts['output_sha256'][place]} {tokens[place]} {texts['stop_reason'][place]}")
            else:
                marks[sample] = FAILED
        counted = (tokens, np.array([stop == "length" for stop in texts["stop_reason"]]), silent)
        setting = [_one(key, question, name, present(column[[*mine.values()]])) for name, column in asked.items()]
        prompt = _one(key, question, "prompt", [texts["prompt_sha256"][place] for place in mine.values()])
        yield (
            question,
            Question(
                cluster=texts["cluster_id"][first] or question,
                asked=None if prompt is None else hashlib.sha256(repr((prompt, setting)).encode()).hexdigest()[:12],
                scores=tuple(values),
                marks="".join(marks),
                answers=len(there),
                totals={name: int(np.nan_to_num(column[there]).sum()) for name, column in zip(COUNTS, counted)},
                entries=tuple(_most(column[there]) for column in entries),
            ),
        )


def _bounds(rows: Rows) -> Floats:
    """Return each row's bound, the sum of budget and interval (see `ENTRIES`); NaN for a row without a bound."""
    import numpy as np

    shares = rows.number("budget_share")
    anew = np.array([(mode or "").startswith("reset") for mode in rows.text("multi_turn_cache").list()], bool)
    return np.where(anew & (shares == shares), np.nan, rows.number("budget") + rows.number("interval"))


def _samples(key: Key, rows: Rows) -> list[int]:
    """Return the sample number of each row. Raises SetupError for a number that is not whole, below 0 or too large."""
    import numpy as np

    found = rows.number("sample")
    fits = (found == np.floor(found)) & (found >= 0) & (found < SAMPLES)
    if not fits.all():
        run = rows.text(RUN).names[rows.text(RUN).codes[int(np.argmin(fits))]]
        raise SetupError(
            f"run {quote(run)} is damaged: {bare(key.cell)} has a sample with the number {found[~fits][0]:g}; the "
            f"numbers of samples must be whole, from 0 to {SAMPLES - 1:,}. Leave this run out."
        )
    return [int(sample) for sample in found.tolist()]


def _one(key: Key, question: str, name: str, values: Iterable[Any]) -> str | None:
    """Return the one value in `values`, which all rows of a question must share; None if no row has a value. Raises
    UserError if rows have different values. name: the value's name in that error. values: one per row, None if
    unknown."""
    known = sorted({str(value) for value in values if value is not None})
    if len(known) > 1:
        raise UserError(
            f"{bare(key.cell)}: samples of question {quote(question)} differ in {name}: "
            f"{bare(known[0])} and {bare(known[1])}; scores are not comparable. Name fewer runs."
        )
    return known[0] if known else None


def _most(values: Floats) -> float | None:
    known = present(values)
    return float(known.max()) if len(known) else None


def _figures(answers: Rows) -> dict[str, float]:
    """Return the figures of a cell over all its answers, by name: memory, speed, and the share of time that evictions
    took. Unknown figures are left out. The time of answers without an eviction counts as 0: it is noise of the timer,
    whose ratio between two runs means nothing."""
    rate = speed(answers)
    busy = sum(float(present(answers.number(name)).sum()) for name in ("decode_seconds", "evict_seconds"))
    after = answers.number("entries_after_evict")
    evicting = float(present(answers.number("evict_seconds")[after == after]).sum())
    figures = {
        "kv_bytes_peak": mean(answers.number("kv_bytes_peak")),
        "kv_bytes_mean": mean(answers.number("kv_bytes_mean")),
        "tokens_per_second": rate,
        "speed_spread": speed_sd(answers) / rate if rate else float("nan"),
        "evict_share": evicting / busy if busy > 0 else float("nan"),
    }
    return {name: round(value, 6) for name, value in figures.items() if value == value}


def _digest(answers: Rows) -> str:
    """Return a hash of all answers of a cell. The hash does not depend on the order of the rows."""
    names = ("doc_id", "output_sha256", "stop_reason")
    columns = [*(answers.text(name).list() for name in names), answers.number("sample").tolist()]
    columns.append(answers.number("output_tokens").tolist())
    lines = sorted(repr(line) for line in zip(*columns))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]
