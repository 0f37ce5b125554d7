"""The task interface: documents out, scores in. A task knows text only; it never meets the engine or a method.

A task is one class in one file under ``tasks/`` with the decorator ``@tasks.register("name")``. Only `docs`, `gen`
and `score` are required; the class attributes say the rest. `kvbench.taskkit.names.get_task("name")` makes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol


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
    gen: Mapping[str, Any] = field(default_factory=dict)  # fields of `GenSpec` that differ for this document

    @property
    def cluster(self) -> str:
        return self.cluster_id or self.doc_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenSpec:
    """How a task is sampled by default. Command-line options override single fields and are recorded.

    `max_new_tokens` holds for each turn. `truncate` "middle": of a user text with more tokens than the limit, the
    first and the last half of the limit stay; the limit is --max-prompt-tokens, by default the model's context less
    `max_new_tokens` and `reserve`.
    """

    n: int = 1
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()  # texts whose last token ends the output, as an end token does
    min_new_tokens: int = 0  # no end token is drawn before
    truncate: Literal["none", "middle"] = "none"
    reserve: int = 0
    longest: int | None = None  # upper bound of the limit, whatever the model's context
    chat: bool = True
    thinking: bool | None = None  # None: the template has no such switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What `score` sees of one sample.

    `text` is the last turn's answer, `turns` holds all of them; `baseline` holds the full cache's answers to the same
    question where a judge compares.
    """

    text: str
    turns: tuple[str, ...] = ()
    baseline: tuple[str, ...] = ()
    stop_reason: str
    prompt_tokens: int
    output_tokens: int
    thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Result of scoring one sample. `value` None means it could not be scored (with `note` saying why), never 0.

    The row then has the status `status`: grader_error, judge_error, sandbox_error, or unscored when no judge was asked.
    """

    value: float | None
    status: str = "grader_error"
    strict: float | None = None  # under a stricter extraction rule
    partial: float | None = None  # denser credit: share of right steps or keys
    extracted: str | None = None
    aux: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | bool | None] = field(default_factory=dict)  # further columns of the row, by name
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Where a task's data come from and how many rows they must have.

    `path` is relative to a data folder (``--data``, ``KVBENCH_DATA``): JSON lines, or one JSON list. `samples` are
    files with a few of the rows, or with invented rows of the same form, that are read where `path` does not exist;
    a note and the run's record say so. Rows of a file that serves several tasks are chosen by `where`
    (column -> value), before they are counted.

    On the hub: `config` and `split` name a table, or `files` the raw files to read one after the other (JSON lines, a
    JSON list; in a zip archive its `member`), or `url` an archive or file elsewhere, with the hash of its bytes.
    `rename` maps source columns to the columns of the offline file; `hub_id(index, row)` names a row as the offline
    file does. `ids_sha256` is the hash of the sorted ids, one per line: rows may be reordered, but none may be missing
    or new. `rows` None: unknown before reading.
    """

    path: str
    rows: int | None
    hub: str = ""
    split: str = ""
    config: str | None = None
    files: tuple[str, ...] = ()
    member: str = ""
    url: str = ""
    url_sha256: str = ""
    revision: str | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    hub_id: Callable[[int, Mapping[str, Any]], str] | None = None
    ids_sha256: str | None = None
    samples: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    licence: str = ""
    gated: bool = False


class Reader(Protocol):
    """What a task knows of the model that reads its prompts: lengths of texts, never weights."""

    @property
    def context(self) -> int:
        """Tokens that the model can hold."""

    @property
    def model_type(self) -> str:
        """`config.model_type` of transformers."""

    @property
    def tokenizer(self) -> Any:
        """Of transformers."""

    def count(self, text: str) -> int:
        """Tokens of a text without special tokens."""

    def wrapping(self, *, thinking: bool | None = None) -> int:
        """Tokens that the chat template puts around a user's text; 0 without a template."""


class DataSource(Protocol):
    """Resolves a manifest to rows: ``--data``, then ``KVBENCH_DATA``, bundled, hub; never silently another source."""

    def rows(self, task: str, manifest: Manifest) -> Sequence[Mapping[str, Any]]: ...

    def file(self, task: str, manifest: Manifest) -> Path:
        """A file that is not rows (an archive, a text) on this disk, by the same order of sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Judge and sandbox settings of a run, for `score`.

    judge: base URL of an OpenAI-compatible endpoint, ``local:FOLDER`` for a local model, or "none"; None when the
        user gave no judge. `judge_key_env` names the environment variable that holds its key.
    unsafe_code: run programs with resource limits only where no sandbox works.
    """

    judge: str | None = None
    judge_model: str | None = None
    judge_key_env: str = "OPENAI_API_KEY"
    judge_mode: str = "single"
    unsafe_code: bool = False


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
        group: ``name`` alone means every variant; otherwise it means the first.
        lengths: prompt lengths in tokens reachable as ``name@8192`` or ``name@8k``, the default first; other lengths
            are taken too. Empty: the task has no such setting.
        averages: means over variants that tables print below a group: name -> {variant: weight}.
        needs: what scoring needs beside the text: "code" (runs programs), "judge" (asks another model).
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
    group: ClassVar[bool] = False
    lengths: ClassVar[tuple[int, ...]] = ()
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    needs: ClassVar[frozenset[str]] = frozenset()
    cheap_score: ClassVar[bool] = False

    def __init__(self, variant: str = "", length: int = 0) -> None:
        self.variant = variant or (self.variants[0] if self.variants else "")
        self.length = length or (self.lengths[0] if self.lengths else 0)
        self.services = Services()
        self.reader: Reader | None = None  # the model that will read the prompts, once it is known

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"reader": None}  # scoring processes have no use for a tokenizer

    @abstractmethod
    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        """All documents in a fixed order (the first `limit` of them). May use `self.reader`, which is set before."""

    @abstractmethod
    def gen(self, model_type: str) -> GenSpec:
        """Default sampling for a model class (`config.model_type`)."""

    @abstractmethod
    def score(self, doc: Doc, output: Output) -> Score:
        """Score one sample. Pure and picklable: it may run in a worker process under a time limit."""

    def patience(self, doc: Doc) -> float:
        """Time limit for scoring one sample, in seconds."""
        return 40.0

    def size(self) -> int | None:
        """Number of documents when it is known without loading data."""
        return self.manifest.rows if self.manifest else None

    def floor(self, budget: int, interval: int) -> float | None:
        """Headline score that no method falls below at this budget, where known (in the built-in model's tokens)."""
        return None

    def notes(self) -> list[str]:
        """Notes to the user on the documents that `docs` made last, one line each."""
        return []

    def sources(self) -> dict[str, str]:
        """Further facts that identify this task's documents, for the run's record (a file and its hash)."""
        return {}
