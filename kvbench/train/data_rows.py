"""Parses the rows of a training's data file: questions, conversations with or without a last reply, raw texts.

Data sets on the hub name their columns in many ways. `FORMS` lists the accepted forms of a row, each with its column
names. If a row has several forms, the first in `FORMS` counts. A column whose value is null counts as missing.
Blank text is no error: data sets have a few blank values among many thousand rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, few, joined, quote
from kvbench.scoring.boxed import last_box
from kvbench.sources.data import json_type
from kvbench.sources.data.formats import check_plain
from kvbench.task import Turn
from kvbench.taskkit.prompts import PLAIN, Style
from kvbench.train.prompting import Prompting

TALKS = ("messages", "conversations")
QUESTIONS = ("question", "problem", "query", "prompt")
REPLIES = ("response", "completion", "output")
TEXTS = ("text", "content")
FORMS = (
    " or ".join(TALKS),
    f"{', '.join(QUESTIONS)} (with answer or solution, {joined(REPLIES, 'or')}, context, system)",
    " or ".join(TEXTS),
)
ROLES = {"system": "system", "user": "user", "human": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "model"), "assistant")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")  # of the files in a folder
SHOWN = 12  # columns or roles in a message
Spoken = tuple[str, str]  # role and text of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A parsed row of a data file: a conversation that ends with a user's message, or a raw text (then without turns).

    turns: the user's messages. replies: the assistant's messages between them. given: the assistant's reply to the
    user's last message, if the row has one. blank: whether the question, a message before the given reply, or the raw
    text is blank. reference: the right answer, if the row has one. style: the prompt style of a question; plain for
    other rows.
    """

    turns: tuple[Turn, ...] = ()
    replies: tuple[str, ...] = ()
    given: str | None = None
    text: str = ""
    blank: bool = False
    reference: str | None = None
    style: Style = PLAIN


def data_files(path: Path) -> list[Path]:
    """Return the files that ``--data`` names: the file itself, or all data files in a folder, in the order of names.
    Raises UserError if a folder has no data file, or if a file cannot be used."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            endings = joined(SUFFIXES, "or")
            raise UserError(f"--data {quote(path)} is a folder without data files. Add a file that ends in {endings}.")
    for file in files:
        check_plain(file, f"--data {quote(file)}", None)
    return files


def parse_row(columns: Mapping[str, Any], where: str, prompting: Prompting) -> Row:
    """Parse a row. where: the row's file and line, for messages. Raises UserError if the row has none of `FORMS`, or a
    value of a wrong form."""
    row = _Columns(columns, where)
    if talk := row.first(TALKS):
        return row.conversation(talk, row.messages(talk), prompting)
    if name := row.first(QUESTIONS):
        reply = row.first(REPLIES)
        given = row.reply(reply) if reply else None
        if isinstance(columns[name], list):
            spoken = [*row.messages(name), *([("assistant", given)] if given is not None else [])]
            return row.conversation(name, spoken, prompting)
        question = row.text(name)
        turn = prompting.turn(question, row.optional("context"), row.optional("system"))
        blank = not question.strip()
        return Row(turns=(turn,), given=given, blank=blank, reference=row.reference(), style=prompting.style)
    if name := row.first(TEXTS):
        text = row.text(name)
        return Row(text=text, blank=not text.strip())
    found = few([quote(name) for name in columns], SHOWN) or "none"
    raise UserError(f"{where}: no column with a question or text; found {found}; accepted: {'; '.join(FORMS)}.")


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of a row; `where` is its file and line.

    All methods except `first` raise UserError for a value of a wrong form.
    """

    values: Mapping[str, Any]
    where: str

    def first(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if self.values.get(name) is not None), None)

    def text(self, name: str) -> str:
        return self._text(quote(name), self.values[name])

    def optional(self, name: str) -> str:
        return "" if self.values.get(name) is None else self.text(name)

    def reference(self) -> str | None:
        """Return the right answer: the column `answer`, else the content of the last LaTeX box in the column
        `solution`; None without either."""
        answer = self.values.get("answer")
        if isinstance(answer, list) and len(answer) == 1:
            [answer] = answer
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            return str(answer)
        if answer is not None and (text := self._text("'answer'", answer)).strip():
            return text
        return last_box(self.optional("solution"))

    def messages(self, name: str) -> list[Spoken]:
        """Return the role and text of each message in a column. A message is an object with the fields `role` and
        `content`, or with the fields `from` and `value`."""
        given = self.values[name]
        if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
            raise UserError(f"{self.where}: {quote(name)} must be a list of messages: objects with role and content.")
        return [self._message(f"message {number} of {quote(name)}", m) for number, m in enumerate(given, start=1)]

    def reply(self, name: str) -> str:
        """Return the reply in a column: a text, or a list with one message of the assistant."""
        if not isinstance(self.values[name], list):
            return self.text(name)
        match self.messages(name):
            case [("assistant", text)]:
                return text
        raise UserError(f"{self.where}: {quote(name)} must be a text, or a list of one message of the assistant.")

    def conversation(self, name: str, spoken: list[Spoken], prompting: Prompting) -> Row:
        system = self.optional("system")
        if spoken and spoken[0][0] == "system":
            (_, system), *spoken = spoken
        roles, texts = [role for role, _ in spoken], [text for _, text in spoken]
        if not roles or roles != [("user", "assistant")[i % 2] for i in range(len(roles))]:
            raise UserError(
                f"{self.where}: the messages of {quote(name)} must alternate between user and assistant, with the user "
                f"first, after at most one system message; got {few(roles, SHOWN) or 'none'}."
            )
        users, replies = texts[0::2], texts[1::2]
        given = replies.pop() if len(replies) == len(users) else None
        first = prompting.message(users[0], self.optional("context"), system)
        return Row(
            turns=(first, *(Turn(question=text) for text in users[1:])),
            replies=tuple(replies),
            given=given,
            blank=not all(text.strip() for text in (*users, *replies)),
            reference=self.reference(),
        )

    def _message(self, label: str, message: Mapping[str, Any]) -> Spoken:
        said, text = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(said, str) or said not in ROLES:
            has = "no role" if said is None else f"the role {quote(said)}"
            raise UserError(f"{self.where}: {label} has {has}; accepted: {', '.join(ROLES)}.")
        return ROLES[said], self._text(f"the content of {label}", text)

    def _text(self, label: str, value: Any) -> str:
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {label} must be text; got {json_type(value)}.")
        return value
