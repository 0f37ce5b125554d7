"""Makes the row of a finished sample: settings, score and usage, in the columns of `kvbench.store.schema.COLUMNS`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from kvbench.errors import bare, quote
from kvbench.records import Generation, Usage
from kvbench.runner import env
from kvbench.runner.workload import PlannedRow, make_method
from kvbench.store.schema import OK, UNSCORED, as_stored
from kvbench.task import Output, Score, Task

if TYPE_CHECKING:
    from kvbench.runner.cell import CellPlan

MEASURED = tuple(f.name for f in fields(Usage) if f.name not in ("prompt_tokens", "output_tokens", "budget_entries"))
# Columns that a scorer may fill with `Score.facts`.
FACTS = ("verdict", "passed_lcb", "passed_native", "sandbox_tier", "sandbox_selftest", "python_version", "judge")
ROUNDING = 1e-9  # by which a computed score may exceed 0 or 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The finished generation of one planned sample, ready to be scored and stored as its row."""

    planned: PlannedRow
    generation: Generation
    cell_plan: CellPlan
    device_bytes_peak: int | None  # most bytes allocated on the GPU in this cell so far; None on a CPU

    @property
    def output_tokens(self) -> int:
        usage = self.generation.usage
        return usage.output_tokens if usage else len(self.generation.token_ids)

    def output(self) -> Output:
        """Return the sample's text and facts in the form that a task's method `score` takes."""
        return Output(
            text=self.generation.text,
            turns=self.generation.turns,
            stop_reason=self.generation.stop_reason,
            prompt_tokens=len(self.planned.prompt.ids),
            output_tokens=self.output_tokens,
            thinking=self.planned.prompt.thinking,
        )


def make_row(answer: Answer, score: Score | None, task: Task, host: dict[str, str]) -> dict[str, Any]:
    """Return the row of a finished sample. score: what the task's scorer returned; if the generation failed, there is
    no score, and the row has no score columns."""
    planned, generation, cell_plan = answer.planned, answer.generation, answer.cell_plan
    cell, doc = cell_plan.cell, planned.prompt.doc
    usage = generation.usage
    budget = planned.identity["budget"]
    row = {
        **planned.identity,
        **host,
        "row_key": planned.key,
        "method_source": cell_plan.source,
        "cluster_id": doc.cluster,
        "category": doc.meta.get("category"),
        "slots": cell_plan.plan.slots,
        "slots_planned": cell_plan.planned_slots,
        "oom_retries": cell_plan.oom_retries,
        "device_bytes_planned": cell_plan.plan.peak_bytes,
        "device_bytes_peak": answer.device_bytes_peak,
        "decode_bounded": make_method(cell).decode_bounded,
        "status": generation.status,
        "note": generation.note or None,
        "stop_reason": generation.stop_reason or None,
        "prompt_tokens": len(planned.prompt.ids),
        **_images(planned.prompt.pictures),
        "output_tokens": answer.output_tokens,
        "floor": None if budget is None else task.floor(budget, planned.identity["interval"]),
        "score_pass": 0,
        "kvbench_version": env.version("kvbench"),
        "torch_version": env.version("torch"),
        "transformers_version": env.version("transformers"),
        "machine_load": env.load(),
    }
    row |= _usage(usage, cell_plan.plan.limit) if usage else {}
    return row | scored(score) if generation.status == OK else row


def _images(pictures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row's columns about the images of its question; {} for a question without images."""
    if not pictures:
        return {}
    return {"images": len(pictures), "image_tokens": sum(p["tokens"] for p in pictures), "image_list": list(pictures)}


def scored(score: object) -> dict[str, Any]:
    """Return the row's columns that depend on the score. score: what the task's scorer returned.

    If the score has no value, all these columns are null except status, note and the scorer's facts. If a row cannot
    hold what the scorer returned, such as a value of NaN or 85, an unknown fact, or None in place of a `Score`, the
    status is "grader_error", and the note says why.
    """
    try:
        columns = _score_columns(score)
        for name, value in columns.items():
            as_stored(name, value)
    except Exception as error:  # a task's code may return anything
        return _score_columns(Score(value=None, note=f"the scorer's result cannot be stored: {bare(error)}"))
    return columns


def _score_columns(score: object) -> dict[str, Any]:
    """Return the columns of `scored`. Raises an exception for some of the results that a row cannot hold."""
    if not isinstance(score, Score):
        raise TypeError(f"it is {quote(score)}, not a Score")
    given = {"value": score.value, "strict": score.strict, "partial": score.partial}
    for name, value in given.items():
        if value is not None and _share(value) is None:
            raise ValueError(f"{name} is {quote(value)}, not a number from 0 to 1")
    if score.value is None and score.status not in UNSCORED:
        raise ValueError(f"status is {quote(score.status)}, not {', '.join(UNSCORED)}")
    if unknown := [name for name in score.facts if name not in FACTS]:
        raise ValueError(f"no column for facts is named {quote(unknown[0])}")
    shown = score if score.value is not None else Score(value=None)
    aux = dict(shown.aux)
    no_answer = aux.pop("no_answer", None)
    return {
        "status": OK if score.value is not None else score.status,
        "note": score.note or None,
        "extracted": shown.extracted,
        "score": _share(shown.value),
        "score_strict": _share(shown.strict),
        "score_partial": _share(shown.partial),
        "aux": aux or None,
        "no_answer": None if no_answer is None else float(no_answer) >= 1,  # below 1 it is a share of turns
        **score.facts,
    }


def _share(value: object) -> float | None:
    """Return a scorer's value as a number from 0 to 1; None for any other value.

    True and False count as 1 and 0; a text is never a number. A value outside the range by a rounding error only, such
    as a mean of 1.0000000000000002, becomes 0 or 1.
    """
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return min(1.0, max(0.0, number)) if -ROUNDING <= number <= 1 + ROUNDING else None


def _usage(usage: Usage, limit: float) -> dict[str, Any]:
    """Return the row's columns on usage: seconds, entries, bytes and speeds.

    limit: the most tokens per second that the plan expects of the machine. The column roofline_share is
    tokens_per_second divided by `limit`.

    The engine decodes many samples at once, and divides the time of each step equally among them. A sample's seconds
    are the sum of its shares. tokens_per_second is the sample's tokens divided by its seconds of decoding and evicting.
    It therefore states the speed of the whole engine, not of one slot. The first token, which comes from reading the
    prompt, is not counted.
    """
    busy = usage.decode_seconds + usage.evict_seconds
    rate = (usage.output_tokens - 1) / busy if busy > 0 and usage.output_tokens > 1 else None
    return {
        **{name: getattr(usage, name) for name in MEASURED},
        "tokens_per_second": rate,
        "roofline_share": rate / limit if rate is not None else None,
    }
