"""What a piece of code costs on the pretended device."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["launches", "syncs", "waits", "h2d", "d2h"]
KINDS: tuple[Kind, ...] = ("launches", "syncs", "waits", "h2d", "d2h")
HERE = str(Path(__file__).parent)


@dataclass
class Count:
    """Launches, host synchronisations, waits for events, and copies (blocking or not) in both directions.

    ops: launches by ATen name; sites: (kind, ATen name, callers) -> number, for all but launches.
    """

    launches: int = 0
    syncs: int = 0
    waits: int = 0
    h2d: int = 0
    d2h: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    sites: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, kind: Kind, op: str, site: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if kind == "launches":
            self.ops[op] += 1
        else:
            self.sites[kind, op, site] += 1


class Ledger:
    """Counts of the whole time, of blocks (`count`), and of each call of watched functions (`watch`)."""

    patch: Any  # pytest.MonkeyPatch, which ends with the device

    def __init__(self) -> None:
        self.total = Count()
        self.calls: dict[str, list[Count]] = {}
        self._blocks: list[Count] = []
        self._watched: list[Count] = []

    @property
    def launches(self) -> int:
        return self.total.launches

    @property
    def syncs(self) -> int:
        return self.total.syncs

    @contextlib.contextmanager
    def count(self) -> Iterator[Count]:
        """Count what happens inside the block."""
        self._blocks.append(count := Count())
        try:
            yield count
        finally:
            self._blocks.remove(count)

    def watch(self, owner: Any, name: str) -> list[Count]:
        """Return a list that receives the count of each call of `owner.name`, without watched functions inside it."""
        label, inner = f"{owner.__name__.rpartition('.')[2]}.{name}", getattr(owner, name)
        counts = self.calls.setdefault(label, [])

        @functools.wraps(inner)
        def watched(*args: Any, **kwargs: Any) -> Any:
            counts.append(Count())
            self._watched.append(counts[-1])
            try:
                return inner(*args, **kwargs)
            finally:
                self._watched.pop()

        self.patch.setattr(owner, name, watched)
        return counts

    def note(self, kind: Kind, op: str) -> None:
        site = "" if kind == "launches" else place()
        for count in (self.total, *self._blocks, *self._watched[-1:]):
            count.add(kind, op, site)

    def report(self, most: int = 12) -> str:
        """Return the medians per watched function, and the places of syncs, waits and copies."""
        lines = []
        for label, counts in {**self.calls, "in total": [self.total]}.items():
            lines.append(f"{label}: {len(counts)} calls; medians: {medians(counts)}")
            sites = sum((count.sites for count in counts), Counter[tuple[str, str, str]]())
            lines += [
                f"    {number / len(counts):8.2f} {kind} a call  {op}  {site}"
                for (kind, op, site), number in sites.most_common(most)
            ]
        return "\n".join(lines)


def medians(counts: list[Count]) -> str:
    of: Callable[[Kind], float] = lambda kind: statistics.median([getattr(count, kind) for count in counts] or [0])  # noqa: E731
    return ", ".join(f"{kind} {of(kind):g}" for kind in KINDS)


def place(depth: int = 3) -> str:
    """Return file:line of the innermost callers outside of this package and of installed libraries."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        file = frame.f_code.co_filename
        if not file.startswith((HERE, "<")) and "/lib/python" not in file:
            found.append(f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)
