"""Gets the traces that a replay reads: answers that the model, with the full cache, generates now or has generated in
an earlier run.

A fresh or a stored answer depends on task, model, sampling settings and seed, but not on the methods under which it is
replayed. Questions with several turns are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import shape_of_model
from kvbench.engine.plan import measure, plan_cell
from kvbench.errors import UserError, quote
from kvbench.records import Request, Sampling
from kvbench.replay.parts import Parts
from kvbench.runner.prompt import Prompt
from kvbench.runner.workload import TaskWork
from kvbench.store import read_rows, read_texts

Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedTrace:
    """A trace as the engine reads it: a request that contains its answer (`Request.forced`).

    cluster: the name of the source that the question shares with other questions (`Doc.cluster`).
    """

    request: Request
    cluster: str

    @property
    def prompt(self) -> Sequence[int]:
        return self.request.prompt_ids

    @property
    def answer(self) -> tuple[int, ...]:
        return self.request.forced

    @property
    def sample(self) -> int:
        return self.request.samples[0]


def answer_with_full_cache(
    work: TaskWork,
    loaded: LoadedModel,
    seed: int,
    say: Notice,
    on_read: Callable[[str, int, int], None] = lambda text, traces, tokens: None,
    parts: Parts | None = None,
) -> list[ForcedTrace]:
    """Let the model answer every question of a task once. Return the answers in the order of the questions.

    The task's sampling settings apply. Questions that are too long or have several turns, and answers that failed, are
    left out. say: called with a message about what is left out. on_read: called after each answer with "", 1, and the
    number of its tokens. parts: has the answers if an earlier command finished them. Raises UserError if every question
    has several turns or does not fit the model's context.
    """
    single = [p for p in work.prompts if not p.talk]
    if work.prompts and not single:
        raise UserError(
            f"every question of task {quote(work.task.name)} has several turns, and replay reads only questions with "
            "one turn. Choose another task."
        )
    prompts = {p.doc_id: p for p in single if p.ids and p.max_tokens <= loaded.context}
    if not prompts:
        raise UserError(
            f"no question of task {quote(work.task.name)} fits, together with its answer, into the model's context of "
            f"{loaded.context} tokens. Choose another task, or shorter answers with --max-new-tokens."
        )
    parts, what = parts or Parts(), {"task": work.task.name, "prompts": [[n, p.sha256] for n, p in prompts.items()]}
    requests = {name: _request(work, prompt, seed, 0) for name, prompt in prompts.items()}
    if (kept := parts.read(what)) is None:
        answers = _generate(loaded, list(prompts.values()), list(requests.values()), on_read)
        parts.write(what, {str(i): np.array(answers.get(name, ())) for i, name in enumerate(prompts)})
    else:
        answers = {name: tuple(kept[str(i)].tolist()) for i, name in enumerate(prompts)}
    traces = {
        name: ForcedTrace(request=replace(requests[name], forced=ids), cluster=prompts[name].doc.cluster)
        for name, ids in answers.items()
        if ids
    }
    if missing := len(work.prompts) - len(traces):
        say(
            f"task {quote(work.task.name)}: {missing} of {len(work.prompts)} questions have no answer to "
            "replay (too long, several turns, or failed)."
        )
    return [traces[name] for name in prompts if name in traces]


def _generate(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    requests: Sequence[Request],
    on_read: Callable[[str, int, int], None],
) -> dict[str, tuple[int, ...]]:
    """Let the model answer the requests. Return the token ids of each answer, by question; failed answers are missing.
    prompts: the prompts of the requests. on_read: see `answer_with_full_cache`."""
    batches: dict[Sampling, list[Request]] = {}
    for request in requests:
        batches.setdefault(request.sampling, []).append(request)
    engine = _engine(loaded, prompts)
    answers: dict[str, tuple[int, ...]] = {}
    for batch in batches.values():
        for answer in engine.generate(batch):
            on_read("", 1, len(answer.token_ids))
            if answer.status == "ok":
                answers[answer.request.doc_id] = tuple(answer.token_ids)
    return answers


def _engine(loaded: LoadedModel, prompts: Sequence[Prompt]) -> Engine:
    """Return an engine with the full cache. It has one slot per prompt, or fewer if memory does not suffice."""
    longest = max(len(p.ids) + p.max_new_tokens for p in prompts)
    method = registry.methods.get("full")()
    plan = plan_cell(
        shape_of_model(loaded.model),
        measure(loaded.device, loaded.dtype),
        method,
        budget=None,
        interval=1,
        sequences=len(prompts),
        slots="auto",
        device=loaded.device,
        dtype=loaded.dtype,
        max_tokens=longest,
        max_prompt=max(len(p.ids) for p in prompts),
        samplings={Sampling.of(p.spec) for p in prompts},
    )
    return Engine(loaded, method, budget=None, interval=1, slots=plan.slots, max_tokens=longest)


def stored_answers(
    folder: Path,
    work: TaskWork,
    tokenizer: Any,
    context: int,
    seed: int,
    say: Notice,
    *,
    cure: str = "Give --run a run of the method full on this task.",
) -> list[ForcedTrace]:
    """Return the answers that a run generated with the full cache, as traces.

    The answers are the stored texts, tokenised again. They lack the end token, because stored texts lack it. Leaves out
    the answers for which `read_trace` returns None. say: called with a message about what is left out. cure: the remedy
    in the error if no answer to this task remains. Raises UserError in this case.
    """
    rows = read_rows(folder).merge(read_texts(folder), on="row_key")
    rows = rows[(rows["task"] == work.task.name) & (rows["method"] == "full") & (rows["status"] == "ok")]
    prompts = {p.doc_id: p for p in work.prompts}
    ordered = rows.sort_values(["doc_id", "sample"]).to_dict("records")
    found = [read_trace(row, prompts.get(row["doc_id"]), work, tokenizer, context, seed) for row in ordered]
    traces = [trace for trace in found if trace is not None]
    if prompt_mismatch := len(rows) - len(traces):
        name = quote(work.task.name)
        say(
            f"task {name}: {prompt_mismatch} answers of {quote(folder)} are left out, because the answer is empty, the "
            "question has several turns, or its prompt has changed since the run."
        )
    if not traces:
        raise UserError(
            f"run {quote(folder)} has no answers with the full cache to {quote(work.task.name)} that replay can read. "
            f"{cure}"
        )
    return traces


def read_trace(
    row: Mapping[str, Any], prompt: Prompt | None, work: TaskWork, tokenizer: Any, context: int, seed: int
) -> ForcedTrace | None:
    """Return the answer of a stored row as a trace; cut it to the model's context. Returns None if `prompt` is None or
    differs from the row's prompt, the answer is empty, or the question has several turns."""
    text = row["output"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) and text else []
    if prompt is None or prompt.talk or prompt.sha256 != row["prompt_sha256"] or not ids:
        return None
    request = _request(work, prompt, seed, int(row["sample"]))
    forced = tuple(ids[: context - len(prompt.ids)])
    return ForcedTrace(request=replace(request, forced=forced), cluster=prompt.doc.cluster)


def _request(work: TaskWork, prompt: Prompt, seed: int, sample: int) -> Request:
    """Return the request for one sample of a question with one turn."""
    request = work.request(prompt, (sample,), seed)
    return replace(request, max_tokens=None, compress_at=None)
