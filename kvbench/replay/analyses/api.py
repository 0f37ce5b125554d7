"""The interface of an analysis, which observes how answers are read and returns rows, a short table and figures.

An analysis is one file in this folder, with a class under ``@register("name")``. It must not import torch at import
time, because ``--help`` lists the analyses.

    @register("sparsity")
    class Sparsity(AttentionAnalysis):
        about = "entries that hold 90, 95 and 99% of the attention, by layer"
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from kvbench.errors import UserError, quote
from kvbench.eviction.budget import entries, label
from kvbench.registry import did_you_mean

if TYPE_CHECKING:
    import torch

    from kvbench.replay.choices import Chosen
    from kvbench.replay.traces import Trace
    from kvbench.report.plots.figure import Figure

WINDOW = 16  # queries per window; G-KV and R-KV score entries by as many (w)
MASS = 0.9  # attended tokens: the smallest set with this share of the attention

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # head and lines; the first column is text, the others are numbers
A = TypeVar("A", bound="type[Analysis]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A task and its traces, which an analysis gets before anything is read.

    Attributes:
        text: turns a token id into text.
        right: (doc_id, sample) -> whether the answer's score is 1; empty unless some analysis has `scored`.
    """

    task: str
    traces: Sequence[Trace]
    interval: int
    text: Callable[[int], str] = str
    right: Mapping[tuple[str, int], bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Attention of WINDOW queries of an answer in one layer, under the full cache; the last window may have fewer.

    Attributes:
        layer: index in the model; traces: indices into `Study.traces` of the b traces read together.
        index, count: number of this window, and of all windows of the answer; windows come in order per layer.
        first: position of its first query.
        weights: [b, Hq, w, N] float32, N = first + w tokens; kv_heads: Hk.
    """

    layer: int
    traces: list[int]
    index: int
    count: int
    first: int
    weights: torch.Tensor
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The entries that a method holds of b traces as a block of the answer begins, or (`index` None) at the end.

    Attributes:
        bounded: whether the method also evicts while decoding.
        traces: indices into `Study.traces`; layers: model indices of the L layers that are evicted.
        index, count: number of this block, and of all blocks of the answer.
        prompt: tokens of the prompt; seen: tokens read so far.
        held: [L, b, Hk, seen] 1 for tokens that are held, else 0; for methods that keep entries per query head, the
            share of a KV head's query heads that hold the token. copies: heads of the cache per KV head.
        paid: [L, b, Hk, seen] attention that the block's queries pay to every token under the full cache, summed over
            queries and divided by the interval; None at the end.
    """

    chosen: Chosen
    bounded: bool
    traces: list[int]
    layers: list[int]
    index: int | None
    count: int
    prompt: int
    seen: int
    held: torch.Tensor
    copies: int
    paid: torch.Tensor | None

    @property
    def due(self) -> bool:
        """Whether more tokens were read than the budget holds; equal for all methods at one budget."""
        return self.chosen.budget is None or self.seen > entries(self.chosen.budget, self.prompt)


class Analysis(ABC):
    """One analysis of one task.

    Attributes:
        about: one line for ``--help``.
        file: CSV, or Parquet where rows are many or hold text of a model.
        scored: whether it needs to know which answers are right.
        plotted: whether it has figures, which need the extra `report`.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    file: ClassVar[Literal["csv", "parquet"]] = "csv"
    scored: ClassVar[bool] = False
    plotted: ClassVar[bool] = True

    def __init__(self, study: Study) -> None:
        self.study = study

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the results, once every trace was read."""

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        """Return the figures that the rows have data for. rows: of all tasks."""
        return []

    @staticmethod
    def pages(rows: Sequence[Row]) -> dict[str, str]:
        """Return file name -> HTML. rows: of all tasks."""
        return {}

    @staticmethod
    @abstractmethod
    def table(rows: Sequence[Row]) -> Table:
        """Return the short table for the terminal. rows: of all tasks."""


class AttentionAnalysis(Analysis):
    """An analysis of the full cache's attention, window by window."""

    @abstractmethod
    def window(self, window: Window) -> None: ...


class MethodAnalysis(Analysis):
    """An analysis of the entries that methods hold, block by block."""

    @abstractmethod
    def moment(self, moment: Moment) -> None: ...


_known: dict[str, type[Analysis]] = {}


def register(name: str) -> Callable[[A], A]:
    def add(kind: A) -> A:
        kind.name = name
        _known[name] = kind
        return kind

    return add


def analyses() -> dict[str, type[Analysis]]:
    """Return every analysis by name, sorted."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_known.items()))


def choose(names: Sequence[str]) -> list[type[Analysis]]:
    """Return the analyses with these names, each once. Raises UserError when a name is unknown."""
    known = analyses()
    chosen = []
    for name in dict.fromkeys(name.strip().lower() for name in names):
        if name not in known:
            raise UserError(
                f"unknown analysis {quote(name)}.{did_you_mean(name, list(known))} Known: {', '.join(known)}."
            )
        chosen.append(known[name])
    return chosen


def top_mass(paid: torch.Tensor) -> torch.Tensor:
    """Return [..., N] bool: the smallest set of tokens with the share MASS of each row's sum; older ones at a tie."""
    ordered = paid.sort(dim=-1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=-1) - ordered.values
    wanted = before < MASS * ordered.values.sum(dim=-1, keepdim=True)
    return wanted.new_zeros(wanted.shape).scatter_(-1, ordered.indices, wanted)


def size(row: Row) -> str:
    """Return the budget of a row as the user types it, ``64`` or ``25%``; "-" without a budget."""
    budget = row["budget"] if row["budget"] is not None else row["budget_share"]
    return "-" if budget is None else label(budget)


def named(row: Row) -> str:
    """Return method and budget for legends, as in ``gkv @64``."""
    return row["method"] + ("" if size(row) == "-" else f" @{size(row)}")


def panel(row: Row) -> str:
    """Return the title of a row's panel, as in ``walk, budget 64``; methods without a budget share one panel."""
    return row["task"] + ("" if size(row) == "-" else f", budget {size(row)}")


def fixed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
