"""Converts a training's trace into a trace of `kvbench.replay`."""

from __future__ import annotations

from kvbench.records import Request
from kvbench.replay.traces import ForcedTrace
from kvbench.train.traces import Trace


def forced(trace: Trace, seed: int = 0) -> ForcedTrace:
    """Return a training's trace as a replay trace, its answer forced. seed: of the method's random draws."""
    request = Request(
        task="train",
        doc_id=trace.name,
        prompt_ids=trace.prompt,
        forced=trace.answer,
        max_new_tokens=len(trace.answer),
        seed=seed,
    )
    return ForcedTrace(request=request, cluster=trace.name)
