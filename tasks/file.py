"""`file`: your own questions from a JSON-lines file, `kvbench run --task-file questions.jsonl`.

One object per line; docs/tasks.md lists the fields. If the reference answer is a number or LaTeX (`is_mathematics`),
math-verify compares it with the model's answer; an answer that is the same text (`unwrapped`), such as the code "H2O",
is right too. Any other reference is compared as text (`fold`) with the content of the model's box. Without a box, it is
compared with the whole text after the thinking block. If the texts differ, math-verify compares a reference that may be
algebra (`same_algebra`).

By default, a question with an `answer_prefix` is asked without thinking, because the prefix follows the place of a
thinking block. The prefix counts as part of the answer: it may open the box.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, bare, counted, quote
from kvbench.registry import tasks
from kvbench.scoring.boxed import after_thinking, last_box
from kvbench.scoring.latex import FONT, as_text
from kvbench.scoring.math import boxed, score_math
from kvbench.sources.data import FILE_LIMIT, is_inside, json_type, read_jsonl, read_plain
from kvbench.task import IMAGE, DataSource, Doc, GenSpec, Image, Output, Score, Task
from kvbench.taskkit.prompts import STYLES
from kvbench.taskkit.rows import reasoning

LONGEST = 50  # digits; an output may repeat a number thousands of times
SHOWN = 5  # how many of a file's problems the error message lists
MEDIA = re.compile(r"(?<![a-z])(images?|img|pictures?|photos?|videos?|audios?)(?![a-z])", re.I)  # in names of fields
_OPERATOR = re.compile(r"[+*/^=_\\]|-.*[a-z]|[a-z].*-")  # "A-B-C" may be an order
_PLAIN = r"[0-9]+(?:\.[0-9]+)?"
_NUMBER = re.compile(rf"[-+]?(?:{_PLAIN}|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}})?")
_SCIENTIFIC = re.compile(rf"(?<![\w.])(?<![0-9],){_PLAIN}[eE][-+]?[0-9]{{1,3}}(?!\w|[.,][0-9])")  # no part of a word
# The fields that may hold text, as `_wrong` checks them: name, whether numbers are allowed, whether it is required.
_TEXTS = tuple((field, False, False) for field in ("context", "system", "answer_prefix", "category", "cluster_id"))


@tasks.register("file")
class FileTask(Task):
    version = "5"  # 1e-05 is a number in answers too; LaTeX's markup does not count
    suite = "own"
    summary = "your own questions from a JSON-lines file (--task-file)"
    prompt_styles = ("default", "plain")

    def __init__(self, path: str | Path = "") -> None:
        super().__init__()
        if not str(path):
            raise UserError("task 'file' needs a file: --task-file FILE.")
        self.path = Path(path)
        items = _items(self.path)  # checks the file before the run; not stored, because tasks are pickled for scoring
        self._count, self._unseen = len(items), _unseen(item for _, item in items)
        self._sha256 = hashlib.sha256(self.path.read_bytes()).hexdigest()
        self.name = "file/" + (re.sub(r"[^\w.-]", "-", self.path.stem.lower(), flags=re.ASCII).lstrip(".-")[:64] or "x")

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        folder = self.path.parent
        return [_doc(identity, item, style, folder) for identity, item in _items(self.path)[:limit]]

    def gen(self, model_type: str) -> GenSpec:
        return reasoning(model_type, max_new_tokens=8192)

    def score(self, doc: Doc, output: Output) -> Score:
        whole, reference = doc.turns[0].answer_prefix + output.text, str(doc.reference)
        answer, shown = (after_thinking(text, output.thinking) for text in (output.text, whole))
        box = last_box(shown)
        texts = {answer, shown} if box is None else {box}
        if is_mathematics(doc.reference):
            # Numbers in the prefix are no answer; but the prefix may open the box.
            read = output.text if box == last_box(answer) else whole
            score = score_math(decimals(read), decimals(reference), thinking=output.thinking)
            wanted, given = value(reference), {value(text) for text in texts}
            if wanted in given:
                return replace(score, value=1.0, strict=float(box is not None))
            if _SCIENTIFIC.search(reference) and all(isinstance(one, Decimal) for one in (wanted, *given)):
                return replace(score, value=0.0, strict=0.0)  # math-verify compares six decimals only
            return score
        right = any(fold(text) == fold(reference) or same_algebra(text, reference) for text in texts)
        return Score(
            value=float(right),
            strict=float(right and box is not None),
            extracted=box,
            aux={"no_answer": float(not (box or answer.strip()))},
        )

    def notes(self) -> list[str]:
        if not self._unseen:
            return []
        fields = ", ".join(f"{quote(field)} ({counted(n, 'question')})" for field, n in self._unseen.items())
        return [f"{bare(self.path)}: the model does not see {fields}; name image files in a list 'images'."]

    def size(self) -> int:
        return self._count

    def sources(self) -> dict[str, str]:
        return {"path": str(self.path), "sha256": self._sha256}


def is_mathematics(answer: Any) -> bool:
    """Return whether a reference answer is a number or LaTeX, such as "\\pi".

    A text counts as such if it has a digit or a backslash, and no word. A word is two or more consecutive letters
    outside LaTeX commands and the braces right after them.
    """
    if not isinstance(answer, str):
        return True
    words = re.search(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+(\{[^{}\\]*\})?", "", answer))
    return words is None and re.search(r"[\d\\]", answer) is not None


def fold(text: str) -> str:
    """Return a text for comparison: `unwrapped`, in lower case, without quotes and points at its ends."""
    return unwrapped(text).casefold().strip("\"'` .")


def unwrapped(text: str) -> str:
    """Return a text without LaTeX's markup (`as_text`), without ``$`` at its ends, and without parentheses around a
    single letter."""
    return re.sub(r"^\((\w)\)$", r"\1", as_text(text).strip("$").strip())


def value(text: str) -> Decimal | str:
    """Return a text as a number if it is one ("1e-05", "0.50"), otherwise `unwrapped` and without final points."""
    plain = unwrapped(text).rstrip(".")
    return Decimal(plain) if _NUMBER.fullmatch(plain) else plain


def decimals(text: str) -> str:
    """Return a text with its numbers in scientific notation, such as "1e-05", as plain decimals, because math-verify
    reads the "e" as a variable. Numbers of more than `LONGEST` digits stay as they are."""

    def plain(found: re.Match[str]) -> str:
        number = Decimal(found[0])
        return found[0] if abs(number.adjusted()) > LONGEST else format(number, "f")

    return _SCIENTIFIC.sub(plain, text)


def same_algebra(text: str, reference: str) -> bool:
    """Return whether a text equals a reference such as "y = ax + b" by math-verify.

    math-verify takes a word for the product of its letters, in any order, and drops units. So the result is False for a
    reference with a word of four letters or more, for one without an operator, and for a text with other letters.
    """
    letters, others = (set(re.sub(r"\\[a-zA-Z]+|[\W\d_]", "", part)) for part in (text, reference))
    long = re.search(r"(?<![^\W\d_])(?<!\\)[^\W\d_]{4,}", reference)
    if long or letters != others or not _OPERATOR.search(FONT.sub("", reference)):
        return False
    return bool(score_math(boxed(text), reference, thinking=False).value)


def _items(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the id and fields of every question in a file.

    Raises UserError if the file cannot be read or has no question. If lines have problems, UserError lists the first
    `SHOWN` of them; if there are more, it also gives their number.
    """
    label = bare(path)
    if not os.path.isfile(path):
        read_plain(path, f"--task-file {label}", FILE_LIMIT)  # raises an error: the path is no file
    problems: list[str] = []
    items: list[tuple[str, Mapping[str, Any]]] = []
    seen: dict[str, int] = {}
    for line, item in read_jsonl(path, str(path), problems=problems):
        identity = item.get("id")
        wrong = list(_wrong(item))
        name = f"line-{line}" if identity is None else str(identity)
        if not wrong and name in seen:
            wrong = [f"id {quote(name)} is already used on line {seen[name]}."]
        seen.setdefault(name, line)
        problems += [f"{label}:{line}: {what}" for what in wrong]
        items.append((name, item))
    if problems:
        rest = [f"{len(problems)} problems in all; the first {SHOWN} are shown."] if len(problems) > SHOWN else []
        raise UserError("\n".join([*problems[:SHOWN], *rest]))
    if not items:
        lines = path.read_bytes().count(b"\n")
        raise UserError(
            f"{label} has {lines} line{'s' * (lines != 1)} and no question." if lines else f"{label} has no questions."
        )
    return items


def _unseen(items: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return {field: number of questions that have it} for fields that seem to hold a picture, a video or sound.

    Only the name of a field decides what it seems to hold. Empty fields do not count, nor does `images`, which the task
    reads.
    """
    return Counter(
        name for item in items for name, value in item.items() if value and name != "images" and MEDIA.search(name)
    )


def _wrong(item: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each problem of one question's fields: missing, empty, of a wrong type or not valid text."""
    identity = item.get("id")
    names = item.get("images", [])
    listed = names is None or isinstance(names, list)
    if not listed or not all(isinstance(name, str) and is_inside(name) for name in names or ()):
        yield "'images' must be a list of names of image files, relative to the folder of this JSON-lines file."
    named = f" (item id {quote(identity)})" if isinstance(identity, (str, int, float)) else ""
    question = "question" if "question" in item or "problem" not in item else "problem"
    for field, numbers, needed in (("id", True, False), (question, False, True), ("answer", True, True), *_TEXTS):
        value = item.get(field)
        if field not in item:
            if needed:
                yield f"field {quote(field)} is missing{named}."
        elif isinstance(value, bool) or not isinstance(value, (str, int, float) if numbers else str):
            if needed or value is not None:  # an optional field may be null
                yield f"{quote(field)} must be text{' or a number' * numbers}; got {json_type(value)}."
        elif needed and isinstance(value, str) and not value.strip():
            yield f"{quote(field)} is empty{named}."
        elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            yield f"{quote(field)} holds an invalid character (a lone surrogate){named}."


def _doc(identity: str, item: Mapping[str, Any], style: str, folder: Path) -> Doc:
    turn = STYLES[style].turn(item["question"] if "question" in item else item["problem"])
    context = item.get("context") or ""
    images = tuple(Image(name=name, path=folder / name) for name in item.get("images") or ())
    if images and IMAGE not in context + turn.question:
        context = IMAGE * len(images) + context
    turn = replace(
        turn,
        context=context if not context or context.endswith("\n") else context + "\n\n",
        system=item.get("system") or turn.system,
        answer_prefix=item.get("answer_prefix") or "",
        images=images,
    )
    return Doc(
        doc_id=identity,
        turns=(turn,),
        reference=item["answer"],
        meta={"category": item["category"]} if item.get("category") else {},
        cluster_id=item.get("cluster_id") or "",
        gen={"thinking": False} if turn.answer_prefix else {},
    )
