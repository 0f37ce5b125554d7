"""Plans of parity cases for KVzip. A case holds the queries with which the reference read its context a second time.

The reference decides in two modes: entries compete over the whole model ("pair") or within each head ("uniform").
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, Variants
from kvbench.eviction.api import Probe
from kvbench.lazy import torch


def _kvzip_score(case: Case) -> list[CasePlan]:
    """Return one plan per step of the case. Every step evicts from the same full cache: first in mode "pair" at each of
    the case's ratios, then in mode "uniform" at each ratio."""
    h = case.hyper
    prefix, ratios = h["prefix_len"], h["ratios"]
    case_plans = []
    for step, (level, ratio) in enumerate([("pair", r) for r in ratios] + [("head", r) for r in ratios]):
        units = case.layers * case.heads
        heads = units if level == "pair" else 1
        budget = prefix + int((case.seen[step] - prefix) * heads * ratio) // heads
        options = {"chunk": h["chunk"], "sinks": prefix, "level": level}
        kept = partial(_at_budget, entries=budget * units) if level == "pair" else Case.kept
        plan = CasePlan(method="kvzip", options=options, budget=budget, steps=(step,), probes=_repeats, kept=kept)
        case_plans.append(plan)
    return case_plans


def _repeats(case: Case, layer: int) -> Iterator[dict[str, Any]]:
    """Yield one probe per chunk of the context. A probe holds the queries and keys that the reference stored in this
    layer when it repeated the chunk."""
    total, prefix, chunk = case.seen[0], case.hyper["prefix_len"], case.hyper["chunk"]
    for index in range(case.hyper["n_chunks"]):
        queries, keys = (case.tensors[f"rep_{name}.{index}.{layer}"] for name in "qk")
        positions = torch.arange(total, total + queries.shape[1])[None]
        start = prefix + index * chunk
        yield {
            "probe": Probe(tokens=(), span=(start, min(start + chunk, total))),
            "queries": queries[None],
            "query_positions": positions,
            "probe_keys": keys[None],
            "probe_positions": positions,
        }


def _at_budget(case: Case, step: int, entries: int) -> list[set[int]]:
    """Return the reference's kept sets, changed so that together they hold exactly `entries` entries.

    The next best entries are added, or the worst removed. The reference may keep another number of entries for two
    reasons. Let n be the reference's budget for the whole model. The reference keeps only entries that score above the
    n-th best entry, and fewer than n entries may do so. And n need not be a multiple of the number of heads, while
    kvbench gives every head the same budget.
    """
    kept, prefix = case.kept(step), case.hyper["prefix_len"]
    scores = case.tensors[f"aux.score.{step}"]  # [units, tokens after the prefix]
    ranked = [divmod(i, scores.shape[1]) for i in scores.flatten().argsort(descending=True).tolist()]
    while sum(map(len, kept)) < entries:
        unit, token = next((u, t + prefix) for u, t in ranked if t + prefix not in kept[u])
        kept[unit].add(token)
    while sum(map(len, kept)) > entries:
        unit, token = next((u, t + prefix) for u, t in reversed(ranked) if t + prefix in kept[u])
        kept[unit].remove(token)
    return kept


VARIANTS: Variants = {("kvzip", "kvzip_score"): _kvzip_score}
