"""A training's trace in the form that `kvbench.replay` reads."""

from __future__ import annotations

from kvbench.records import Request
from kvbench.replay import traces as replayed
from kvbench.train.traces import Trace


def forced(trace: Trace, seed: int = 0) -> replayed.Trace:
    """The trace with its answer forced. seed: of the method's draws."""
    request = Request(
        task="train",
        doc_id=trace.name,
        prompt_ids=trace.prompt,
        forced=trace.answer,
        max_new_tokens=len(trace.answer),
        seed=seed,
    )
    return replayed.Trace(request=request, cluster=trace.name)
