"""Keeps the model's answers to the questions of a training in a file, so that a killed training need not repeat them.

The first line names the model and the questions; each further line is an answer, in order of completion. In a training
with several processes, every process reads the file and only the first writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kvbench.errors import SetupError, UserError, quote
from kvbench.store.files import reason
from kvbench.train.processes import is_first

HASHES = {"questions": "other questions", "fingerprint": "another model"}  # what a different hash means, for errors
Answers = dict[str, tuple[int, ...] | None]  # question's name -> answer tokens; None: the answer was wrong or failed


class AnswerFile:
    """The file with the model's answers to the questions of one training.

    asked: all settings on which the answers depend; the file's first line must hold the same.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path, self.asked = path, json.loads(json.dumps(asked))

    def read(self) -> Answers:
        """Return the stored answers; drop a last line that a kill cut short. Creates the file if it is missing.

        Raises UserError for answers to other questions or of another model, SetupError for a damaged or unusable file.
        """
        answers: Answers = {}
        whole = 0  # bytes of whole lines
        try:
            with self.path.open("rb") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    row = json.loads(line)
                    if whole == 0:
                        self._check(row)
                    else:
                        answers[row["name"]] = tuple(row["answer"]) if row["kept"] else None
                    whole += len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise SetupError(f"{quote(self.path)} cannot be read: {reason(error)}.") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SetupError(
                f"{quote(self.path)} is damaged after its first {whole:,} bytes. Remove it to "
                "generate all answers again."
            ) from error
        if is_first():
            with self._appending() as stream:
                stream.truncate(whole)
                if whole == 0:
                    stream.write(_line(self.asked))
        return answers

    def add(self, name: str, *, prompt: Sequence[int], answer: Sequence[int], kept: bool) -> None:
        """Append the model's answer to the question called `name`. Raises SetupError when the file cannot be written.

        kept: True if training uses the answer, False if the answer is wrong or its generation failed.
        """
        if is_first():
            with self._appending() as stream:
                stream.write(_line({"name": name, "prompt": prompt, "answer": answer, "kept": kept}))

    def _check(self, theirs: Mapping[str, Any]) -> None:
        if theirs != self.asked:
            other = [name for name, value in self.asked.items() if theirs.get(name) != value]
            differences = (HASHES.get(name, f"{name} {theirs.get(name)}, now {self.asked[name]}") for name in other)
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
            raise SetupError(f"{quote(self.path)} cannot be written: {reason(error)}.") from error


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
