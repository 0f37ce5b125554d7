"""Chooses the questions that a page shows, and reads the answers of all cells to these questions.

    chosen = read(report, tables, recorded)
    chosen.questions[0]["answers"][0]["output"]     # (text, note on what is cut off)

A page holds at most MOST_QUESTIONS questions of a task, and at most MOST_BYTES of text; the first question is always
shown. Questions with recorded decisions come first. Then come questions on which cells score unlike the full cache (or
unlike the table's first cell, if the full cache was not run), chosen so that as many cells as possible have such a
question. Then come the questions whose scores differ most between cells; equal differences are in order of ids.
Questions without a score come last. For gated tasks, a page shows only ids and scores.

A question stands on the page once per prompt, because runs of other models or prompt styles ask it with other prompts:
only answers to the same prompt stand side by side.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.eviction.budget import Budget, named
from kvbench.report.cells import FULL, SCORES, method_label
from kvbench.report.image_list import images, kept_shares
from kvbench.report.page.scored import Scored
from kvbench.report.page.text import cut, shown
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import shared_options
from kvbench.store import parse_turns, read_run, read_texts
from kvbench.store.schema import natural
from kvbench.taskkit.names import is_gated

if TYPE_CHECKING:
    import pandas as pd

MOST_QUESTIONS = 12  # of a task
MOST_BYTES = 700_000
OPENING = 60  # characters of the prompt that the page shows beside the question's id
# An opening (`_open`) begins with the whole word that holds the first difference, but at most this many characters
# before the difference: Chinese and Japanese have no blanks between words.
LONGEST = 20
COLUMNS = (
    *("row_key", "task", "doc_id", "sample", "method", "options", "budget", "budget_share", "interval", "status"),
    *("stop_reason", *SCORES, "extracted", "output_tokens", "note", "image_list", "kept_text", "kept_images"),
)


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions that the page shows, as JSON data: one object per prompt of a question. `note`: how the
    questions were chosen, or why there are none."""

    questions: list[dict[str, Any]]
    note: str


def read(report: ScoreReport, tables: Sequence[Scored], recorded: set[tuple[str, str]]) -> Questions:
    """Choose questions and read their texts. `recorded`: the (task, question) pairs that have recorded decisions."""
    folders = {run["run"]: path for run in report.loaded.runs if (path := Path(run["path"])).is_dir()}
    if not folders:
        return Questions([], "The report was made from tables without a run folder, so there are no texts to show.")
    of_task: dict[str, list[Scored]] = {}
    for scored in tables:  # several tables of one task have different models or settings
        of_task.setdefault(scored.table.task, []).append(scored)
    wanted = {task: chosen(several, recorded) for task, several in of_task.items()}
    rows = _rows(folders, wanted)
    if rows.empty:
        return Questions([], "The run folders have no answers to the questions of these tables.")
    shared = shared_options(report.loaded)
    found: list[list[dict[str, Any]]] = []  # for each question its entries, one per prompt
    by_question = dict(list(rows.groupby(["task", "doc_id"], sort=False)))
    stored = [one for one in _in_turn(wanted) if one in by_question]  # not those of tables without a run folder
    taken, every = 0, len(stored)
    for task, name in stored:
        of = [one for one in tables if one.table.task == task]
        facts = {"titles": [shown(one.title) for one in of], "headline": of[0].table.headline}
        entries = [_question(task, name, part, shared) | facts for part in _by_prompt(by_question[task, name])]
        size = sum(map(_bytes, entries))
        if taken + size <= MOST_BYTES or not found:
            taken += size
            found.append(entries)
    for alike in itertools.zip_longest(*found):  # the first prompts of all questions, then the second prompts
        _open([entry for entry in alike if entry is not None])
    asked = {(one.table.task, question) for one in tables for question in _every(one)}
    capped = "" if len(found) == every else f", at most {MOST_BYTES // 1000} KB of text in all"
    note = (
        f"{len(found)} of {len(asked)} questions: at most {MOST_QUESTIONS} per task{capped}. Questions with recorded "
        "decisions come first. Then comes, as far as there is room, for each cell a question on which it scores unlike "
        "the full cache of its table, or unlike the table's first cell if the full cache was not run. Then come "
        "the questions on which scores differ most, and questions without a score. Of several samples the first is "
        "shown, and its score counts here. "
        "'kvbench show RUN --sample ID' prints any other sample."
    )
    return Questions([entry for entries in found for entry in entries], note)


def chosen(tables: Sequence[Scored], recorded: set[tuple[str, str]]) -> list[str]:
    """Return the questions of a task to show, at most MOST_QUESTIONS, in the order that the module's docstring states.
    tables: all tables of the task. recorded: the (task, question) pairs that have recorded decisions."""
    every = {question for scored in tables for question in _every(scored)}
    spread = dict.fromkeys(every, -1.0)  # for each question the largest spread of its scores in any table; -1: no score
    unlike: dict[str, set[tuple[int, int]]] = {q: set() for q in every}  # cells that differ from their table's first
    for number, scored in enumerate(tables):
        for question, scores in _by_question(scored).items():
            first, values = scores.get(0), scores.values()
            spread[question] = max(spread[question], round(max(values) - min(values), 9))
            apart = {(number, place) for place, score in scores.items() if first is not None and score != first}
            unlike[question] |= apart
    ordered = sorted(spread, key=lambda q: (-spread[q], natural(q)))
    picked = [q for q in ordered if (tables[0].table.task, q) in recorded]
    missing = set[tuple[int, int]]().union(*unlike.values()).difference(*(unlike[q] for q in picked))
    while missing and len(picked) < MOST_QUESTIONS:
        best = max(ordered, key=lambda q: len(unlike[q] & missing))
        picked.append(best)
        missing -= unlike[best]
    return list(dict.fromkeys([*picked, *ordered]))[:MOST_QUESTIONS]


def _every(scored: Scored) -> set[str]:
    """Return the ids of a table's questions, with and without a score."""
    return {question for rows in scored.parts.values() for question in rows.values("doc_id")}


def _by_question(scored: Scored) -> dict[str, dict[int, float]]:
    """Return for each question the scores that the page shows: {place of the cell in `scored.shown`, from 0: score}."""
    found: dict[str, dict[int, float]] = {}
    for place, cell in enumerate(scored.shown.values()):
        for question, score in cell.items():
            found.setdefault(question, {})[place] = score
    return found


def _in_turn(wanted: dict[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield each task's first question, then each task's second question, and so on. In this order the limit on the
    page's size treats all tasks alike."""
    for place in range(MOST_QUESTIONS):
        yield from ((task, names[place]) for task, names in wanted.items() if place < len(names))


def _rows(folders: Mapping[str, Path], wanted: dict[str, list[str]]) -> pd.DataFrame:
    """Return, for each wanted question and every cell of each run, the row of one sample with its texts: the first
    sample with the status ok or, if no sample has this status, the first sample. The rows are in the order of the runs.
    folders: the folder of each run, by the run's name. wanted: the questions of each task."""
    import pandas as pd
    import pyarrow.compute as pc

    parts = []
    names = sorted({name for questions in wanted.values() for name in questions})
    for run, folder in folders.items():
        table = read_run(folder, COLUMNS).table
        table = table.filter(pc.is_in(table.column("doc_id").cast("string"), value_set=pc.cast(names, "string")))
        frame = table.to_pandas()
        frame = frame[[doc in wanted.get(task, ()) for task, doc in zip(frame["task"], frame["doc_id"])]]
        if not frame.empty:
            frame = frame.assign(run=run, ok=frame["status"] != "ok")
            parts.append(frame.merge(read_texts(folder, keys=set(frame["row_key"])), on="row_key", how="left"))
    if not parts:
        return pd.DataFrame(columns=list(COLUMNS))
    rows = pd.concat(parts, ignore_index=True).sort_values(["ok", "sample"], kind="stable").drop_duplicates("row_key")
    cell = ["run", "task", "doc_id", "method", "options", "budget_share", "budget", "interval"]
    rows.loc[rows["budget_share"].notna(), "budget"] = None  # a share gives each prompt another number of entries
    return rows.drop_duplicates(cell).sort_index()


def _by_prompt(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Split the rows of a question by their prompt and images. A row without a stored prompt counts as a row with the
    question's first stored prompt, and a row without a list of images as a row with the first list."""
    asked = []
    for column in rows["prompt"], rows["image_list"]:
        first = next((value for value in column if isinstance(value, str)), "")
        asked.append(column.map(lambda value, first=first: value if isinstance(value, str) else first))
    return [part for _, part in rows.groupby(asked, sort=False)]


def _question(task: str, name: str, rows: pd.DataFrame, shared: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a question with the answers of all cells, in the form of the page's data. rows: one per cell, from
    `_rows`. shared: from `shared_options`."""
    gated = is_gated(task)
    prompt = next((text for text in rows["prompt"] if isinstance(text, str)), None)
    withheld = gated or prompt is None
    several = rows["interval"].nunique() > 1
    answers = [_answer(row, shared, withheld, several) for row in rows.to_dict("records")]
    answers.sort(key=lambda answer: (answer["order"], answer["method"]))
    text, note = cut(
        "" if withheld else prompt or "", f"column prompt of texts.parquet, row_key {shown(rows['row_key'].iloc[0])}"
    )
    talk = not withheld and any(len(parse_turns(turns) or ()) > 1 for turns in rows["turns"])
    return {
        "task": shown(task),
        "id": shown(name),
        "prompt": (text, "\n".join(filter(None, [note, _FIRST_TURN if talk else ""]))),
        "images": [] if withheld else [shown(image.text) for image in images(rows["image_list"].iloc[0])],
        "withheld": _WITHHELD if gated else _NOT_STORED if withheld else "",
        "answers": answers,
    }


def _open(questions: Sequence[dict[str, Any]]) -> None:
    """Add `opening` to each question: some words of its prompt. They begin with the first word at which the prompts of
    the task's questions in `questions` differ. If all these prompts begin with the question's whole prompt, the opening
    is the prompt's first words."""
    prompts: dict[str, list[str]] = {}
    for question in questions:
        prompts.setdefault(question["task"], []).append(question["prompt"][0])
    for question in questions:
        own = question["prompt"][0]
        common = own[: _shared(prompts[question["task"]])]
        back = min(len(re.split(r"\s", common)[-1]), LONGEST)  # to the beginning of the word
        start = 0 if common == own else len(common) - back
        words = ("… " if start else "") + " ".join(own[start : start + 4 * OPENING].split())
        question["opening"] = words if len(words) <= OPENING else f"{words[: OPENING - 1].rstrip()}…"


def _shared(texts: Sequence[str]) -> int:
    """Return the length of the beginning that all texts share."""
    low, high = min(texts), max(texts)
    return next((place for place, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))


_WITHHELD = "The task's data are gated: the page shows ids and scores, no texts."
_FIRST_TURN = (
    "[turn 1: a run does not store the questions of later turns; 'kvbench show RUN --sample ID' prints them where the "
    "task's data are on the machine]"
)
_NOT_STORED = "The run stored no prompt of this question, as runs do for gated data: the page shows scores, no texts."


def _answer(row: dict[str, Any], shared: dict[str, dict[str, Any]], withheld: bool, several: bool) -> dict[str, Any]:
    """Return an answer in the form of the page's data. withheld: whether its texts are left out. several: whether the
    question has answers at several intervals; if so, the answer states its interval."""
    budget = _budget(row)
    facts = {name: row[name] for name in SCORES if row[name] == row[name]}
    texts = {name: row[name] if isinstance(row[name], str) and not withheld else "" for name in ("output", "extracted")}
    turns, column = parse_turns(row["turns"]) or [], "output"
    if len(turns) > 1 and not withheld:
        texts["output"] = "\n\n".join(f"[turn {number}]\n{turn}" for number, turn in enumerate(turns, 1))
        column = "turns"
    key = shown(row["row_key"])
    return {
        "key": row["row_key"],
        "run": shown(row["run"]),
        "method": shown(method_label(row["method"], row["options"], shared.get(row["method"]))),
        "budget": named(budget),
        "interval": int(row["interval"]) if several and row["interval"] == row["interval"] else None,
        "order": -2.0 if row["method"] == FULL else -1.0 if budget is None else float(budget),
        "sample": int(row["sample"]),
        "scores": facts,
        "status": shown(row["status"]),
        "note": shown(row["note"]) if isinstance(row["note"], str) else "",
        "stop": shown(row["stop_reason"]) if isinstance(row["stop_reason"], str) else "",
        "kept": kept_shares(row),
        "tokens": int(row["output_tokens"]) if row["output_tokens"] == row["output_tokens"] else None,
        "output": cut(texts["output"], f"column {column} of texts.parquet, row_key {key}"),
        "extracted": cut(texts["extracted"], f"column extracted of rows.parquet, row_key {key}"),
    }


def _budget(row: dict[str, Any]) -> Budget | None:
    share, entries = row["budget_share"], row["budget"]
    if share == share and share is not None:
        return float(share)
    return int(entries) if entries == entries and entries is not None else None


def _bytes(question: dict[str, Any]) -> int:
    texts = [question["prompt"][0]]
    for answer in question["answers"]:
        texts += answer["output"][0], answer["extracted"][0], answer["note"]
    return sum(len(text.encode()) for text in texts)
