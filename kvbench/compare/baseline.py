"""Writes and reads a baseline: a small JSON file with one side of a comparison, which is committed beside the code that
the comparison tests.

    write(Path("results/baselines/ci.json"), side)
    read(Path("results/baselines/ci.json"))          # the same side, named by the path, without run folders and notices

For each question the file holds the score of every sample, two characters of every answer's hash, and sums and maxima
over the question's answers, such as the sum of their tokens. The file holds every single score and not the sum of the
scores, because a comparison uses only the samples that both sides have. The file also holds a checksum of its content.
A file may come from a stranger's repository, so `read` checks sizes, types, names and ranges.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.compare.cell import COUNTS, ENTRIES, MARK, Cell, Key, Question, Side
from kvbench.compare.facts import FACTS, FILLED
from kvbench.compare.user_file import content
from kvbench.errors import SetupError, UserError, bare, quote
from kvbench.report.cells import method_label
from kvbench.store.files import reason, replacing
from kvbench.store.identity import digest
from kvbench.store.strict_json import document

FORMAT = 2
LARGEST = 64 << 20  # bytes
FIGURES = ("kv_bytes_peak", "kv_bytes_mean", "tokens_per_second", "speed_spread", "evict_share")
HEADLINES = ("score", "score_partial", "score_strict")
MARKS = r"[A-Za-z0-9_.-]*"
LONGEST = 4096  # characters of a name
RUNS = 1 << 18  # characters of the names of all runs of a cell, such as its shards
Check = Callable[[Any], bool]


class _Wrong(Exception):
    """A baseline file is invalid. The exception's text says why."""


def write(path: Path, side: Side) -> None:
    """Save a side as a baseline file, and make its folder if the folder is missing. Raises SetupError."""
    made = {
        "format": FORMAT,
        "kvbench": __version__,
        "sources": [[name, rows] for name, rows in side.sources],
        "unfinished": dict(side.unfinished),
        "cells": [_cell_out(cell) for _, cell in sorted(side.cells.items(), key=lambda item: item[0].order())],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(_text(made | {"sha256": digest(made)}).encode())
    except OSError as error:
        raise SetupError(f"cannot write {quote(path)} ({reason(error)}). Give another --save FILE.") from error


def read(path: Path) -> Side:
    """Return the side that a baseline file holds. Raises UserError."""
    try:
        return _side(path, document(content(path, LARGEST)))
    except _Wrong as wrong:
        raise UserError(_invalid(path, str(wrong))) from None
    except ValueError as error:
        raise UserError(_invalid(path, bare(error))) from None


def _invalid(path: Path, why: str) -> str:
    return f"{quote(path)} is not a baseline from 'kvbench compare --save': {why}. Save the baseline again."


def _text(content: Mapping[str, Any]) -> str:
    """Return a baseline as JSON text. Each question has its own line, so that a diff of two baselines shows which
    questions changed."""

    def plain(table: Mapping[str, Any]) -> list[str]:
        return [
            f"{json.dumps(name)}: {json.dumps(value, separators=(',', ': '), allow_nan=False)}"
            for name, value in table.items()
        ]

    cells = []
    for cell in content["cells"]:
        lines = plain({name: value for name, value in cell.items() if name != "questions"})
        questions = ",\n".join(plain(cell["questions"]))
        cells.append("{\n" + ",\n".join(lines) + ',\n"questions": {\n' + questions + "\n}\n}")
    head = plain({name: value for name, value in content.items() if name != "cells"})
    return "{\n" + ",\n".join(head) + ',\n"cells": [' + ",\n".join(cells) + "]\n}\n"


def _side(path: Path, content: Any) -> Side:
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise _Wrong("it has no field 'format' with a whole number")
    if content["format"] != FORMAT:
        raise _Wrong(f"it has format {content['format']}, and this kvbench reads format {FORMAT}")
    _keys(content, ("format", "kvbench", "sources", "unfinished", "cells", "sha256"), "the file")
    stated = content.pop("sha256")
    if stated != digest(content):
        raise _Wrong("its content was changed and does not fit its checksum")
    sources = content["sources"]
    _check(isinstance(sources, list) and all(map(_is_source, sources)), "sources")
    _check(_is_text(content["kvbench"]), "kvbench")
    _check(_is_table(content["unfinished"], _is_text), "unfinished")
    _check(isinstance(content["cells"], list) and bool(content["cells"]), "cells")
    cells = [_cell_in(cell, f"cell {number}") for number, cell in enumerate(content["cells"], 1)]
    if len(by_key := {cell.key: cell for cell in cells}) < len(cells):
        raise _Wrong("it holds the same cell twice")
    return Side(
        name=str(path),
        cells=by_key,
        sources=tuple((name, rows) for name, rows in sources),
        unfinished=content["unfinished"],
    )


def _cell_out(cell: Cell) -> dict[str, Any]:
    key = cell.key
    return {
        "key": [key.model, key.task, key.name, key.budget, key.interval, key.seed],
        "options": cell.options,
        "run": cell.run,
        "headline": cell.headline,
        "bounded": cell.bounded,
        "facts": {name: value for name, value in cell.facts.items() if value is not None},
        "figures": dict(cell.figures),
        "digest": cell.digest,
        "decisions": {
            name: [text, {str(seen): layers for seen, layers in ticks.items()}]
            for name, (text, ticks) in cell.decisions.items()
        },
        "questions": {name: _question_out(name, question) for name, question in cell.questions.items()},
    }


def _question_out(name: str, question: Question) -> list[Any]:
    cluster = None if question.cluster == name else question.cluster
    totals = [question.totals[count] for count in COUNTS]
    scores = [int(score) if score in (0.0, 1.0) else score for score in question.scores]
    entries = [value if value is None or value % 1 else int(value) for value in question.entries]
    return [scores, question.marks, question.asked, cluster, entries, question.answers, *totals]


def _cell_in(cell: Any, where: str) -> Cell:
    _check(isinstance(cell, dict), where)
    _keys(
        cell,
        ("key", "options", "decisions", "run", "headline", "bounded", "facts", "figures", "digest", "questions"),
        where,
    )
    _check(_is_key(cell["key"]), f"{where}: key")
    _check(_is_text(cell["run"], most=RUNS), f"{where}: run")
    _check(_is_options(cell["options"]), f"{where}: options")
    _check(_is_table(cell["decisions"], _is_decision), f"{where}: decisions")
    _check(cell["headline"] in HEADLINES, f"{where}: headline")
    _check(type(cell["bounded"]) is bool, f"{where}: bounded")
    _check(_is_table(cell["facts"], lambda v: _is_text(v, most=1 << 16)), f"{where}: facts")
    _keys(cell["facts"], FACTS, f"{where}: facts", every=False)
    _check(_is_table(cell["figures"], lambda v: _is_number(v) and v >= 0), f"{where}: figures")
    _keys(cell["figures"], FIGURES, f"{where}: figures", every=False)
    _check(_is_hex(cell["digest"], 32), f"{where}: digest")
    _check(_is_table(cell["questions"], _is_question), f"{where}: questions")
    model, task, name, *others = cell["key"]
    return Cell(
        key=Key(model, task, method_label(name, cell["options"]), *others),
        options=cell["options"],
        decisions={
            q: (text, {int(seen): v for seen, v in ticks.items()}) for q, (text, ticks) in cell["decisions"].items()
        },
        run=cell["run"],
        headline=cell["headline"],
        bounded=cell["bounded"],
        facts=dict.fromkeys(FACTS) | FILLED | cell["facts"],
        figures={name: float(value) for name, value in cell["figures"].items()},
        questions={name: _question_in(name, values) for name, values in cell["questions"].items()},
        digest=cell["digest"],
    )


def _question_in(name: str, values: list[Any]) -> Question:
    scores, marks, asked, cluster, entries, answers, *totals = values
    return Question(
        cluster=name if cluster is None else cluster,
        asked=asked,
        scores=tuple(None if score is None else float(score) for score in scores),
        marks=marks,
        answers=answers,
        totals=dict(zip(COUNTS, totals, strict=True)),
        entries=tuple(None if value is None else float(value) for value in entries),
    )


def _is_question(values: Any) -> bool:
    if not isinstance(values, list) or len(values) != 6 + len(COUNTS):
        return False
    scores, marks, asked, cluster, entries, answers, *totals = values
    return (
        isinstance(scores, list)
        and all(score is None or (_is_number(score) and 0 <= score <= 1) for score in scores)
        and isinstance(marks, str)
        and re.fullmatch(MARKS, marks) is not None
        and len(marks) == MARK * len(scores)
        and (asked is None or _is_hex(asked, 12))
        and isinstance(entries, list)
        and len(entries) == len(ENTRIES)
        and all(value is None or (_is_number(value) and 0 <= value < 2**53) for value in entries)
        and (cluster is None or _is_text(cluster))
        and all(type(value) is int and 0 <= value < 2**53 for value in (answers, *totals))
        and answers <= len(scores)
    )


def _is_key(values: Any) -> bool:
    if not isinstance(values, list) or len(values) != 6:
        return False
    model, task, method, budget, interval, seed = values
    return (
        all(map(_is_text, (model, task, method, seed)))
        and (budget is None or _is_budget(budget))
        and (interval is None or (type(interval) is int and 0 < interval < 2**31))
    )


def _is_options(value: Any) -> bool:
    """Return whether a value is a method's options as JSON text: an object of strings, numbers, booleans and nulls."""
    if not _is_text(value, most=1 << 16):
        return False
    try:
        options = document(value)
    except ValueError:
        return False
    return isinstance(options, dict) and all(
        isinstance(v, (str, int, float, bool, type(None))) for v in options.values()
    )


def _is_decision(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_hex(value[0], 12)
        and _is_table(value[1], lambda layers: isinstance(layers, str) and re.fullmatch(MARKS, layers) is not None)
        and all(re.fullmatch("[0-9]{1,9}", seen) for seen in value[1])
    )


def _is_budget(value: Any) -> bool:
    return 0 < value < 2**31 if type(value) is int else type(value) is float and 0 < value <= 1


def _is_source(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and type(value[1]) is int


def _is_text(value: Any, most: int = LONGEST) -> bool:
    return isinstance(value, str) and len(value) <= most and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_hex(value: Any, length: int) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{length}}}", value) is not None


def _is_table(value: Any, fits: Check) -> bool:
    return isinstance(value, dict) and all(_is_text(name) and fits(entry) for name, entry in value.items())


def _check(right: bool, where: str) -> None:
    if not right:
        raise _Wrong(f"the value of {where} has a type or range that kvbench never writes")


def _keys(table: Mapping[str, Any], names: tuple[str, ...], where: str, *, every: bool = True) -> None:
    if unknown := [name for name in table if name not in names]:
        raise _Wrong(f"{where} has the unknown key {quote(unknown[0])}")
    if every and (absent := [name for name in names if name not in table]):
        raise _Wrong(f"{where} has no {quote(absent[0])}")
