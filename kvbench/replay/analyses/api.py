"""The interface of an analysis: it listens while answers are read, and returns tidy rows, a short table and pictures.

An analysis is one file beside this one, with a class under ``@register("name")``; kvbench finds it there. No torch is
imported until it works: ``--help`` lists the analyses.

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

WINDOW = 16  # queries of a window: those that G-KV and R-KV score by (w)
MASS = 0.9  # attended tokens are the smallest set with this share of the attention

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # head and lines; the first column is text, the others are numbers
A = TypeVar("A", bound="type[Analysis]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A task and its traces, as analyses know them before anything is read.

    Attributes:
        text: one token as text.
        right: (doc_id, sample) of every answer that was scored -> whether its score is 1.
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
        layer: the model's own index; traces: places in `Study.traces` of the b traces read together.
        index, count: this window and how many the answer has; they come in order, for each layer.
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
    """What a method holds of b traces as a block of the answer begins, or (`index` None) at the end.

    Attributes:
        bounded: whether the method evicts while decoding, too.
        traces: places in `Study.traces`; layers: the model's indices of the L layers that evict.
        index, count: this block and how many the answer has.
        prompt, seen: tokens of the prompt, and read so far.
        held: [L, b, Hk, seen] 1 or 0, or the share of a KV head's caches that hold a token; copies: how many caches
            a KV head has.
        paid: [L, b, Hk, seen] what the queries of the block pay to every token under the full cache (their sum, over
            the interval); None at the end.
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
        """Whether a cache of this budget cannot hold everything any more: equal for all methods of a budget."""
        return self.chosen.budget is None or self.seen > entries(self.chosen.budget, self.prompt)


class Analysis(ABC):
    """One analysis of one task.

    Attributes:
        about: one line for ``--help``.
        file: CSV, or Parquet where rows are many or hold text of a model.
        scored: whether it must know which answers are right.
        plotted: whether its pictures are plots, which need the extra `report`.
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
        """The results, once everything was read."""

    @staticmethod
    @abstractmethod
    def pictures(rows: Sequence[Row]) -> dict[str, str]:
        """File name -> SVG or HTML. rows: of all tasks."""

    @staticmethod
    @abstractmethod
    def table(rows: Sequence[Row]) -> Table:
        """The short table for a terminal. rows: of all tasks."""


class AttentionAnalysis(Analysis):
    """Looks at the full cache alone."""

    @abstractmethod
    def window(self, window: Window) -> None: ...


class MethodAnalysis(Analysis):
    """Looks at what methods hold."""

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
    """Every analysis by name, sorted."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_known.items()))


def choose(names: Sequence[str]) -> list[type[Analysis]]:
    """The analyses of these names, each once. Raises UserError when one is unknown."""
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
    """[..., N] bool: of every row the smallest set of tokens that carries MASS of it; of equal ones the older."""
    ordered = paid.sort(dim=-1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=-1) - ordered.values
    wanted = before < MASS * ordered.values.sum(dim=-1, keepdim=True)
    return wanted.new_zeros(wanted.shape).scatter_(-1, ordered.indices, wanted)


def size(row: Row) -> str:
    """The budget of a row as it is typed."""
    budget = row["budget"] if row["budget"] is not None else row["budget_share"]
    return "-" if budget is None else label(budget)


def named(row: Row) -> str:
    """``gkv @64``, for legends."""
    return row["method"] + ("" if size(row) == "-" else f" @{size(row)}")


def panel(row: Row) -> str:
    """``walk, budget 64``, for titles. Methods without a budget have a panel of their own."""
    return row["task"] + ("" if size(row) == "-" else f", budget {size(row)}")


def fixed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
