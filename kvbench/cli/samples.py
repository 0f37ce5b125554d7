"""Reads and prints the stored samples of a question: prompt, answers, reference answer, scores.

Control characters in model-written text are always escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from shlex import quote as quote_word
from typing import TYPE_CHECKING, Any

from kvbench.cli import run_questions
from kvbench.cli.run_questions import RunQuestions
from kvbench.console import terminal
from kvbench.errors import UserError, quote
from kvbench.eviction import choose
from kvbench.eviction.budget import label
from kvbench.registry import did_you_mean
from kvbench.report.image_list import ListedImage, images, kept_shares, split
from kvbench.store import parse_turns, read_run, read_texts

if TYPE_CHECKING:
    import pandas as pd

SCORES = ("score", "score_strict", "score_partial")


def samples(folder: Path, wanted: str, method: str | None, questions: RunQuestions) -> list[dict[str, Any]]:
    """Return the rows that answer a question, with their texts. The question's reference answer and later turns are
    added if the task's data are on this machine.

    wanted: the question's id, TASK/ID, or a row key. method: return only this method's rows; None: the rows of all
    methods. Raises UserError if no row fits.
    """
    rows = read_run(folder).rows
    if method is not None:
        method = _method(folder, method, sorted(rows["method"].dropna().unique()))
        rows = rows[rows["method"] == method]
    chosen = rows[
        (rows["doc_id"] == wanted) | (rows["row_key"] == wanted) | (rows["task"] + "/" + rows["doc_id"] == wanted)
    ]
    if chosen.empty:
        known = list(rows["doc_id"].dropna().unique())
        hint = did_you_mean(wanted, known) or f" 'kvbench show {quote_word(str(folder))} --ids' lists the questions."
        under = f" under method {quote(method)}" if method else ""
        raise UserError(f"run {quote(folder.name)} has no question or row {quote(wanted)}{under}.{hint}")
    texts = read_texts(folder, keys=set(chosen["row_key"])).set_index("row_key")
    entries = [_plain(row) | _texts(texts, row["row_key"]) for _, row in chosen.iterrows()]
    return [_with_question(entry, questions) for entry in entries]


def by_prompt(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield groups of successive samples that have the same question and prompt."""
    for _, group in itertools.groupby(entries, lambda entry: (entry["task"], entry["doc_id"], entry["prompt"])):
        yield list(group)


def show(entries: list[dict[str, Any]], questions: RunQuestions) -> None:
    """Print samples. Successive samples with the same question and prompt show these texts only once. questions: says
    why a later question is missing."""
    for group in by_prompt(entries):
        for entry in group:
            title = f"{entry['task']} {entry['doc_id']} {heading(entry)}"
            print(f"== {terminal.clean(title)}\n{terminal.clean(facts(entry))}")
            if entry is group[0]:
                _show_question(entry)
            _show_answer(entry, questions)


def heading(entry: dict[str, Any]) -> str:
    """Return a heading that identifies a sample within its question: its number, method and budget."""
    budget = f" at {entry['budget']}" if "budget" in entry else ""
    budget += f" ({label(entry['budget_share'])})" if "budget_share" in entry else ""
    return f"sample {entry.get('sample', 0)}: {entry['method']}{budget}"


def facts(entry: dict[str, Any]) -> str:
    """Return one line with a sample's status, scores, number of tokens and stop reason, and with the shares of text and
    images that its cache kept."""
    scores = [f"{k} {entry[k]:.3g}" for k in SCORES if k in entry]
    length = [f"{entry.get('output_tokens', 0)} tokens", str(entry.get("stop_reason", ""))]
    return ", ".join(filter(None, [entry["status"], *scores, *length, *kept_shares(entry)]))


def _show_question(entry: dict[str, Any]) -> None:
    listed = images(entry.get("image_list"))
    parts = split(entry["prompt"] or "", listed)
    _print("prompt", "".join(f"[image {part.number}]" if isinstance(part, ListedImage) else part for part in parts))
    for image in listed:
        print(f"-- {terminal.clean(image.text)}")
    if entry.get("reference"):
        _print("reference answer", entry["reference"])


def _show_answer(entry: dict[str, Any], questions: RunQuestions) -> None:
    if "turns" not in entry:
        _print("output", entry["output"])
    for number, turn in enumerate(entry.get("turns", ()), 1):
        if number > 1:
            missing = f"(not stored in the run, and {questions.missing(entry['task'])})"
            _print(f"question {number}", turn["question"] or missing)
        _print(f"output {number}", turn["output"])
    if entry.get("extracted"):
        print(f"-- extracted: {terminal.clean(entry['extracted'])}")


def _print(title: str, content: str | None) -> None:
    print(f"-- {title}")
    for line in (content or "").split("\n"):
        print(terminal.clean(line))


def _with_question(entry: dict[str, Any], questions: RunQuestions) -> dict[str, Any]:
    """Return a sample with the reference answer of its question, if the task's data are on this machine.

    A conversation also gets `turns`: the user's question and the model's answer of each turn. The first question is the
    stored prompt. All later questions are None if the data lack one of them.
    """
    doc = questions.of(entry)
    if doc is not None and (wanted := run_questions.reference(doc)):
        entry["reference"] = wanted
    if (answers := entry.pop("turns")) is None:
        return entry
    later: list[str | None] = []
    if doc is not None:
        later += run_questions.later(doc)[: len(answers) - 1]
    if len(later) < len(answers) - 1:  # the data have fewer turns than the recorded conversation
        later = [None] * (len(answers) - 1)
    asked = (entry["prompt"], *later)
    return entry | {"turns": [{"question": q, "output": a} for q, a in zip(asked, answers, strict=True)]}


def _method(folder: Path, name: str, there: list[str]) -> str:
    """Return the name that a method has in the run's rows. name: the name that the user typed. there: the names in the
    rows. The method need not be installed here. Raises UserError if the rows do not have the method."""
    plain = name.strip().lower()
    if plain in there:
        return plain
    if hint := did_you_mean(name, there):
        raise UserError(f"run {quote(folder.name)} has no method {quote(name)}.{hint}")
    canonical = choose.canonical(name)
    if canonical not in there:
        raise UserError(f"run {quote(folder.name)} has no method {quote(name)}. It has {', '.join(there)}.")
    return canonical


def _plain(row: pd.Series) -> dict[str, Any]:
    """Return a row as a dictionary of JSON types, without columns that are empty."""
    kept = row.dropna()
    return {
        k: v.isoformat() if hasattr(v, "isoformat") else getattr(v, "item", lambda v=v: v)() for k, v in kept.items()
    }


def _texts(texts: pd.DataFrame, key: str) -> dict[str, Any]:
    names = ("prompt", "output", "turns")
    if key not in texts.index:
        return dict.fromkeys(names)
    row: dict[str, Any] = {n: value if isinstance(value := texts.at[key, n], str) else None for n in names}
    return row | {"turns": parse_turns(row["turns"])}
