"""Makes the questions of a training from a data file: turns each row into a prompt of token ids for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engine.model.load import LoadedModel
from kvbench.errors import bare
from kvbench.sources.data import read_rows
from kvbench.task import Doc
from kvbench.taskkit.reader import ModelReader
from kvbench.train import traces
from kvbench.train.collection import Collection
from kvbench.train.data_rows import Row, data_files, parse_row
from kvbench.train.prompting import Prompting
from kvbench.train.traces import Question

NO_ROOM = "without room for an answer in the model's context"
EMPTY = "with an empty prompt or answer"
OPENING = "<think>"  # some chat templates end a prompt with it; many answers in data files begin with it


def read_questions(
    path: str | Path,
    loaded: LoadedModel,
    collection: Collection,
    prompting: Prompting | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> Iterator[Question]:
    """Yield the questions of a data file, or of all data files in a folder.

    A row is skipped for one of these reasons:

    - Its prompt has no token or a blank message, or is longer than `max_prompt`.
    - Its prompt leaves no room for an answer in the model's context.
    - Training would use the row's own answer, but this answer is blank or has no token (a raw text of one token).

    on_skip: called with the reason for every skipped row. Raises UserError for a row that has none of the forms in
    `data_rows`, or a value of a wrong form, such as a number in place of text.
    """
    prompting = prompting or Prompting()
    reader = prompting.reader(loaded)
    maker = _Maker(loaded, collection, prompting.thinking, prompting.thinks(loaded, reader.chat), reader)
    for count, row in enumerate(parsed_rows(path, prompting), start=1):
        made = maker.question(f"line-{count}", row)
        if isinstance(made, Question):
            yield made
        elif on_skip:
            on_skip(made)


def parsed_rows(path: str | Path, prompting: Prompting) -> Iterator[Row]:
    """Yield the parsed rows of a data file, or of all data files in a folder. Raises UserError for an invalid row."""
    for file in data_files(Path(path)):
        for number, columns in read_rows(file):
            yield parse_row(columns, f"{bare(file)}:{number}", prompting)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes questions from rows of a data file.

    thinking: whether the chat template turns thinking on; None: the template's default. thinks: whether the model's
    answers hold a thinking block; None if unknown.
    """

    loaded: LoadedModel
    collection: Collection
    thinking: bool | None
    thinks: bool | None
    reader: ModelReader

    def question(self, name: str, row: Row) -> Question | str:
        """Turn a row into a question; for a row to skip, return the reason."""
        if row.blank:
            return EMPTY
        prompt, given = self._talk(name, row) if row.turns else self._text(row.text)
        room, limit = self.loaded.context - len(prompt), self.collection.max_prompt
        if limit and len(prompt) > limit:
            return f"with a prompt of more than {limit} tokens"
        continued = not row.turns and self.collection.answers == "model"
        if room < 1 or (continued and self.collection.max_tokens >= self.loaded.context):
            return NO_ROOM
        if not prompt or given == ():
            return EMPTY
        most = min(self.collection.max_tokens, room)
        judged: dict[str, Any] = {}
        if row.reference is not None:
            judged = {"judge": traces.judge(row.reference, self.thinks, row.style), "reference": row.reference}
        stop = row.style.stop
        return Question(name=name, ids=prompt, max_new_tokens=most, given=given, stop_strings=stop, **judged)

    def _talk(self, name: str, row: Row) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the prompt of a conversation, and the row's own answer if training uses it, else None."""
        doc = Doc(doc_id=name, turns=row.turns, reference=None)
        text = self.reader.text(doc, thinking=self.thinking, answers=row.replies)
        prompt = tuple(self.reader.ids(text))
        if row.given is None or self.collection.answers == "model":
            return prompt, None
        answer = row.given
        if text.rstrip().endswith(OPENING):  # avoid a second tag: the row's answer may begin with it too
            answer = answer.lstrip().removeprefix(OPENING).lstrip("\n")
        return prompt, (*self._encode(answer), *self._end()) if answer.strip() else ()

    def _text(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return a prompt and an answer (or None) made from a raw text.

        If the option `answers` is "data", the prompt is the first token and the answer is the rest of the text.
        Otherwise the prompt is the beginning of the text: at most `max_prompt` tokens, and so few that the context has
        room for `max_tokens` more. Then there is no answer, because the model is to continue the text.
        """
        ids = tuple(self.loaded.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
        if self.collection.answers == "data":
            return ids[:1], ids[1:]
        room = self.loaded.context - self.collection.max_tokens
        return ids[: min(self.collection.max_prompt or room, room)] if room > 0 else (), None

    def _encode(self, text: str) -> list[int]:
        encoded = self.loaded.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def _end(self) -> list[int]:
        """Return the end token to append to an answer, in a list; [] if the model has no end token."""
        stop, usual = self.loaded.stop_ids, self.loaded.tokenizer.eos_token_id
        return [usual if usual in stop else min(stop)] if stop else []
