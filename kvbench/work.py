"""What a run has to do, without doing it: the documents of each task as token ids, and every planned row with its key.

    works = {name: TaskWork.load(...) for name in config.tasks}
    plan = [row for cell in config.cells() for row in works[cell.task].rows(cell, ...)]

No torch and no weights; the tokenizer comes from transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench import prompts, registry
from kvbench.budget import Budget, entries
from kvbench.config import Cell, RunConfig
from kvbench.data import Data
from kvbench.errors import UserError, show
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.records import Request, Sampling
from kvbench.store import row_key
from kvbench.task import Doc, GenSpec, Task
from kvbench.task_names import get_task

# Columns that came after the first runs: at these values they are left out of a row's key, so that old keys stay valid.
YOUNGER = {"budget_share": None, "compress": "query-aware", "prefill": "full", "prefill_chunk": None, "artefacts": None}


def load_task(name: str, task_file: str | None) -> Task:
    """A registered task, or the one of --task-file under its own name (and under no name)."""
    if task_file is not None:
        from kvbench.tasks.file import FileTask

        task: Task = FileTask(task_file)
        if name in ("", "file", task.name):
            return task
    return get_task(name)


def make_method(cell: Cell) -> Method:
    """The method of a cell with its options."""
    return choose.make(cell.method.name, dict(cell.method.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One document ready to be read by the model."""

    doc: Doc
    text: str
    ids: tuple[int, ...]
    max_new_tokens: int
    sha256: str
    compress_at: int | None = None  # tokens before the question, for a query-agnostic run


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """One sample that a run will make. `identity` is what its key hashes; it goes into the row as it is."""

    key: str
    prompt: Prompt
    sample: int
    identity: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class TaskWork:
    """One task's documents, sampling and prompts under one run configuration."""

    task: Task
    spec: GenSpec
    style: str
    thinking: bool | None
    prompts: list[Prompt]
    data: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def load(
        cls, name: str, config: RunConfig, source: Data, tokenizer: Any, model_type: str, context: int
    ) -> TaskWork:
        """Load documents and render prompts.

        Raises:
            UserError: no chat template (B049), --max-new-tokens beyond the model's context (B032), or a query-agnostic
                run of documents that have no context.
            SetupError: data cannot be had.
        """
        task = load_task(name, config.task_file)
        style = config.prompt_style or task.prompt_styles[0]
        if style not in task.prompt_styles:
            raise UserError(
                f"task {show(task.name)} has no prompt style {show(style)}. It has {', '.join(task.prompt_styles)}."
            )
        spec = _override(task.gen(model_type), config)
        docs = task.docs(source, style=style, limit=config.limit_for(name))
        chat = prompts.uses_chat(spec.chat, style, no_chat_template=config.no_chat_template)
        template = prompts.load_template(config.chat_template) if config.chat_template else None
        origin = config.chat_template or "of the tokenizer"
        prompts.check_template(tokenizer, task=task.name, chat=chat, chat_template=template, origin=origin)
        thinking = prompts.effective_thinking(tokenizer, spec.thinking, chat=chat, chat_template=template)
        texts = [
            prompts.render(d, tokenizer, chat=chat, thinking=spec.thinking, chat_template=template, origin=origin)
            for d in docs
        ]
        marked: list[tuple[tuple[int, ...], int | None]]
        if config.compress == "query-agnostic":
            marked = [_to_context(task, doc, tokenizer, text, chat) for doc, text in zip(docs, texts)]
        else:
            marked = [(tuple(prompts.encode(tokenizer, text, chat=chat)), None) for text in texts]
        ids = [i for i, _ in marked]
        fitting = [len(i) for i in ids if len(i) < context]
        notes = []
        if config.max_new_tokens and fitting and max(fitting) + config.max_new_tokens > context:
            raise UserError(
                f"prompt (up to {max(fitting)} tokens) + --max-new-tokens {config.max_new_tokens} is above the model's "
                f"context of {context}."
            )
        if fitting and max(fitting) + spec.max_new_tokens > context:
            notes.append(
                f"task {show(task.name)} asks for {spec.max_new_tokens} new tokens; "
                f"outputs end at the model's context of {context}."
            )
        used = source.used.get(task.name)
        return cls(
            task=task,
            spec=spec,
            style=style,
            thinking=thinking,
            notes=notes,
            data=(dataclasses.asdict(used) if used else {}) | task.sources(),
            prompts=[
                Prompt(
                    doc=doc,
                    text=text,
                    ids=i,
                    sha256=hashlib.sha256(text.encode()).hexdigest(),
                    max_new_tokens=max(1, min(spec.max_new_tokens, context - len(i))),
                    compress_at=at,
                )
                for doc, text, (i, at) in zip(docs, texts, marked)
            ],
        )

    @property
    def sampling(self) -> Sampling:
        s = self.spec
        return Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)

    def rows(self, cell: Cell, config: RunConfig, model: Mapping[str, Any], dtype: str) -> list[PlannedRow]:
        """Every planned row of a cell, in the order of documents and samples. `model`: name and revision."""
        method = make_method(cell)
        chunked = method.evicts and config.prefill == "chunked"
        shared = {
            "task": self.task.name,
            "task_version": self.task.version,
            "method": cell.method.name,
            "method_version": version(cell.method.name),
            "options": method.options(),  # defaults included, so that a row says what really ran
            "budget": cell.budget,
            "budget_share": cell.budget if isinstance(cell.budget, float) else None,
            "interval": config.interval if method.evicts else None,
            "compress": config.compress if method.evicts else None,
            "prefill": config.prefill if method.evicts else None,
            "prefill_chunk": config.prefill_chunk if chunked else None,
            "seed": config.seed,
            "prompt_style": self.style,
            "thinking": self.thinking,
            "temperature": self.spec.temperature,
            "top_p": self.spec.top_p,
            "top_k": self.spec.top_k,
            "min_p": self.spec.min_p,
            "dtype": dtype,
            **model,
        }
        revision = {k: self.data[k] for k in ("revision", "sha256") if self.data.get(k)}
        planned = []
        for prompt in self.prompts:
            if cell.budget is not None:
                shared["budget"] = applied_budget(cell.budget, method, len(prompt.ids))
            for sample in range(self.spec.n):
                identity = shared | {
                    "doc_id": prompt.doc.doc_id,
                    "sample": sample,
                    "max_new_tokens": prompt.max_new_tokens,
                    "prompt_sha256": prompt.sha256,
                }
                named = {k: v for k, v in identity.items() if k not in YOUNGER or v not in (None, YOUNGER[k])}
                named["options"] = method.identity()
                planned.append(
                    PlannedRow(key=row_key(named | revision), prompt=prompt, sample=sample, identity=identity)
                )
        return planned

    def requests(self, rows: list[PlannedRow], seed: int) -> list[Request]:
        """Planned rows as requests to the engine, the samples of one document together."""
        samples: dict[str, list[int]] = {}
        prompt: dict[str, Prompt] = {}
        for row in rows:
            samples.setdefault(row.prompt.doc.doc_id, []).append(row.sample)
            prompt[row.prompt.doc.doc_id] = row.prompt
        return [
            Request(
                task=self.task.name,
                doc_id=doc_id,
                prompt_ids=prompt[doc_id].ids,
                samples=tuple(wanted),
                max_new_tokens=prompt[doc_id].max_new_tokens,
                sampling=self.sampling,
                stop_strings=self.spec.stop,
                seed=seed,
                compress_at=prompt[doc_id].compress_at,
            )
            for doc_id, wanted in samples.items()
        ]


def _override(spec: GenSpec, config: RunConfig) -> GenSpec:
    """The task's sampling with what the user set."""
    given: dict[str, Any] = {
        "n": config.samples,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "thinking": config.thinking,
    }
    return dataclasses.replace(spec, **{name: value for name, value in given.items() if value is not None})


def applied_budget(budget: Budget, method: Method, prompt_tokens: int) -> int:
    """Entries that a budget means for one prompt. A share never falls below what the method needs."""
    size = entries(budget, prompt_tokens)
    return max(size, method.min_budget()) if isinstance(budget, float) else size


def version(name: str) -> str:
    """The version of a method; of two methods theirs joined as their names are."""
    parts: list[Any] = [registry.methods.get(part) for part in choose.canonical(name).split("+")]
    return "+".join(str(part.version) for part in parts)


def _to_context(task: Task, doc: Doc, tokenizer: Any, text: str, chat: bool) -> tuple[tuple[int, ...], int]:
    """Token ids of a prompt, and how many of them come before its question."""
    turn = doc.turns[0]
    if not turn.context.strip():
        raise UserError(
            f"task {show(task.name)} has questions without a context ({show(doc.doc_id)}): there is nothing to "
            "compress before the question. Use --compress query-aware."
        )
    ids, leading = prompts.encode_to_context(tokenizer, text, turn, chat)
    if not 0 < leading < len(ids):
        raise UserError(
            f"task {show(task.name)}: no token boundary parts context and question of {show(doc.doc_id)}. "
            "Use --compress query-aware."
        )
    return tuple(ids), leading
