"""Split an answer to LongGenBench into numbered entries, count them, and make the questions for a judge.

The rules are those of the released `Evalution/eval.py` (mozhu621/LongGenBench, commit 62c0e86): an entry begins at a
separator; its number is the first number after the scenario's noun ("Week 7"); of two entries with the same number the
first counts. The judge is asked about each entry that should hold an event, unless the answer lacks the entry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SEPARATOR = "#*#"
DIGITS = 4300  # of the longest integer that Python reads
QUESTION = (
    "Context: {entry}### Instruction: Does this context include the {event}? Please answer with 'yes' or 'no' only."
)


def read_entries(text: str, noun: str) -> dict[int, str]:
    """Return the entries of a text by number. noun: the word before each number, such as "Week" or "Menu Day"."""
    entries: dict[int, str] = {}
    for entry in text.split(SEPARATOR):
        number = re.search(rf"{re.escape(noun)} (\d+)", entry)
        if number and len(number[1]) <= DIGITS:
            entries.setdefault(int(number[1]), entry)
    return entries


def completion(entries: Mapping[int, str], number: int) -> float:
    """Return the share of the entries numbered 1 to `number` that the answer has. entries: the answer's entries by
    number."""
    return sum(wanted in entries for wanted in range(1, number + 1)) / number


def questions(entries: Mapping[int, str], events: Mapping[str, str]) -> list[str]:
    """Return the questions for the judge: one per event whose entry was written. entries: the text of each entry by its
    number. events: the event that each entry should hold, by the entry's number."""
    return [
        QUESTION.format(entry=entries[int(number)], event=event)
        for number, event in events.items()
        if int(number) in entries
    ]


def says_yes(reply: str) -> bool:
    return "yes" in reply.lower()
