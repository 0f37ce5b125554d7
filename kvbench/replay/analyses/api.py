"""The interface of an analysis. An analysis observes a replay, in which the model reads finished answers again, and
returns a table and figures.

An analysis is one file in this folder, with a class under ``@register("name")``. Importing the file must not import
torch, because ``--help`` lists the analyses.
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
from kvbench.replay.analyses.tally import Tally

if TYPE_CHECKING:
    import torch

    from kvbench.replay.choices import Chosen
    from kvbench.replay.traces import ForcedTrace
    from kvbench.report.plots.figure import Figure

WINDOW = 16  # queries per window; G-KV and R-KV also score entries by 16 queries
MASS = 0.9  # "attended tokens" are the fewest tokens that together get this share of the attention

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]  # header and lines; the first column has text, the others have numbers
A = TypeVar("A", bound="type[Analysis]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The traces and settings of one task, which an analysis gets before the first trace is read."""

    task: str
    traces: Sequence[ForcedTrace]
    interval: int
    text: Callable[[int], str] = str  # the text of a token id
    # By (doc_id, sample): whether the answer's score is 1. Empty unless an analysis sets `scored`.
    right: Mapping[tuple[str, int], bool] = field(default_factory=dict)
    # Facts about the answers that a run generated with each method (`correctness.own_ratios`); empty without a run.
    own: Mapping[Chosen, Sequence[tuple[str, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The attention that WINDOW successive queries of b answers pay in one layer, with the full cache.

    The last window of an answer may have fewer queries.
    """

    layer: int  # index in the model
    traces: list[int]  # indices into `Study.traces` of the b traces read together
    index: int  # number of the window in the answer, from 0; each layer's windows come in order
    count: int  # number of windows of the answer
    first: int  # position of the first query
    weights: torch.Tensor  # [b, Hq, w, N] float32, N = first + w tokens
    kv_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The entries that a method holds for b traces at one moment of their answers.

    index: number of the block of the answers that begins at this moment; None: the moment is the end of the answers.
    A block is `--interval` successive tokens of each answer; the last block may be shorter.
    """

    chosen: Chosen
    bounded: bool  # whether the method also evicts while decoding
    traces: list[int]  # indices into `Study.traces`
    layers: list[int]  # indices, in the model, of the L layers in which methods evict
    index: int | None  # from 0
    count: int  # number of blocks of the answer
    prompt: int  # tokens of the prompt
    seen: int  # tokens read so far
    held: torch.Tensor  # [L, b, Hk, seen], see `kvbench.replay.comparison.held_tokens`
    copies: int  # heads of the cache per KV head of the model
    # [L, b, Hk, seen] attention that the block's queries pay to every token under the full cache, summed over queries
    # and divided by the interval; None at the end
    paid: torch.Tensor | None

    @property
    def due(self) -> bool:
        """Whether more tokens were read than the budget has entries; True without a budget. The value is the same for
        all methods at one budget."""
        return self.chosen.budget is None or self.seen > entries(self.chosen.budget, self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The attention that w <= WINDOW successive queries of b answers pay in one layer to the entries that a method
    holds.

    chosen: the method and budget. traces: indices into `Study.traces` of the b traces read together. layer: index in
    the model.
    """

    chosen: Chosen
    traces: list[int]
    layer: int
    weights: torch.Tensor  # [b, Hq, w, n] float32, for n places that may have an entry
    visible: torch.Tensor  # [b, Hq, w, n] whether the place has an entry that the query sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Negative log-likelihoods in nats of t successive tokens of b answers, under a method and with the full cache.

    chosen, traces: see `Look`. first: number of the first of these tokens in the answer, from 0.
    """

    chosen: Chosen
    traces: list[int]
    first: int
    evicted: torch.Tensor  # [b, t]
    full: torch.Tensor  # [b, t]


class Analysis(ABC):
    """The base class of analyses. Each instance analyses one task.

    `tally` holds the sums from which most analyses compute their tables.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""  # one line for ``--help``
    file: ClassVar[Literal["csv", "parquet"]] = "csv"  # format of the table; parquet: for many rows, or text of a model
    scored: ClassVar[bool] = False  # whether the analysis needs to know which answers are right
    plotted: ClassVar[bool] = True  # whether the analysis has figures, which need the extra `report`

    def __init__(self, study: Study) -> None:
        self.study, self.tally = study, Tally(study)

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the results as rows of a table. Called after all traces were read."""

    def means(self, names: Sequence[str], over: str, *parts: str, **counts: str) -> list[Row]:
        """Return rows of results, one per key of the tally, sorted by key. A row has the ratios of the sums `names` to
        the sum `over`, and the standard errors of these ratios.

        parts: the columns with the parts of a key. counts: by column, the name of a sum, shown as a whole number.
        """
        ratios = {name: (name, over) for name in names}
        return [
            {"task": self.study.task}
            | dict(zip(parts, key))
            | {column: int(self.tally.total(key, name)) for column, name in counts.items()}
            | figures
            for key, figures in sorted(self.tally.figures(**ratios), key=lambda found: found[0])
        ]

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        """Return the figures of the analysis; leave out figures without data. rows: the results of all tasks."""
        return []

    @staticmethod
    def pages(rows: Sequence[Row]) -> dict[str, str]:
        """Return the HTML pages of the analysis by file name. rows: the results of all tasks."""
        return {}

    @staticmethod
    @abstractmethod
    def table(rows: Sequence[Row]) -> Table:
        """Return the short table that the terminal shows. rows: the results of all tasks."""


class AttentionAnalysis(Analysis):
    """The base class of analyses of the attention with the full cache. `window` receives the attention of at most 16
    queries at a time."""

    @abstractmethod
    def window(self, window: Window) -> None: ...


class MethodAnalysis(Analysis):
    """The base class of analyses that observe an eviction method while the model reads answers with it. Subclasses
    override the Python methods that they need."""

    def moment(self, moment: Moment) -> None:
        """Receive the entries that the eviction method holds. Called when a block of the answers (`--interval` tokens)
        begins, after any eviction at this point, and at the end of the answers."""

    def attended(self, look: Look) -> None:
        """Receive the attention of at most 16 successive queries to the entries that the eviction method holds."""

    def predicted(self, losses: Losses) -> None:
        """Receive the losses of successive tokens of the answers."""


_known: dict[str, type[Analysis]] = {}


def register(name: str) -> Callable[[A], A]:
    def add(kind: A) -> A:
        kind.name = name
        _known[name] = kind
        return kind

    return add


def analyses() -> dict[str, type[Analysis]]:
    """Return the classes of all analyses by name, sorted by name."""
    package = importlib.import_module(__package__ or "")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(sorted(_known.items()))


def choose(names: Sequence[str]) -> list[type[Analysis]]:
    """Return the classes of the analyses in `names`, each once. Raises UserError when a name is unknown."""
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
    """Return a mask [..., N] of the fewest tokens that together get at least the share MASS of the attention. paid: the
    attention to N tokens, along the last dimension. Of tokens with equal attention, older tokens come first."""
    ordered = paid.sort(dim=-1, descending=True, stable=True)
    before = ordered.values.cumsum(dim=-1) - ordered.values
    wanted = before < MASS * ordered.values.sum(dim=-1, keepdim=True)
    return wanted.new_zeros(wanted.shape).scatter_(-1, ordered.indices, wanted)


def size(row: Row) -> str:
    """Return the budget in a row of results as the user types it, ``64`` or ``25%``; "-" without a budget."""
    budget = row["budget"] if row["budget"] is not None else row["budget_share"]
    return "-" if budget is None else label(budget)


def named(row: Row) -> str:
    """Return the method and budget in a row of results as a legend shows them: ``gkv @64``."""
    return row["method"] + ("" if size(row) == "-" else f" @{size(row)}")


def panel(row: Row) -> str:
    """Return the title of the panel that shows a row of results: ``walk, budget 64``, or ``walk`` without a budget."""
    return row["task"] + ("" if size(row) == "-" else f", budget {size(row)}")


def fixed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def cells(row: Row, *names: str, digits: int = 3) -> list[str]:
    """Return the values of a row of results in the columns `names`, as text for a table. Floats get `digits` decimals,
    and None becomes "-"."""
    return [fixed(v, digits) if v is None or isinstance(v, float) else str(v) for v in map(row.__getitem__, names)]
