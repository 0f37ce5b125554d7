"""The settings that a replay has and a run has not, and the progress line of a replay.

This module does not import torch, because the settings are checked before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.config.run_config import MethodChoice, RunConfig
from kvbench.config.settings import DEFAULTS
from kvbench.console.progress import Progress
from kvbench.errors import UserError, bare, quote
from kvbench.replay.analyses.api import Analysis, AttentionAnalysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The settings of a replay that a run does not have."""

    named: list[MethodChoice]  # methods that must run; others are left out if they cannot run
    run: str | None  # the run whose answers are read; None: the model answers
    most: int | None  # most answers per task to take from the run; None: all
    kinds: list[type[Analysis]]  # analyses to make; empty: compare methods instead
    sample: str | None  # id of the only question to read; None: all questions
    out: Path | None = None  # folder for the tables and, until they are written, for finished parts

    @property
    def attention(self) -> bool:
        """Whether one of the analyses needs the attention of the full cache."""
        return any(issubclass(kind, AttentionAnalysis) for kind in self.kinds)

    @property
    def methods(self) -> bool:
        """Whether the answers must be read with the chosen methods. The comparison and the analyses of methods need
        these readings."""
        return not self.kinds or not all(issubclass(kind, AttentionAnalysis) for kind in self.kinds)


def check_evictions(config: RunConfig, run: str | None) -> None:
    """Raise UserError if a setting makes a run evict the prompt in another way than a replay does. run: the name of the
    run whose settings `config` holds; None: the user gave the settings."""
    for name in ("compress", "prefill"):
        if (value := getattr(config, name)) != (usual := DEFAULTS[name]):
            has = f"{name} is {value}" if run is None else f"run {quote(run)} has --{name} {value}"
            cure = f"Set {name} to {usual}" if run is None else "Choose another run"
            raise UserError(f"{has}, but kvbench can read answers again only with --{name} {usual}. {cure}.")


class Readings(Progress):
    """The progress line of a replay.

    It counts generated answers, or readings of answers, whereas the progress line of a run counts rows. It does not
    show how much memory is used.
    """

    _name = _unit = ""

    def task(self, name: str, total: int, unit: str) -> None:
        self._name, self._unit, self._words, self._cell = name, unit, 0, ""
        self.begin(total, 0)

    def next(self, text: str, traces: int, tokens: int) -> None:
        self._words += tokens
        self._cell = bare(text)  # `cell` would draw the line before these figures are in it
        self.update(self._done + traces, self._words, kv_bytes_now=0, kv_bytes_peak=0)

    def skip(self, traces: int) -> None:
        """Count readings that an earlier command made; the time left does not depend on them."""
        self._already += traces
        self._done += traces

    def line(self) -> str:
        # A mean over the task: answers of one batch end within microseconds, so the last rate would say nothing.
        seconds = self._clock() - self._started
        speed = f"{self._words / seconds:,.0f} tok/s" if self._words and seconds > 0 else ""
        parts = [f"{self._done}/{self._total} {self._unit}", self._name, self._cell, speed, self._left()]
        return "  ".join(part for part in parts if part)
