"""The work of a run: the documents of each task as token ids, and every planned row with its key.

The module needs no torch and no weights; the tokenizer comes from transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.config.run_config import Cell, RunConfig
from kvbench.errors import UserError, bare, quote
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.options import budget_in_force
from kvbench.records import Request, Sampling
from kvbench.runner.prompt import Prompt, PromptMaker, sampling
from kvbench.runner.spool import Spool
from kvbench.sources.data import FILE_LIMIT, Data, read_plain
from kvbench.store import row_key
from kvbench.task import Doc, GenSpec, Task
from kvbench.taskkit import prompts, template_variables
from kvbench.taskkit.names import expand, get_task
from kvbench.taskkit.reader import ModelReader
from kvbench.taskkit.vision import Vision


def template_hash(path: str) -> str:
    """Return the SHA-256 of a --chat-template file. Raises UserError unless it is a regular file."""
    name = f"chat template {quote(path)}"
    return hashlib.sha256(read_plain(Path(path), name, FILE_LIMIT)).hexdigest()


def load_task(name: str, task_file: str | None) -> Task:
    """Return the task of this name. If there is a `task_file`, three names mean the task in this file: "file", "" and
    the task's own name."""
    return _own_task(name, task_file) or get_task(name)


def expand_task(name: str, task_file: str | None) -> list[str]:
    """Return the names of all tasks that one value of --task, such as ``ruler@*``, means. Raises UserError if no task
    has this name."""
    own = _own_task(name, task_file)
    return [own.name] if own else expand(name)


def _own_task(name: str, task_file: str | None) -> Task | None:
    if task_file is None:
        return None
    from kvbench.tasks.file import FileTask

    task = FileTask(task_file)
    return task if name.strip().lower() in ("", "file", task.name) else None


def make_method(cell: Cell) -> Method:
    """Make the method of a cell, with its options."""
    return choose.make(cell.method.name, dict(cell.method.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """One sample that a run is to generate.

    identity: the settings that distinguish this sample from all others; each setting is a column of the sample's row.
    key: a hash of `identity` and of the data's revision and hash.
    """

    key: str
    prompt: Prompt
    sample: int
    identity: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class TaskWork:
    """A task as one run uses it: its prompts, its sampling settings, and the facts about its data."""

    task: Task
    spec: GenSpec
    style: str
    thinking: bool | None
    prompts: list[Prompt]
    data: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def load(
        cls,
        name: str,
        config: RunConfig,
        source: Data,
        tokenizer: Any,
        model_type: str,
        context: int,
        *,
        spool: Spool,
        vision: Callable[[], Vision],
    ) -> TaskWork:
        """Load a task's documents and render its prompts.

        spool: stores documents, texts and tokens. vision: a function that loads the image processor; called only if
        documents have images.

        Raises SetupError if data are missing. Raises UserError for example in these cases: the prompt style is
        unknown; a chat template is needed but missing; --max-new-tokens exceeds the room in the model's context; the
        run is query-agnostic and documents have no context; a document's id, cluster or category is not text; two
        documents have the same id.
        """
        task = load_task(name, config.task_file)
        style = config.prompt_style_for(name) or task.prompt_styles[0]
        if style not in task.prompt_styles:
            raise UserError(
                f"task {quote(task.name)} has no prompt style {quote(style)}. It has {', '.join(task.prompt_styles)}."
            )
        spec = sampling(task.gen(model_type), config)
        variables = template_variables.parse(config.template_option)
        template = prompts.load_template(config.chat_template) if config.chat_template else None
        reader = ModelReader(
            tokenizer=tokenizer,
            model_type=model_type,
            context=context,
            chat=prompts.uses_chat(spec.chat, style, no_chat_template=config.no_chat_template),
            template=template,
            variables=variables,
            origin=config.chat_template or "of the tokenizer",
        )
        task.reader, task.services = reader, config.services()
        docs = deque(task.docs(source, style=style, limit=config.limit_for(name)))
        _check_texts(task, docs)
        if len(ids := Counter(doc.doc_id for doc in docs)) < len(docs):
            [(twice, count)] = ids.most_common(1)
            raise UserError(
                f"task {quote(task.name)} gives {count} questions the id {quote(twice)}. Give each question its own id."
            )
        if any(turn.images for doc in docs for turn in doc.turns):
            cure = prompts.chat_cure(spec.chat, no_chat_template=config.no_chat_template)
            reader = _with_vision(task, reader, vision, cure)
        how: Any = {"chat": reader.chat, "chat_template": reader.template, "variables": variables}
        prompts.check_template(tokenizer, **how, origin=reader.origin)
        thinking = prompts.effective_thinking(tokenizer, spec.thinking, **how)
        maker = PromptMaker(task, reader, config, spool)
        all_prompts = [maker.prompt(docs.popleft()) for _ in range(len(docs))]  # drops each document once it is stored
        used = source.used.get(task.name)
        return cls(
            task=task,
            spec=spec,
            style=style,
            thinking=thinking,
            prompts=all_prompts,
            data=(dataclasses.asdict(used) if used else {}) | task.sources(),
            notes=_notes(task, spec, config, all_prompts, reader, thinking),
        )

    def prompts_hash(self) -> str:
        """Return one hash (16 hex digits) over the texts, tokens and sampling settings of all prompts."""
        digest = hashlib.sha256()
        for p in self.prompts:
            asked = (p.doc_id, p.sha256, p.compress_at, p.max_new_tokens, p.stop_ids, dataclasses.astuple(p.spec))
            digest.update(repr(asked).encode())
            digest.update(array("q", p.ids).tobytes())
        return digest.hexdigest()[:16]

    def rows(self, cell: Cell, config: RunConfig, model: Mapping[str, Any], dtype: str, group: int) -> list[PlannedRow]:
        """Return the planned rows of a cell, in the order of documents and samples. model: the values of the columns
        about the model. group: query heads per KV head, the largest over the layers."""
        method = make_method(cell)
        chunked = method.evicts and config.prefill == "chunked"
        shared = {
            "task": self.task.name,
            "task_version": self.task.version,
            "method": cell.method.name,
            "method_version": version(cell.method.name),
            "options": method.options(),  # with defaults, so that a row states all of them
            "budget": cell.budget,
            "budget_share": cell.budget if isinstance(cell.budget, float) else None,
            "interval": config.interval_of(cell) if method.evicts else None,
            "compress": config.compress if method.evicts else None,
            "prefill": config.prefill if method.evicts else None,
            "prefill_chunk": config.prefill_chunk if chunked else None,
            "seed": config.seed,
            "prompt_style": self.style,
            "thinking": self.thinking,
            "stop": list(config.stop) or None,
            "dtype": dtype,
            "attention": config.attn,
            **model,
        }
        revision = {k: self.data[k] for k in ("revision", "sha256") if self.data.get(k)}
        planned = []
        for prompt in self.prompts:
            if cell.budget is not None:
                shared["budget"] = budget_in_force(method, cell.budget, len(prompt.ids), group)
            for sample in range(prompt.spec.n):
                identity = shared | {
                    "doc_id": prompt.doc_id,
                    "sample": sample,
                    **{name: getattr(prompt.spec, name) for name in ("temperature", "top_p", "top_k", "min_p")},
                    "max_new_tokens": prompt.max_new_tokens,
                    "prompt_sha256": prompt.sha256,
                    "prompt_tokens_cut": prompt.cut,
                    "multi_turn_cache": prompt.multi_turn_cache,
                }
                key = row_key(identity | revision)  # has the task's thinking; the prompt's hash tells questions apart
                own = identity | {"thinking": prompt.thinks}
                planned.append(PlannedRow(key=key, prompt=prompt, sample=sample, identity=own))
        return planned

    def batches(self, rows: list[PlannedRow], seed: int) -> list[list[Request]]:
        """Group planned rows into requests to the engine, one per document. Returns one list of requests per
        combination of sampling settings, because all requests of an engine batch must have equal sampling settings."""
        samples: dict[str, list[int]] = {}
        prompt: dict[str, Prompt] = {}
        for row in rows:
            samples.setdefault(row.prompt.doc_id, []).append(row.sample)
            prompt[row.prompt.doc_id] = row.prompt
        batches: dict[Sampling, list[Request]] = {}
        for doc_id, wanted in samples.items():
            request = self.request(prompt[doc_id], tuple(wanted), seed)
            batches.setdefault(request.sampling, []).append(request)
        return list(batches.values())

    def request(self, prompt: Prompt, samples: tuple[int, ...], seed: int) -> Request:
        """Return a request to the engine for some samples of a prompt."""
        s = prompt.spec
        return Request(
            task=self.task.name,
            doc_id=prompt.doc_id,
            prompt_ids=prompt.ids,
            samples=samples,
            max_new_tokens=prompt.max_new_tokens,
            max_tokens=prompt.max_tokens,
            sampling=Sampling.of(s),
            stop_strings=s.stop,
            stop_ids=prompt.stop_ids,
            min_new_tokens=s.min_new_tokens,
            conversation=prompt.talk,
            seed=seed,
            compress_at=prompt.compress_at,
            reply_header=prompt.reply_header,
            images=prompt.images,
        )


def _check_texts(task: Task, docs: Iterable[Doc]) -> None:
    """Raise UserError if a document has no id, or if its id, cluster or category is not the text that rows store."""
    for doc in docs:
        given = {"doc_id": doc.doc_id, "cluster_id": doc.cluster_id, "meta['category']": doc.meta.get("category")}
        for name, value in given.items():
            if not isinstance(value, (str, type(None))) or (name == "doc_id" and not value):
                raise UserError(
                    f"task {quote(task.name)} gives question {quote(doc.doc_id)} the {name} {bare(repr(value))}. "
                    f"Give a text that is not empty as {name}."
                )


def _with_vision(task: Task, reader: ModelReader, vision: Callable[[], Vision], cure: str) -> ModelReader:
    """Return the model's reader with an image processor added. Raises UserError if the prompts use no chat template,
    with `cure` in its message."""
    if not reader.chat:
        raise UserError(f"task {quote(task.name)} has images, which only a chat template can place in a prompt. {cure}")
    seeing = vision()
    return dataclasses.replace(reader, vision=seeing, template=reader.template or seeing.template)


def _notes(
    task: Task, spec: GenSpec, config: RunConfig, all_prompts: list[Prompt], reader: ModelReader, thinking: bool | None
) -> list[str]:
    """Return notes that the user should read before the run, such as how many prompts are cut to fit. thinking: whether
    answers hold a thinking block, by the chat template.

    Raises UserError when a prompt and --max-new-tokens together exceed the model's context. Prompts that alone fill the
    context do not count.
    """
    context = reader.context
    lengths = [len(p.ids) for p in all_prompts if len(p.ids) < context]
    notes = []
    if lengths and config.max_new_tokens and max(lengths) + config.max_new_tokens > context:
        raise UserError(
            f"--max-new-tokens {config.max_new_tokens} and a prompt of {max(lengths)} tokens exceed the model's "
            f"context of {context} tokens. Give a smaller --max-new-tokens."
        )
    if lengths and max(lengths) + spec.max_new_tokens > context:
        notes.append(
            f"task {quote(task.name)} asks for {spec.max_new_tokens} new tokens; "
            f"outputs end at the model's context of {context}."
        )
    if too_long := [len(p.ids) for p in all_prompts if len(p.ids) >= context]:
        notes.append(
            f"task {quote(task.name)}: {len(too_long)} of {len(all_prompts)} prompts leave no room for an answer in "
            f"the model's context of {context} tokens (the longest has {max(too_long)}); their rows get the status "
            "prompt_too_long and no score."
        )
    if config.max_prompt_tokens and spec.truncate == "none":
        notes.append(f"task {quote(task.name)} does not cut its prompts; --max-prompt-tokens has no effect on it.")
    switch = None if config.thinking is None else "--thinking" if config.thinking else "--no-thinking"
    given = {"--template-option": config.template_option, "--chat-template": config.chat_template, switch: switch}
    for flag in (flag for flag, value in given.items() if value and not reader.chat):
        notes.append(f"task {quote(task.name)} uses no chat template; {flag} has no effect on it.")
    if switch and reader.chat and _unheard(config.thinking, thinking, reader):
        notes.append(
            f"task {quote(task.name)}: the chat template does not read {template_variables.THINKING}; {switch} has no "
            "effect on it."
        )
    if thinking and spec.thinking is False:
        notes.append(
            f"task {quote(task.name)} runs without thinking, but the chat template always opens a thinking block, in "
            f"which answers of {spec.max_new_tokens} tokens may end. Give --max-new-tokens or another --chat-template."
        )
    if stops := dict.fromkeys(stop for p in all_prompts if p.thinks for stop in p.spec.stop):
        notes.append(
            f"task {quote(task.name)}: the stop strings {', '.join(map(quote, stops))} end an output inside its "
            "thinking block too. Give --no-thinking, or another --stop or --prompt-style, if thoughts may hold them."
        )
    if shortened := sum(p.cut > 0 for p in all_prompts):
        notes.append(
            f"task {quote(task.name)}: {shortened} of {len(all_prompts)} prompts are cut in the middle to fit."
        )
    modes = {p.multi_turn_cache for p in all_prompts}
    causes = {"images": "later turns have images", "template": "the chat template changes earlier turns"}
    for cause in (text for name, text in causes.items() if f"reset ({name})" in modes):
        notes.append(
            f"task {quote(task.name)}: {cause}, so every turn is read as a new prompt (column multi_turn_cache)."
        )
    return [*notes, *task.notes()]


def _unheard(asked: bool | None, thinking: bool | None, reader: ModelReader) -> bool:
    """Return whether a note says that --thinking (`asked` True) or --no-thinking (`asked` False) has no effect, because
    the chat template does not read `enable_thinking`. --thinking gets no note if answers hold a thinking block anyway.
    --no-thinking gets no note if answers hold such a block (another note says so), or if it is unknown whether they do.
    thinking: whether they do, as `prompts.effective_thinking` returns it; None: unknown."""
    template = prompts.template_text(reader.tokenizer, reader.template)
    reads = template is None or template_variables.reads_thinking(template)
    return not reads and (not thinking if asked else thinking is False)


def version(name: str) -> str:
    """Return the version of a method; for two methods joined by ``+``, both versions joined by ``+``."""
    parts: list[Any] = [registry.methods.get(part) for part in choose.canonical(name).split("+")]
    return "+".join(str(part.version) for part in parts)
