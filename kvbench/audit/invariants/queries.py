"""The invariant `queries`: a method sees the queries of the newest tokens, and sees them unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvbench.audit.invariants.exam import Exam, Way
from kvbench.audit.invariants.generation import TOLERANCE, evicts, relative
from kvbench.audit.invariants.trial import Trial
from kvbench.audit.outcome import Broken, NotApplicable
from kvbench.eviction.view import LayerView


@torch.inference_mode()
def queries(exam: Exam, way: Way) -> None:
    """The queries that a method sees are those of the newest tokens, as one forward pass without a cache computes them.
    This pass masks the entries that the engine had evicted at each position."""
    evicts(exam)
    trial = exam.main(way)
    compared = False
    for view, width in _shown(trial):
        for row in range(len(view.seen)):
            request, sample = trial.owner(int(view.noise_key[row]))
            where = f"{request.doc_id} prompt, layer {view.layer}, {int(view.seen[row])} tokens seen"
            _are_newest(view, row, width, where)
            at = view.query_positions[row]
            real = at >= 0  # a window may be longer than a sequence
            if not bool(real.any()):
                continue
            theirs = exam.dense(way, request, sample, masked=True).queries[view.layer][:, at[real]]
            change = relative(theirs, view.queries[row][:, real])
            if not change <= TOLERANCE:
                raise Broken(
                    f"queries at positions {int(at[real].min())} to {int(at.max())} differ from those of a pass "
                    f"without a cache by {change:.1e} (relative): {where}"
                )
            compared = True
    if not compared:
        needs = [exam.method.during(phase).needs().queries for phase in ("prefill", "decode")]
        asks = any(kind != "none" for kind in needs)
        raise NotApplicable(
            "the method never saw queries in sequences this short" if asks else "the method asks for no queries"
        )


def _shown(trial: Trial) -> Iterator[tuple[LayerView, int | None]]:
    """Yield every recorded view that shows queries of a sequence, and how many queries the method needs in it.

    Views with queries of a probe (extra tokens beside the sequence) are left out. The number of queries is the method's
    `Needs.width` if `score` received the view (only `Needs.window` if steps summed the attention of the newest
    queries), and None if `observe` received it.
    """
    for method, views in trial.seen.decisions:
        for view in views:
            if width := method.needs().window if view.newest_sums else method.needs().width:
                yield view, width
    for _, view in trial.seen.observations:
        if view.probe is None:
            yield view, None


def _are_newest(view: LayerView, row: int, width: int | None, where: str) -> None:
    count, seen = view.queries.shape[2], int(view.seen[row])
    at = view.query_positions[row].tolist()
    if width is not None and count != width:
        raise Broken(f"the method sees {count} queries, but asked for {width}: {where}")
    if at != list(range(seen - count, seen)):
        raise Broken(f"the view places queries at positions {at[0]} to {at[-1]}, which are not the newest: {where}")
