"""Reads all inputs of a run except weights: the model's tokenizer and configuration, and every task's prompts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import huggingface_hub
import transformers

from kvbench.config.run_config import RunConfig
from kvbench.engine.attention.geometry import ProbeFailed
from kvbench.engine.model.adapter import check, refuse_quantised
from kvbench.engine.model.load import LoadedModel, load
from kvbench.engine.model.shape import on_meta
from kvbench.errors import UserError, quote
from kvbench.runner import image_processor, same_run, task_data
from kvbench.runner.spool import Spool
from kvbench.runner.workload import TaskWork
from kvbench.sources import adapters, models, quantised, vocabulary
from kvbench.sources.adapters import Adapter
from kvbench.sources.data.missing import DataMissing
from kvbench.sources.tokenizer import read_tokenizer

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads before its weights: the model's configuration and context length, and every task's prompts."""

    info: models.ModelInfo
    where: str  # folder, or the hub's name
    config: Any  # the model's, from transformers
    context: int
    works: dict[str, TaskWork]
    adapter: Adapter | None = None

    def load_model(self, config: RunConfig) -> LoadedModel:
        """Load the model as `config` says, and merge the adapter, if there is one, into its weights."""
        return load(
            self.where,
            revision=self.info.commit or config.revision,
            device=config.device,
            dtype=config.dtype,
            adapter=self.adapter,
        )

    def tasks(self) -> dict[str, Any]:
        """Return each task's version, its data, a hash of its prompts and how it is scored, for the run's record."""
        return {
            name: {
                "version": w.task.version,
                "data": dict(w.data),
                "prompts": w.prompts_hash(),
                "headline": w.task.headline,
                "needs": sorted(w.task.needs),
            }
            for name, w in self.works.items()
        }


def read_inputs(
    config: RunConfig,
    say: Notice,
    info: models.ModelInfo | None = None,
    adapter: Adapter | None = None,
    before: Mapping[str, Any] | None = None,
) -> Inputs:
    """Read all inputs except weights, and check the judge and the sandbox if a task needs them.

    info, adapter: the model and its adapter, if the caller has looked them up; None: look them up. before: the record
    of the run that uses these inputs again; None: a new run.

    Raises KVBenchError, for example in these cases: the model, the adapter or data are missing; a prompt cannot be
    made; a task needs a judge but --judge is missing or cannot be used; a task needs a sandbox but none works here.
    """
    info = info or models.fetched(config.model_place, config.revision)
    where = info.where
    with models.reading(config.model, where):
        tokenizer, model_config = _read_model(where, config)
        tokenizer("word")  # a tokenizer reads some of its settings only with the first text: a fault shows here
        embeddings = getattr(model_config.get_text_config(), "vocab_size", None)
        vocabulary.check_tokenizer(tokenizer, embeddings)
        context = info.context or models.context_of(model_config)
    if adapter := adapter or adapters.find(config.adapter):
        refuse_quantised(adapter, quantised.form_of(info.config))
        with contextlib.suppress(ProbeFailed):  # then loading checks it
            check(adapter, on_meta(model_config))
    data = task_data.source(config)
    vision = cache(partial(image_processor.load, config.model, where, config.revision, model_config, tokenizer))
    works: dict[str, TaskWork] = {}
    load_task = partial(TaskWork.load, spool=Spool(), vision=vision)
    for name in config.tasks:
        try:
            works[name] = load_task(name, config, data, tokenizer, model_config.model_type, context)
        except DataMissing as error:
            raise task_data.all_missing(error, [n for n in config.tasks if n not in works], config, data) from None
    recorded = (before or {}).get("tasks", {})
    for name, work in works.items():
        work.data = same_run.as_recorded(recorded.get(name, {}).get("data", {}), work.data)
        ids = chain.from_iterable(prompt.ids for prompt in work.prompts)
        vocabulary.check_ids(f"a prompt of task {quote(name)}", tokenizer, ids, embeddings)
    _check_end(config, where, tokenizer, model_config, works)
    if any("code" in work.task.needs for work in works.values()):
        from kvbench.scoring import sandbox

        sandbox.require(config.unsafe_run_code)
    for work in works.values():
        work.task.require()
    for judged in (work.task for work in works.values() if "judge" in work.task.needs):
        from kvbench.scoring import judge

        judge.check(config.services(), judged)
    for note in (*data.notes(), *(note for work in works.values() for note in work.notes)):
        say(note)
    return Inputs(info=info, where=where, config=model_config, context=context, works=works, adapter=adapter)


def _check_end(config: RunConfig, where: str, tokenizer: Any, model_config: Any, works: dict[str, TaskWork]) -> None:
    """Raise UserError if a task's answers could end only at the maximum length. An answer cannot end earlier if the
    model has no end token, and neither task, prompt style nor user gives a stop string or token."""
    generation = None
    with models.reading(config.model, where), contextlib.suppress(OSError):  # no generation config
        generation = transformers.GenerationConfig.from_pretrained(where, revision=config.revision or "main")
    if not vocabulary.end_ids(tokenizer, generation, model_config.get_text_config()):
        endless = [name for name, work in works.items() if not all(p.spec.stop or p.stop_ids for p in work.prompts)]
        if endless:
            raise UserError(
                f"model {quote(config.model)} names no end token, and task {quote(endless[0])} has no stop string: "
                f"every answer would have {works[endless[0]].spec.max_new_tokens} tokens. Give --stop TEXT."
            )


def _read_model(where: str, config: RunConfig) -> tuple[Any, Any]:
    """Read the model's tokenizer and configuration, from a folder or the hub."""
    transformers.logging.set_verbosity_error()
    if Path(where).is_dir():
        models.check_tokenizer(config.model, Path(where))
    huggingface_hub.logging.set_verbosity_error()  # the client logs every retry; kvbench reports the outcome
    tokenizer = read_tokenizer(where, config.revision)
    return tokenizer, transformers.AutoConfig.from_pretrained(where, revision=config.revision, trust_remote_code=False)
