"""The task interface: a task gives documents and scores answers. Tasks know texts and images, but neither the engine
nor the methods.

A task is one class in one file under ``tasks/`` with the decorator ``@tasks.register("name")``. Only `docs`, `gen` and
`score` are required; class attributes declare the rest. `kvbench.taskkit.names.get_task("name")` makes a task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

IMAGE = "\ufffc"  # Unicode's object replacement character: marks the place of an image in a turn's text


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture of a question as an encoded file (PNG, JPEG or WebP), either on disk (`path`) or in memory (`data`)."""

    name: str  # what messages and the HTML report call it, such as "images/17.png"
    path: Path | None = None
    data: bytes = b""
    sha256: str = ""  # hash of the file, if known; a file with another hash is then refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One user message, in parts, because a run may evict after the context (query-agnostic) or after the question.

    If a turn has images, its texts have the character `IMAGE` once for each image, in the order of `images`.
    """

    context: str = ""
    question: str
    answer_prefix: str = ""  # begins the assistant's message in the prompt; the model continues this text
    system: str | None = None
    history: tuple[tuple[str, str], ...] = ()  # earlier messages from the data, as (role, text); for chat templates
    images: tuple[Image, ...] = ()

    @property
    def user(self) -> str:
        return self.context + self.question


@dataclass(frozen=True, slots=True, kw_only=True)
class Doc:
    """One question. `score` compares the answer with `reference`. Questions about the same source, such as one text,
    have the same `cluster_id`: their scores are not independent, and standard errors take that into account."""

    doc_id: str  # no two documents of a task have the same
    turns: tuple[Turn, ...]
    reference: Any
    meta: Mapping[str, Any] = field(default_factory=dict)
    cluster_id: str = ""  # "": the document is a cluster of its own
    gen: Mapping[str, Any] = field(default_factory=dict)  # fields of `GenSpec` that differ for this document

    @property
    def cluster(self) -> str:
        return self.cluster_id or self.doc_id


@dataclass(frozen=True, slots=True, kw_only=True)
class GenSpec:
    """A task's default settings for prompts and sampling. Command-line options override single fields; rows and the
    run's record state the values used.

    `max_new_tokens`: most tokens that the model generates per turn. `truncate`: "none" cuts no text. "middle" limits
    the text of a question's first turn to L tokens: it cuts the middle and keeps L / 2 tokens at each end. L is the
    value of --max-prompt-tokens. Without this option, L is the model's context less `max_new_tokens` and `reserve`
    (tokens), but at most `longest`.
    """

    n: int = 1
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()  # the last token of each of these texts ends the output, as an end token does
    min_new_tokens: int = 0  # the engine draws no end token before this many tokens
    truncate: Literal["none", "middle"] = "none"
    reserve: int = 0
    longest: int | None = None  # upper bound of L, however long the model's context is
    chat: bool = True
    thinking: bool | None = None  # value of the chat template's thinking switch; None: leave the template's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What the model generated for one sample, as `score` receives it.

    `text` is the last turn's answer, and `turns` holds the answers of all turns. `baseline` holds, for judges that
    compare two answers, the answers of all turns in the full cache's sample with the same question and number; it is
    empty if these answers are not known.
    """

    text: str
    turns: tuple[str, ...] = ()
    baseline: tuple[str, ...] = ()
    stop_reason: str
    prompt_tokens: int
    output_tokens: int
    # Whether the model was to think first; None: unknown. It may think although the task asks it not to.
    thinking: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result of scoring one sample. `value`, `strict` and `partial` are numbers from 0 to 1.

    If the sample cannot be scored, `value` is None, never 0, and `note` says why. The sample's row then has the status
    that `status` names: grader_error, judge_error, sandbox_error or unscored.

    "unscored" means that scoring did not take place. For example, the user gave no judge, or the judge compares answers
    and the full cache has no answer to the question.
    """

    value: float | None
    status: str = "grader_error"
    strict: float | None = None  # the score under a stricter rule for extracting the answer
    partial: float | None = None  # partial credit, such as the share of right steps or keys
    extracted: str | None = None
    aux: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str | bool | None] = field(default_factory=dict)  # further columns: `kvbench.runner.rows.FACTS`
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Where a task's data come from, and how many rows and which ids the data must have.

    The data come from a data folder (``--data``, ``KVBENCH_DATA``), from a hub repository, or from a web address. A hub
    repository has the data as a table or as raw files. A raw file is JSON lines, one JSON list, CSV, or a zip archive
    with one of these.
    """

    path: str  # path of the file inside a data folder
    rows: int | None  # number of data rows; None: unknown before reading
    hub: str = ""  # repository on the hub
    split: str = ""  # split of a table on the hub
    config: str | None = None  # configuration of a table on the hub
    files: tuple[str, ...] = ()  # raw files on the hub, in reading order
    member: str = ""  # the file with the rows inside an archive
    url: str = ""  # web address of an archive or file outside the hub
    url_sha256: str = ""  # hash of the file at `url`
    revision: str | None = None  # commit on the hub
    rename: Mapping[str, str] = field(default_factory=dict)  # columns on the hub -> columns in a data folder
    hub_id: Callable[[int, Mapping[str, Any]], str] | None = None  # (index, row on the hub) -> its id in a data folder
    ids_sha256: str | None = None  # hash of the rows' sorted ids, one per line: no id may be missing or new
    samples: tuple[str, ...] = ()  # files with some rows or invented rows, read if `path` is missing; a note says so
    images: str = ""  # column with the name of an image file, or a list of names, beside `path`; tasks get `Image`s
    pixels: str = ""  # column of a table on the hub with the encoded files that `images` names
    archive: str = ""  # zip archive on the hub with the files that `images` names, beside raw files
    where: Mapping[str, Any] = field(default_factory=dict)  # column -> value that selects the task's rows in the file
    licence: str = ""
    gated: bool = False


class Reader(Protocol):
    """What a task may use of a model: its type, tokenizer, context length and token counts, but not its weights."""

    @property
    def context(self) -> int:
        """The length of the model's context, in tokens."""

    @property
    def model_type(self) -> str:
        """The type of the model: `model_type` in transformers' configuration."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens."""

    def wrapping(self, *, thinking: bool | None = None) -> int:
        """Return the number of tokens that a prompt has beside the user's text: those of the chat template or, without
        a template, the tokenizer's special tokens."""


class DataSource(Protocol):
    """Finds the data that a manifest describes.

    The sources are tried in this order: the folder or file of ``--data``, the folder or file of ``KVBENCH_DATA``,
    kvbench's bundled files, and the hub or a web address. If the user gives a folder that lacks the data, kvbench
    reports an error and does not try the next source.
    """

    def rows(self, task: str, manifest: Manifest) -> Sequence[Mapping[str, Any]]: ...

    def file(self, task: str, manifest: Manifest) -> Path:
        """Return the local path of a data file that the task parses itself, such as an archive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The settings of judge and sandbox for `Task.score`; a run stores them in the task's attribute `services`."""

    judge: str | None = None  # URL of an OpenAI-compatible endpoint, ``local:FOLDER``, or "none"; None: no --judge
    judge_model: str | None = None
    judge_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the judge's key
    judge_mode: str = "single"
    unsafe_code: bool = False  # if no sandbox works, run programs with nothing but resource limits


class Task(ABC):
    """Base class of the tasks, one class per benchmark."""

    name: str = ""  # filled in by `get_task`
    version: ClassVar[str] = "1"  # increased with any change of prompt, extraction or metric
    suite: ClassVar[str] = ""  # "synthetic", "math", ...
    summary: ClassVar[str] = ""  # one line for `kvbench list tasks`
    headline: ClassVar[str] = "score"  # the row column that tables show first, "score" or "score_partial"
    manifest: ClassVar[Manifest | None] = None  # the data that the task needs; None: it generates its own
    prompt_styles: ClassVar[tuple[str, ...]] = ("default",)  # names accepted by --prompt-style, the default first
    variants: ClassVar[tuple[str, ...]] = ()  # values of V in ``name/V``; ``name`` alone: the first, or all if `group`
    endless: ClassVar[bool] = False  # whether `docs` makes as many questions as --limit says, even more than `size`
    group: ClassVar[bool] = False  # whether ``name`` alone means every variant
    lengths: ClassVar[tuple[int, ...]] = ()  # tokens, as in ``name@8k``: the default first; others work too
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {}  # printed below a group: name -> {variant: weight}
    # What scoring needs: "code" (it runs programs), "judge" (it asks another model), "images" (the judge sees images).
    needs: ClassVar[frozenset[str]] = frozenset()
    cheap_score: ClassVar[bool] = False  # whether `score` takes microseconds and cannot hang: it needs no own process

    def __init__(self, variant: str = "", length: int = 0) -> None:
        self.variant = variant or (self.variants[0] if self.variants else "")
        self.length = length or (self.lengths[0] if self.lengths else 0)
        self.services = Services()
        self.reader: Reader | None = None  # facts about the model that reads the prompts; None: no model is known

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"reader": None}  # scoring processes have no use for a tokenizer

    @abstractmethod
    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        """Return all documents in a fixed order, or the first `limit` of them.

        style: the name of the prompt style. The caller sets `self.reader` before the call, unless no model is known.
        """

    def require(self) -> None:  # noqa: B027  # most tasks need nothing
        """Raise SetupError if answers cannot be scored on this machine, for example without a compiler. Called before
        weights are loaded."""

    @abstractmethod
    def gen(self, model_type: str) -> GenSpec:
        """Return the default settings for prompts and sampling. model_type: as in transformers' configuration."""

    @abstractmethod
    def score(self, doc: Doc, output: Output) -> Score:
        """Score one sample. This method must have no side effects, and the task must be picklable: scoring may run in a
        separate process under a time limit."""

    def patience(self, doc: Doc) -> float:
        """Return the time limit for scoring one sample, in seconds."""
        return 40.0

    def size(self) -> int | None:
        """Return how many documents the task has if no --limit is given; None if only the data can tell."""
        return self.manifest.rows if self.manifest else None

    @property
    def gated(self) -> bool:
        """Whether the hub shows the data only to readers who accept terms. If so, kvbench must not show the data."""
        return bool(self.manifest and self.manifest.gated)

    def floor(self, budget: int, interval: int) -> float | None:
        """Return a lower bound, valid for every method, of the built-in model's main score (`headline`) at this budget
        and interval; None if no bound is known. The bound assumes that the model makes no mistake with the full cache.
        """
        return None

    def notes(self) -> list[str]:
        """Return notes to the user on the documents that `docs` returned last, one line each."""
        return []

    def sources(self) -> dict[str, str]:
        """Return further facts that identify this task's documents, such as a file and its hash; kvbench stores them in
        the run's record."""
        return {}
