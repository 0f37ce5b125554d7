"""The task interface: documents out, scores in. A task knows text only, neither the engine nor methods.

A task is one class in one file under ``tasks/`` with the decorator ``@tasks.register("name")``. Only `docs`, `gen`
and `score` are required; class attributes declare the rest. `kvbench.taskkit.names.get_task("name")` makes a task.
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
    """A task's default sampling. Command-line options override single fields and are recorded.

    `max_new_tokens` bounds each turn. With `truncate` "middle", a user text with more tokens than the limit keeps half
    of the limit from its start and half from its end; the limit is --max-prompt-tokens, by default the model's context
    less `max_new_tokens` and `reserve`.
    """

    n: int = 1
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()  # texts whose last token ends the output, as an end token does
    min_new_tokens: int = 0  # no end token is drawn before this many tokens
    truncate: Literal["none", "middle"] = "none"
    reserve: int = 0
    longest: int | None = None  # upper bound of the `truncate` limit on any model
    chat: bool = True
    thinking: bool | None = None  # None: the template has no such switch


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One sample as `score` receives it.

    `text` is the last turn's answer, `turns` holds the answers of all turns; `baseline` holds the full cache's answers
    to the same question, for judges that compare.
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
    """Result of scoring one sample. A sample that cannot be scored has `value` None, never 0, and `note` says why.

    Its row then gets `status`: grader_error, judge_error, sandbox_error, or unscored when no judge was given.
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
    """The sources of a task's data, and the rows that they must have.

    `path` is relative to a data folder (``--data``, ``KVBENCH_DATA``): JSON lines, or one JSON list. If `path` does not
    exist, `samples` are read: files with a few of the rows, or with invented rows of the same form; a note and the
    run's record say so. `where` (column -> value) selects the task's rows in a file that serves several tasks, before
    rows are counted.

    On the hub, `config` and `split` name a table, or `files` lists raw files to read in order (JSON lines or a JSON
    list; in a zip archive, its `member`). `url` is an archive or file outside the hub, `url_sha256` the hash of its
    bytes. `rename` maps source columns to the columns of the offline file; `hub_id(index, row)` gives a row the id that
    it has in the offline file. `ids_sha256` is the hash of the sorted ids, one per line: rows may be reordered, but
    none may be missing or new. `rows` None: unknown before reading.
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
    """The model that reads the prompts, as far as a task sees it: lengths of texts, never weights."""

    @property
    def context(self) -> int:
        """Length of the model's context, in tokens."""

    @property
    def model_type(self) -> str:
        """`config.model_type` of transformers."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens."""

    def wrapping(self, *, thinking: bool | None = None) -> int:
        """Number of tokens that the chat template puts around a user's text; 0 without a template."""


class DataSource(Protocol):
    """Finds a manifest's data: ``--data``, then ``KVBENCH_DATA``, bundled, hub; never silently in another source."""

    def rows(self, task: str, manifest: Manifest) -> Sequence[Mapping[str, Any]]: ...

    def file(self, task: str, manifest: Manifest) -> Path:
        """The local path of a file without rows (an archive, a text), from the sources in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Judge and sandbox settings of a run, for `score`.

    judge: base URL of an OpenAI-compatible endpoint, ``local:FOLDER`` for a local model, or "none"; None when the
        user gave no judge. `judge_key_env` names the environment variable that holds its key.
    unsafe_code: where no sandbox works, run programs under resource limits alone.
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
        group: True if ``name`` alone means every variant, False if it means the first.
        lengths: prompt lengths in tokens reachable as ``name@8192`` or ``name@8k``, the default first; other lengths
            work too. Empty: the task has no length setting.
        averages: means over variants, printed below a group's tables: name -> {variant: weight}.
        needs: services that scoring uses: "code" (runs programs), "judge" (asks another model).
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
        """Headline score that every method reaches at this budget (in the built-in model's tokens); None if unknown."""
        return None

    def notes(self) -> list[str]:
        """Notes to the user on the documents of the last call of `docs`, one line each."""
        return []

    def sources(self) -> dict[str, str]:
        """Further facts that identify this task's documents, for the run's record (a file and its hash)."""
        return {}
