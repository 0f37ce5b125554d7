"""Checks that the rows of one table are comparable, and describes the differences that rows of one table may have.

    check(rows)                            # raises UserError if one table has two models, judges ...
    for label, part in split(rows, ("model",)): ...
    for mixture in mixtures(rows): sentence(mixture, ["walk"])

The check refuses rows whose scores may differ for another reason than the method. Such rows differ in a column of
`SAME`, the version of a method, the artefacts of a method with the same options, the judge, or a question's prompt. In
a column of `BY_QUESTION`, only rows of the same question must agree. A difference in a column of `NOTED` gets a note
below the tables: with other versions, devices or numbers of slots, sampled answers may differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError, counted, quote
from kvbench.report.cells import labels_of
from kvbench.report.question_conflicts import ALL as ALL  # `load` and the command take it from here
from kvbench.report.question_conflicts import APART, conflict, run_at, with_several
from kvbench.report.rows import RUN, Rows, Text

# Columns that must be equal in one table, with their names in the message.
SAME = {
    "model": "model",
    "model_revision": "model revision",
    "adapter": "adapter",
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
# The value that the engine writes into a column for some questions, whatever the run's setting: if later turns have
# images, every turn begins with an empty cache. Like a missing value, it counts as equal to every value.
OF_QUESTION = {"multi_turn_cache": "reset (images)"}
# Columns that may differ from question to question: a task may set the sampling and the thinking of each question, and
# a long prompt leaves less room for the answer.
BY_QUESTION = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens", "thinking")
ARTEFACTS = "tables, drafts or plug-in"
# Columns whose differences get a note below the table: (column, its name in the note, further columns). The values of
# the column are compared only between rows that agree in the further columns.
NOTED = (
    ("kvbench_version", "versions of kvbench", ()),
    ("torch_version", "versions of torch", ()),
    ("transformers_version", "versions of transformers", ()),
    ("python_version", "versions of Python that ran the programs", ()),
    ("device", "devices", ()),
    ("method_source", "sources of {method}", ("method",)),
    ("slots", "numbers of slots of {method}", ("method", "options", "budget_share", "budget")),
    ("decoding", "ways of decoding", ()),
    ("multi_turn_cache", "ways to read later turns", ()),
)
NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five"}
# The date of a judgement, left out of comparisons. A date within a judge's name does not match.
_DATE = re.compile(r"(?<=, )[0-9]{4}-[0-9]{2}-[0-9]{2}(?=,)")


@dataclass(frozen=True, slots=True)
class Mixture:
    """An allowed difference between the rows of one table, such as two versions of torch. `what`: what differs, in the
    words of a note. `counts`: for each of the differing values the number of rows that have this value."""

    column: str
    method: str | None  # None: the rows of all methods
    what: str
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference that keeps rows out of a common table although they agree in the columns of `SAME`. `word`: what
    differs, in words. `values`: a column with the value in which rows differ, such as their judge. A row that the
    difference does not concern, such as a row of another method, has the code -1 in this column. `remedy`: what the
    user can do."""

    word: str
    values: Text
    remedy: str


def values_of(rows: Rows, column: str) -> list[Any]:
    """Return the distinct values of a column, sorted; [None] for a column without values.

    Values that count as equal to every value are not returned: missing values (the full cache has no interval), and the
    value in `OF_QUESTION`. For a column in `BY_QUESTION` with several values, the result is [None] if the rows of each
    question agree, because in such a column only rows of the same question must agree.
    """
    values = [value for value in rows.values(column) if value != OF_QUESTION.get(column)]
    if column in BY_QUESTION and len(values) > 1 and with_several(rows, rows.number(column)) is None:
        return [None]
    return values or [None]


def intervals_apart(rows: Rows) -> list[str]:
    """Return a list with one note if the rows have several intervals, otherwise an empty list."""
    *others, last = map(str, values_of(rows, "interval"))
    if not others:
        return []
    return [
        f"Rows at intervals {', '.join(others)} and {last} stand in separate tables; methods are compared within an "
        "interval."
    ]


def split(rows: Rows, columns: Sequence[str]) -> list[tuple[str, Rows]]:
    """Split rows by the values of the columns. Return a (label, rows) pair for each combination of values. A
    row with a missing value, or with the column's value in `OF_QUESTION`, is put into the parts of all values."""
    parts = [("", rows)]
    for column in columns:
        parts = [
            (
                _joined(label, "" if value is None else f"{SAME[column]} {value}"),
                part if value is None else part.where(_agrees(part, column, value)),
            )
            for label, part in parts
            for value in values_of(part, column)
        ]
    return parts


def split_all(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Split rows until the rows of each part may share a table. Yield (label, rows) pairs. Rows are split by every
    setting, version, artefact and judge that differs. They are also split by run if a question had different prompts or
    settings, or if a sample has two rows. `check` still refuses a run that alone has such rows."""
    mixed = _mixed_within_a_run(rows)
    for label, part in split(rows, [c for c in SAME if c not in mixed and values_of(rows, c)[1:]]):
        for further, alike in _split_further(label, part):
            apart = conflict(alike) is not None or any(len(values_of(alike, column)) > 1 for column in BY_QUESTION)
            yield from _by_run(further, alike) if apart else [(further, alike)]


def _mixed_within_a_run(rows: Rows) -> list[str]:
    """Return the columns of `BY_QUESTION` that have several values within a run. They do not tell runs apart."""
    mixed = [column for column in BY_QUESTION if len(rows.values(column)) > 1]
    return [c for c in mixed if any(len(part.values(c)) > 1 for _, part in _by_run("", rows))]


def _by_run(label: str, rows: Rows) -> Iterator[tuple[str, Rows]]:
    runs = rows.text(RUN)
    for code in runs.present():
        yield _joined(label, f"run {runs.names[code]}"), rows.where(runs.codes == code)


def check(rows: Rows) -> None:
    """Raise UserError if the rows must not share a table. The error names what differs, and one or two runs."""
    for column, word in SAME.items():
        if len(values_of(rows, column)) > 1:
            mine = rows
            if column in BY_QUESTION and (question := with_several(rows, rows.number(column))) is not None:
                mine = rows.where(rows.text("doc_id").is_one_of(question))
            firsts = [(place, value) for place, value in mine.firsts(column) if value != OF_QUESTION.get(column)]
            conflicts = [(run_at(mine, place), f"{word} {value}") for place, value in firsts[:2]]
            raise _refusal(conflicts, f"--group-by {column} makes separate tables.")
    for difference in differences(rows):
        raise _error(rows, difference)
    if (error := conflict(rows)) is not None:
        raise error


def differences(rows: Rows) -> Iterator[Difference]:
    """Yield the differences that forbid a common table: two versions of a method, two sets of artefacts of a method
    with the same options, or two judges."""
    methods, labels = rows.text("method"), labels_of(rows)
    versions, artefacts = rows.text("method_version"), rows.text("artefacts")
    for code in methods.present():
        mine = methods.codes == code
        yield from _difference(f"{methods.names[code]} version", versions, mine, APART)
        for kind in Text(labels.codes[mine], labels.names).present():
            word = f"{ARTEFACTS} of {methods.names[code]}"
            yield from _difference(word, artefacts, mine & (labels.codes == kind), APART)
    judges = rows.text("judge").renamed(judge_of)
    yield from _difference(
        "judge", judges, judges.codes >= 0, "'kvbench score RUN --all' rates all answers again with one judge."
    )


def mixtures(rows: Rows) -> Iterator[Mixture]:
    """Yield the allowed differences between the rows, in the columns of `NOTED`."""
    for column, what, within in NOTED:
        by_method: dict[str | None, dict[str, int]] = {}
        for part in _within(rows, within):
            counts = _counts(part, column)
            method = part.text("method").list()[0] if within else None
            if len(counts) > 1:
                total = by_method.setdefault(method, {})
                total |= {value: total.get(value, 0) + count for value, count in counts.items()}
        for method, counts in by_method.items():
            yield Mixture(column, method, what.format(method=method), dict(sorted(counts.items())))


def sentence(mixture: Mixture, tasks: Sequence[str]) -> str:
    """Return a note such as "walk, chain: rows of two versions of torch, 2.12.0 (24 rows) and 2.13.0 (8 rows)." """
    listed = [f"{value} ({counted(count, 'row')})" for value, count in mixture.counts.items()]
    number = NUMBERS.get(len(listed), str(len(listed)))
    return f"{', '.join(tasks)}: rows of {number} {mixture.what}, {', '.join(listed[:-1])} and {listed[-1]}."


def judge_of(text: str) -> str | None:
    """Return the judge from a value of the column `judge`, without the date of the judgement. None if no judge rated
    the answer."""
    return None if text.startswith("nobody") else _DATE.sub("", text).strip()


def _split_further(label: str, rows: Rows) -> Iterator[tuple[str, Rows]]:
    difference = next(differences(rows), None)
    if difference is None:
        yield label, rows
        return
    values = difference.values
    for code in sorted(values.present(), key=values.names.__getitem__):
        part = rows.where((values.codes == code) | (values.codes < 0))
        yield from _split_further(_joined(label, _named(difference, values.names[code])), part)


def _difference(word: str, values: Text, of: Any, remedy: str) -> Iterator[Difference]:
    """Yield a Difference if the rows that the mask `of` chooses have two or more different `values`. word: what
    differs, in words. remedy: what the user can do."""
    mine = Text(values.codes.copy(), values.names)
    mine.codes[~of] = -1
    if len(mine.present()) > 1:
        yield Difference(word, mine, remedy)


def _error(rows: Rows, difference: Difference) -> UserError:
    """Return the error for a difference. The error names two runs and their values."""
    values = difference.values
    codes = values.present()[:2]
    runs = [run_at(rows, int((values.codes == code).argmax())) for code in codes]
    if not difference.word.startswith(ARTEFACTS):
        conflicts = [(run, f"{difference.word} {values.names[code]}") for run, code in zip(runs, codes)]
        return _refusal(conflicts, difference.remedy)
    listed = [f"{_named(difference, values.names[code])} in {run}" for run, code in zip(runs, codes)]
    method = difference.word.removeprefix(f"{ARTEFACTS} of ")
    return UserError(
        f"method {quote(method)} used {listed[0]}, but {listed[1]}; scores are not comparable. {difference.remedy}"
    )


def _refusal(conflicts: Sequence[tuple[str, str]], remedy: str) -> UserError:
    (a, first), (b, second) = conflicts
    return UserError(f"{a} has {first} and {b} has {second}; scores are not comparable. {remedy}")


def _named(difference: Difference, value: str) -> str:
    """Return a differing value in words, as in "gkv version 2" or "plug-in mine 3f2a9c01". Of a method's artefacts
    (tables, drafts, plug-in) only those that differ are named."""
    if not difference.word.startswith(ARTEFACTS):
        return f"{difference.word} {value}"
    values = difference.values
    every = [json_object(values.names[code]) for code in values.present()]
    mine = json_object(value)
    differing = [name for one in every for name in one if any(other.get(name) != one[name] for other in every)]
    return ", ".join(f"{name} {mine.get(name, 'none')}" for name in dict.fromkeys(differing))


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. If the text is not a JSON object, return an object with the text as its only
    key and "" as the value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {text: ""}


def _agrees(rows: Rows, column: str, value: Any) -> Any:
    if isinstance(rows.columns[column], Text):
        text = rows.text(column)
        return text.is_one_of(value, OF_QUESTION.get(column, value)) | (text.codes < 0)
    numbers = rows.number(column)
    return (numbers == value) | (numbers != numbers)


def _within(rows: Rows, columns: Sequence[str]) -> Iterator[Rows]:
    """Split rows into parts with equal values in `columns`. Rows without a method are left out if `method` is one of
    the columns.

    If a budget was given as a share of the prompt, the number of entries differs from prompt to prompt. Such rows are
    split by the share, and their numbers of entries are ignored.
    """
    import numpy as np

    if not columns:
        yield rows
        return
    keys = []
    for column in columns:
        if isinstance(rows.columns[column], Text):
            codes = rows.text(column).codes
            keys.append(codes if column == "method" else codes + 1)
        else:
            numbers = np.nan_to_num(rows.number(column), nan=-1.0)
            shared = rows.number("budget_share") >= 0
            keys.append(np.unique(np.where(shared & (column == "budget"), -1, numbers), return_inverse=True)[1])
    for _, part in rows.parts(*keys):
        yield part


def _counts(rows: Rows, column: str) -> dict[str, int]:
    """Return the number of rows that have each value of a column."""
    import numpy as np

    if isinstance(rows.columns[column], Text):
        text = rows.text(column)
        numbers = np.bincount(text.codes + 1, minlength=len(text.names) + 1)[1:]
        return {name: int(number) for name, number in zip(text.names, numbers) if number}
    values, numbers = np.unique(rows.number(column), return_counts=True)
    return {f"{value:g}": int(number) for value, number in zip(values, numbers) if value == value}


def _joined(*labels: str) -> str:
    return ", ".join(filter(None, labels))
