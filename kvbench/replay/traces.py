"""Finished sequences to read again: the model's own answers under the full cache, made here or stored by a run.

Both are functions of task, model and seed alone. Only the first turn and the first sample of a question count here; a
run's stored answers are all taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import shape_of_model
from kvbench.engine.plan import measure, plan_cell
from kvbench.errors import UserError, show
from kvbench.records import Request, Sampling
from kvbench.runner.prompt import Prompt
from kvbench.runner.workload import TaskWork
from kvbench.store import read_rows, read_texts

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A prompt with its answer, which is the request's `forced`. Traces of one cluster are not independent."""

    request: Request
    cluster: str

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_ids

    @property
    def answer(self) -> tuple[int, ...]:
        return self.request.forced

    @property
    def sample(self) -> int:
        return self.request.samples[0]


def own(
    work: TaskWork,
    loaded: LoadedModel,
    seed: int,
    say: Notice,
    tick: Callable[[str, int, int], None] = lambda text, traces, tokens: None,
) -> list[Trace]:
    """Answers to all questions of a task, drawn as the task draws them, in the order of the questions.

    tick: told of every answer and its tokens. Raises UserError when no question can be answered.
    """
    asked = {p.doc.doc_id: p for p in work.prompts if p.ids and p.max_tokens <= loaded.context}
    if not asked:
        raise UserError(f"task {show(work.task.name)} has no question that fits the model's context.")
    method = registry.methods.get("full")()
    longest = max(len(p.ids) + p.max_new_tokens for p in asked.values())
    plan = plan_cell(
        shape_of_model(loaded.model),
        measure(loaded.device, loaded.dtype),
        method,
        budget=None,
        interval=1,
        sequences=len(asked),
        slots="auto",
        device=loaded.device,
        dtype=loaded.dtype,
        max_tokens=longest,
    )
    engine = Engine(loaded, method, budget=None, interval=1, slots=plan.slots, max_tokens=longest)
    found: dict[str, Trace] = {}
    for sampling in dict.fromkeys(_sampling(p) for p in asked.values()):
        todo = [_request(work, p, seed, 0) for p in asked.values() if _sampling(p) == sampling]
        for answer in engine.generate(todo):
            name = answer.request.doc_id
            tick("", 1, len(answer.token_ids))
            if answer.status == "ok" and answer.token_ids:
                forced = replace(answer.request, forced=answer.token_ids)
                found[name] = Trace(request=forced, cluster=asked[name].doc.cluster)
    if missing := len(work.prompts) - len(found):
        say(f"task {show(work.task.name)}: {missing} of {len(work.prompts)} questions have no answer to replay.")
    return [found[name] for name in asked if name in found]


def stored(folder: Path, work: TaskWork, tokenizer: Any, context: int, seed: int, say: Notice) -> list[Trace]:
    """The texts that the full cache wrote in a run, as tokens again; a text does not tell which end token followed it.

    Raises UserError when the run has none for this task.
    """
    rows = read_rows(folder).merge(read_texts(folder), on="row_key")
    rows = rows[(rows["task"] == work.task.name) & (rows["method"] == "full") & (rows["status"] == "ok")]
    prompts = {p.doc.doc_id: p for p in work.prompts}
    found, strangers = [], 0
    for row in rows.sort_values(["doc_id", "sample"]).to_dict("records"):
        prompt = prompts.get(row["doc_id"])
        text = row["output"]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) and text else []
        if prompt is None or prompt.talk or prompt.sha256 != row["prompt_sha256"] or not ids:
            strangers += 1
            continue
        request = _request(work, prompt, seed, int(row["sample"]))
        ids = ids[: context - len(prompt.ids)]
        found.append(Trace(request=replace(request, forced=tuple(ids)), cluster=prompt.doc.cluster))
    if strangers:
        say(f"task {show(work.task.name)}: {strangers} answers of {show(folder)} are empty, or not to these prompts.")
    if not found:
        raise UserError(f"run {show(folder)} has no answers of the full cache to {show(work.task.name)} to replay.")
    return found


def _request(work: TaskWork, prompt: Prompt, seed: int, sample: int) -> Request:
    return Request(
        task=work.task.name,
        doc_id=prompt.doc.doc_id,
        prompt_ids=prompt.ids,
        samples=(sample,),
        max_new_tokens=prompt.max_new_tokens,
        sampling=_sampling(prompt),
        stop_strings=prompt.spec.stop,
        stop_ids=prompt.stop_ids,
        min_new_tokens=prompt.spec.min_new_tokens,
        seed=seed,
    )


def _sampling(prompt: Prompt) -> Sampling:
    s = prompt.spec
    return Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
