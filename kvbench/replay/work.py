"""What a replay has to do, and its line of progress. Imports no torch: the command makes these before any check."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.config.run_config import MethodChoice
from kvbench.console.progress import Progress
from kvbench.replay.analyses.api import Analysis, AttentionAnalysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The part of a replay that is no setting of a run.

    Attributes:
        named, every: methods that must run, and methods that run where they can.
        run: the run whose answers are read; None: new ones. most: answers per task that are taken from it.
        kinds: analyses; none for the comparison.
        sample: the only question, by its id.
    """

    named: list[MethodChoice]
    every: list[MethodChoice]
    run: str | None
    most: int | None
    kinds: list[type[Analysis]]
    sample: str | None

    @property
    def attention(self) -> bool:
        """Whether some analysis looks at the attention of the full cache."""
        return any(issubclass(kind, AttentionAnalysis) for kind in self.kinds)

    @property
    def methods(self) -> bool:
        """Whether methods read the answers."""
        return not self.kinds or not all(issubclass(kind, AttentionAnalysis) for kind in self.kinds)


class Readings(Progress):
    """Progress in answers that methods read, instead of rows, and without memory."""

    _name = _unit = ""

    def task(self, name: str, total: int, unit: str) -> None:
        self._name, self._unit, self._words, self._cell = name, unit, 0, ""
        self.begin(total, 0)

    def next(self, text: str, traces: int, tokens: int) -> None:
        self._words += tokens
        self.cell(text)
        self.update(self._done + traces, self._words, kv_bytes_now=0, kv_bytes_peak=0)

    def line(self) -> str:
        parts = [f"{self._done}/{self._total} {self._unit}", self._name, self._cell, self._speed, self._left()]
        return "  ".join(part for part in parts if part)
