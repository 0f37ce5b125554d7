"""Shows the progress of work that is counted in steps, answers or checks. The progress line of a run counts rows, and
also shows tokens per second, KV bytes and the mean score."""

from __future__ import annotations

from typing import Any

from kvbench.console.progress import Progress


class Counter(Progress):
    """A progress line such as ``3/40 answers``, which is shown while its `with` block runs. noun: the name of the
    counted items."""

    def __init__(self, noun: str, total: int, **progress: Any) -> None:
        super().__init__(**progress)
        self.noun, self.note = noun, ""
        self._total, self._begun = total, 0

    def __enter__(self) -> Counter:
        self.begin(self._total, 0)
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def at(self, done: int, note: str = "") -> None:
        self.note = note
        self.update(done, tokens=0, kv_bytes_now=0, kv_bytes_peak=0)

    def advance(self, text: str) -> None:
        """Count one more item as done. text: the item's name, which is shown."""
        self.at(self._done + 1)
        self.cell(text)

    def begin_next(self, text: str) -> None:
        """Count all earlier items as done, because the next item begins. text: the next item's name, which is shown."""
        self.at(self._begun)
        self._begun += 1
        self.cell(text)

    def line(self) -> str:
        parts = [f"{self._done}/{self._total} {self.noun}", self._cell, self.note, self._left()]
        return "  ".join(part for part in parts if part)
