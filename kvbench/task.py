"""The task interface: documents out, scores in. A task knows text only; it never meets the engine or a method.

A task is one class in one file under ``tasks/`` with the decorator ``@tasks.register("name")``. Only `docs`, `gen`
and `score` are required; the class attributes say the rest. `get_task("name")` makes one;
``get_task("name/variant")`` makes one with another setting where the class lists `variants`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from kvbench.errors import UserError, show
from kvbench.registry import did_you_mean, tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One user turn in three parts: a run may compress after the context (query-agnostic) or after the question."""

    context: str = ""
    question: str
    answer_prefix: str = ""  # text after the assistant header that the model continues
    system: str | None = None

    @property
    def user(self) -> str:
        return self.context + self.question


@dataclass(frozen=True, slots=True, kw_only=True)
class Doc:
    """One question. `reference` is what `score` compares with; `cluster_id` groups questions that share a source."""

    doc_id: str
    turns: tuple[Turn, ...]
    reference: Any
    meta: Mapping[str, Any] = field(default_factory=dict)
    cluster_id: str = ""  # empty: the doc is its own cluster

    @property
    def cluster(self) -> str:
        return self.cluster_id or self.doc_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenSpec:
    """How a task is sampled by default. Command-line options override single fields and are recorded."""

    n: int = 1
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    chat: bool = True
    thinking: bool | None = None  # None: the template has no such switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What `score` sees of one sample."""

    text: str
    stop_reason: str
    prompt_tokens: int
    output_tokens: int
    thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of scoring one sample. `value` None means it could not be scored (with `note` saying why), never 0."""

    value: float | None
    strict: float | None = None  # under a stricter extraction rule
    partial: float | None = None  # denser credit: share of right steps or keys
    extracted: str | None = None
    aux: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Where a task's data come from and how many rows they must have.

    `path` is relative to a data folder (``--data``, ``KVBENCH_DATA``); `hub`, `config`, `split`, `revision` name the
    hub copy; `rename` maps hub columns to the columns of the offline file; `hub_id(index, row)` names a hub row as
    the offline file does. `ids_sha256` is the hash of the sorted ids, one per line: rows may be reordered, but none
    may be missing or new.
    """

    path: str
    rows: int
    hub: str
    split: str
    config: str | None = None
    revision: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    hub_id: Callable[[int, Mapping[str, Any]], str] | None = None
    ids_sha256: str | None = None


class DataSource(Protocol):
    """Resolves a manifest to rows: ``--data``, then ``KVBENCH_DATA``, bundled, hub; never silently another source."""

    def rows(self, task: str, manifest: Manifest) -> Sequence[Mapping[str, Any]]: ...


class Task(ABC):
    """One benchmark task.

    Attributes:
        name, version: identity; `get_task` fills in the name; the version is raised on any change of prompt,
            extraction or metric.
        suite: "synthetic", "math", ...
        summary: one line for `kvbench list tasks`.
        headline: the row column that tables show first, "score" or "score_partial".
        manifest: the data it needs, or None when it generates its own.
        prompt_styles: names accepted by --prompt-style, the default first.
        variants: settings reachable as ``name/variant``, the default first. The default's name is just ``name``.
        cheap_score: `score` takes microseconds and cannot hang, so it needs no worker process.
    """

    name: str = ""
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    headline: ClassVar[str] = "score"
    manifest: ClassVar[Manifest | None] = None
    prompt_styles: ClassVar[tuple[str, ...]] = ("default",)
    variants: ClassVar[tuple[str, ...]] = ()
    cheap_score: ClassVar[bool] = False

    def __init__(self, variant: str = "") -> None:
        self.variant = variant or (self.variants[0] if self.variants else "")

    @abstractmethod
    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        """All documents in a fixed order (the first `limit` of them)."""

    @abstractmethod
    def gen(self, model_type: str) -> GenSpec:
        """Default sampling for a model class (`config.model_type`)."""

    @abstractmethod
    def score(self, doc: Doc, output: Output) -> Score:
        """Score one sample. Pure and picklable: it may run in a worker process under a time limit."""

    def size(self) -> int | None:
        """Number of documents when it is known without loading data."""
        return self.manifest.rows if self.manifest else None

    def floor(self, budget: int, interval: int) -> float | None:
        """Headline score that no method falls below at this budget, where known (in the built-in model's tokens)."""
        return None

    def sources(self) -> dict[str, str]:
        """What else identifies this task's documents, for the run's record (a file and its hash)."""
        return {}


_NAME = re.compile(r"[^\W.][\w.-]{0,63}")


def get_task(name: str) -> Task:
    """The task behind ``name`` or ``name/variant``. Case and surrounding blanks do not matter. Raises UserError."""
    base, slash, variant = (part.strip() for part in name.strip().lower().partition("/"))
    if not _NAME.fullmatch(base) or (slash and not _NAME.fullmatch(variant)):
        allowed = "letters, digits, '-', '_', '.', up to 64"
        raise UserError(f"{show(name)} is not a task name ({allowed}). A task from a file is given with --task-file.")
    canonical = tasks.canonical(base) if base.isascii() else tasks.canonical(name)
    cls = tasks.get(canonical)
    known: tuple[str, ...] = getattr(cls, "variants", ())
    if variant and variant not in known:
        listed = f"It has {', '.join(known)}." if known else "It has none."
        raise UserError(
            f"task {show(canonical)} has no variant {show(variant)}.{did_you_mean(variant, known)} {listed}"
        )
    task: Task = cls(variant)
    task.name = canonical if not variant or variant == known[0] else f"{canonical}/{variant}"
    return task


def task_names() -> list[str]:
    """Every task and its other variants, as `kvbench list tasks` shows them."""
    names: list[str] = []
    for base, cls in tasks.items():
        names += [base, *(f"{base}/{variant}" for variant in getattr(cls, "variants", ())[1:])]
    return names
