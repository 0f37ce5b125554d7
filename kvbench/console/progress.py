"""Shows a run's progress on stderr: rows done, the cell, tokens/s, KV bytes now and at the peak, mean score, time left.

On a terminal, the progress is one line that is redrawn. Elsewhere, a new plain line is printed at most every ten
seconds. `KVBENCH_NO_PROGRESS` and ``--quiet`` turn the progress off. Nothing goes to stdout.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.console import terminal
from kvbench.errors import bare

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_SECONDS = 10.0


def step(text: str) -> None:
    """Print on stderr, in one line, what a command does next. Commands without a progress display call this function.
    Nothing is printed if `KVBENCH_NO_PROGRESS` is set."""
    if not silenced():
        print(terminal.clean(text), file=sys.stderr, flush=True)


def silenced() -> bool:
    return bool(os.environ.get("KVBENCH_NO_PROGRESS"))


@contextlib.contextmanager
def preparing(text: str, *, quiet: bool = False) -> Iterator[None]:
    """On a terminal, print `text`, which says what a command does in the body of the ``with`` statement. Commands use
    `preparing` for work that counts no rows."""
    progress = Progress(quiet=quiet)
    progress.prepare(text)
    try:
        yield
    finally:
        progress.end()


class Progress:
    """The progress display of a run. clock: a function that returns the time in seconds."""

    def __init__(self, *, quiet: bool = False, stream: Any = None, clock: Any = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._silent = quiet or silenced()
        self._clock = clock
        self._live: Live | None = None
        self._preparing, self._cell, self._speed, self._memory, self._score = "", "", "", "", ""
        self._total = self._done = self._already = 0
        self._started = self._next_plain = 0.0
        self._tokens, self._tokens_at = 0, 0.0
        self._rate = 0.0
        self._below: list[str] = []

    def prepare(self, text: str) -> None:
        """Show `text`: what the command does before there are rows to count, such as loading the model.

        On a terminal the text is printed at once as a line and not redrawn, because libraries may draw progress bars of
        their own below it. Elsewhere, the first call of this method prints nothing, and nothing is printed in the ten
        seconds after it.
        """
        self._preparing = bare(text)
        if self._stream.isatty():
            self._next_plain = self._clock()
        elif self._next_plain == 0:
            self._next_plain = self._clock() + PLAIN_SECONDS
        self._draw()

    def begin(self, total: int, done: int) -> None:
        """Start the display for a run, or for one part of a command's work, with `total` rows, of which `done` are
        finished already."""
        self._total, self._done, self._already, self._preparing = total, done, done, ""
        self._started = self._tokens_at = self._clock()
        # A command with many short parts calls `begin` for each of them, which must not delay the next line each time.
        self._next_plain = self._next_plain or self._started + PLAIN_SECONDS
        if self._live is None and not self._silent and self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), refresh_per_second=4, transient=True)
            self._live.start()

    def cell(self, text: str) -> None:
        """Show the name of the cell that the engine works on now."""
        if bare(text) != self._cell:
            self._cell, self._speed, self._score = bare(text), "", ""
            self._draw()

    def below(self, lines: Sequence[str]) -> None:
        """Show these lines below the progress line, on a terminal only. The next `update` draws them."""
        self._below = [bare(line) for line in lines]

    def update(
        self,
        rows_done: int,
        tokens: int,
        kv_bytes_now: int,
        kv_bytes_peak: int,
        score_mean: float | None = None,
        score_halfwidth: float | None = None,
    ) -> None:
        """Show new figures.

        rows_done: finished rows of the whole run. tokens: the tokens that this command has generated so far.
        kv_bytes_now, kv_bytes_peak: bytes in the KV cache, now and at most in the current cell. With several workers,
        tokens and bytes are sums over the workers. score_mean, score_halfwidth: mean score of the current cell, and
        half the width of the mean's confidence interval.
        """
        now = self._clock()
        if now > self._tokens_at:
            self._rate = rate(self._rate, tokens - self._tokens, now - self._tokens_at)
        self._tokens, self._tokens_at, self._done = tokens, now, rows_done
        self._speed = f"{self._rate:,.0f} tok/s"
        self._memory = f"KV {size(kv_bytes_now)} now, {size(kv_bytes_peak)} peak"
        if score_mean is not None:
            spread = "" if score_halfwidth is None else f" +- {score_halfwidth:.3f}"
            self._score = f"score {score_mean:.3f}{spread}"
        self._draw()

    def end(self) -> None:
        """Remove the progress display from the terminal; earlier output stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> str:
        """Return the progress in one line."""
        parts = [f"{self._done}/{self._total} rows", self._cell, self._speed, self._memory, self._score]
        return "  ".join(part for part in [*parts, self._left()] if part)

    def _left(self) -> str:
        fresh = self._done - self._already
        if fresh <= 0 or self._done >= self._total:
            return ""
        seconds = (self._clock() - self._started) / fresh * (self._total - self._done)
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} left" if minutes >= 60 else f"{minutes}:{rest:02d} left"

    def _draw(self) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text("\n".join([self.line(), *self._below])))
        elif not self._silent and self._clock() >= self._next_plain:
            self._next_plain = self._clock() + PLAIN_SECONDS
            print(self._preparing or self.line(), file=self._stream, flush=True)


def rate(before: float, tokens: int, seconds: float) -> float:
    """Return the tokens per second, smoothed over about three calls. before: the result of the previous call; 0 at the
    first call."""
    new = max(0, tokens) / seconds if seconds > 0 else before
    return new if before == 0 else 0.7 * before + 0.3 * new


def size(count: float) -> str:
    """Return a number of bytes with a unit: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            # three digits, but no exponent from 999.5 on
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 999.5 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
