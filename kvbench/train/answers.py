"""Keeps the model's answers to the questions of a training in files, so that a killed training need not repeat them.

The first line of a file names the model and the questions; each further line is an answer, in order of completion. In a
training with several processes, each process answers its share of the questions and writes these answers to a separate
file. When all processes have finished, the first process moves the answers from these files into one common file. If
the training is killed before that, its next start moves them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvbench.errors import SetupError, UserError, quote, shown
from kvbench.store.files import reason, remedy
from kvbench.train.processes import Processes

HASHES = {"questions": "other questions", "fingerprint": "another model"}  # what a different hash means, for errors


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as token ids (`ids`); empty if its generation failed.

    right: False if the judge finds it wrong, or if its generation failed; else True, also without a judge.
    ended: for an answer of the model, whether it ends with an end token or a stop string; for an answer from the data,
        whether it is whole, not cut to the question's most tokens.
    """

    ids: tuple[int, ...]
    right: bool
    ended: bool


Answers = dict[str, Answer]  # by the question's name


class AnswerFile:
    """A file with the model's answers to the questions of one training.

    asked: all settings on which the answers depend; the file's first line must hold the same settings.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path, self.asked = path, json.loads(json.dumps(asked))

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the stored answers by the question's name; cut off a last line that a kill left incomplete.

        Raises UserError for answers to other questions, of another model or with other settings; SetupError for a
        damaged or unusable file.
        """
        rows: dict[str, dict[str, Any]] = {}
        whole = size = 0  # bytes: of whole lines, of all lines
        try:
            with self.path.open("rb") as file:
                for line in file:
                    size += len(line)
                    if not line.endswith(b"\n"):
                        break
                    row = json.loads(line)
                    if whole == 0:
                        self._check(row)
                    else:
                        _answer(row)
                        rows[row["name"]] = row
                    whole += len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise SetupError(
                f"{quote(self.path)} cannot be read: {reason(error)}. Check its permissions, or choose another --out."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(
                f"{quote(self.path)} is damaged after its first {whole:,} bytes. Remove it to "
                "generate all answers again."
            ) from error
        if whole < size:
            with self._appending() as stream:
                stream.truncate(whole)
        return rows

    def add(self, row: Mapping[str, Any]) -> None:
        """Append an answer; a new file first gets its line of settings. Raises SetupError if writing fails."""
        with self._appending() as stream:
            stream.write(b"" if stream.tell() else _line(self.asked))
            stream.write(_line(row))

    def _check(self, theirs: Mapping[str, Any]) -> None:
        if theirs != self.asked:
            other = [name for name in {**self.asked, **theirs} if theirs.get(name) != self.asked.get(name)]
            before, now = ({name: shown(side.get(name)) for name in other} for side in (theirs, self.asked))
            differences = (HASHES.get(name, f"{name} {before[name]}, now {now[name]}") for name in other)
            raise UserError(
                f"{quote(self.path.parent)} holds answers of another training: {'; '.join(differences)}. "
                "Choose another --out, or remove the folder."
            )

    @contextmanager
    def _appending(self) -> Iterator[BinaryIO]:
        try:
            with self.path.open("ab") as stream:
                yield stream
        except OSError as error:
            raise SetupError(
                f"{quote(self.path)} cannot be written: {reason(error)}; {remedy(error)}, then run the command again."
            ) from error


class SharedAnswers:
    """The answers of all processes of one training: the common file, and the file of this process.

    asked: as in `AnswerFile`. If the training has only one process, it writes its answers into the common file.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any], processes: Processes | None = None) -> None:
        self.common, self.processes = AnswerFile(path, asked), processes or Processes()
        several = self.processes.count > 1
        self.own = AnswerFile(path.with_suffix(f".{self.processes.rank}.jsonl"), asked) if several else self.common

    def gather(self) -> Answers:
        """Wait until all processes call this; move their answers into the common file, and return all answers."""
        self.processes.wait()
        if self.processes.first:
            self._move()
        self.processes.wait()
        return {name: _answer(row) for name, row in self.common.rows().items()}

    def add(self, name: str, prompt: Sequence[int], answer: Answer) -> None:
        row = {"name": name, "prompt": prompt, "answer": answer.ids, "right": answer.right, "ended": answer.ended}
        self.own.add(row)

    def _move(self) -> None:
        path = self.common.path
        stored = self.common.rows()
        for part in sorted(path.parent.glob(f"{path.stem}.*{path.suffix}")):
            if not part.stem.removeprefix(f"{path.stem}.").isdecimal():
                continue  # no file of a process
            for name, row in AnswerFile(part, self.common.asked).rows().items():
                if name not in stored:  # true if a kill came after the answer was moved and before its file was removed
                    self.common.add(row)
            part.unlink()


def _answer(row: Mapping[str, Any]) -> Answer:
    return Answer(tuple(row["answer"]), right=bool(row["right"]), ended=bool(row["ended"]))


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
