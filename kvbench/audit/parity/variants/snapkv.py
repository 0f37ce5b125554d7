"""Plans of parity cases for SnapKV, and for PyramidKV and Ada-KV, which use SnapKV's scores with uneven budgets.

The released code rounds the budgets of heads or layers, so their sum may exceed the budget. kvbench drops the surplus,
because no run may exceed its budget; `_within` drops the same surplus (the entries with the lowest scores) from the
reference's kept sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants, kvpress_budget
from kvbench.eviction.choose import make
from kvbench.eviction.terms.shares import split_exactly
from kvbench.lazy import torch

POOLING = {"avgpool": "avg", "maxpool": "max"}


def _options(case: Case, reduce_g: str) -> dict[str, Any]:
    h = case.hyper
    pool = POOLING.get(h.get("pooling", "avgpool"))  # kvpress has no hyperparameter `pooling`; it averages
    if pool is None:
        raise NotCoveredError(f"snapkv has no option for the reference's pooling {h['pooling']!r}")
    if reduce_g not in ("mean", "max"):
        raise NotCoveredError(f"snapkv has no option for the reference's reduction {reduce_g!r} over the group")
    if h["kernel_size"] % 2 == 0:
        raise NotCoveredError(
            "the reference pools scores over an even number of entries, which shifts each score to another entry"
        )
    heads = "query" if case.meta["units"].get("of", "").startswith("query_head") else "kv"
    return {"window": h["window_size"], "kernel": h["kernel_size"], "pool": pool, "reduce_g": reduce_g, "heads": heads}


def _snapkv_kvpress(case: Case) -> list[CasePlan]:
    """Plan a SnapKV case of kvpress. kvpress averages over the query heads of a group after pooling, kvbench before it.
    Both pool by averages, so the results are equal."""
    return [CasePlan(method="snapkv", options=_options(case, "mean"), budget=windowed_budget(case))]


def _snapkv_prefill(case: Case) -> list[CasePlan]:
    """Plan a SnapKV case of the official code (a kept set per query head) or of KVCache-Factory (one per KV head)."""
    h = case.hyper
    options = _options(case, h.get("gqa_score_agg", "mean"))
    return [CasePlan(method="snapkv", options=options, budget=h["max_capacity_prompt"])]


def _pyramidkv_kvpress(case: Case) -> list[CasePlan]:
    """Plan a PyramidKV case of kvpress.

    The mean budget of the layers may be a fraction in kvpress; kvbench rounds it down. If the two differ, the plan cuts
    the reference's kept entries in each layer to the number that kvbench keeps there.
    """
    options = _options(case, "mean") | {"beta": case.hyper["beta"], "rounding": "kvpress"}
    budget = windowed_budget(case)
    asked = case.seen[0] * (1 - case.hyper["compression_ratio"])
    sizes = None
    if abs(asked - budget) > 1e-6:
        method: Any = make("pyramidkv", options)
        sizes = method.layer_sizes(budget, case.seen[0], case.layers)
        if len(set(sizes)) == 1 and len({len(unit) for unit in case.kept(0)}) > 1:
            raise NotCoveredError(
                f"the reference gives layers unequal numbers of entries, {asked:g} on average; kvbench rounds the mean "
                f"down to {budget} and then gives all layers {sizes[0]}"
            )
    return [_bounded(case, "pyramidkv", options, budget, sizes)]


def _pyramidkv_official(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = _options(case, h.get("gqa_score_agg", "mean")) | {"beta": h["beta"], "rounding": "official"}
    return [_bounded(case, "pyramidkv", options, h["max_capacity_prompt"])]


def _adakv_kvpress(case: Case) -> list[CasePlan]:
    options = {"base": _label(_options(case, "mean")), "floor": "guarantee", "normalize": False}
    options["floor_alpha"] = case.hyper["alpha_safeguard"]
    return [CasePlan(method="ada-kv", options=options, budget=windowed_budget(case))]


def _adakv_official(case: Case) -> list[CasePlan]:
    h = case.hyper
    inner = _options(case, h.get("gqa_func", "mean"))
    if h.get("pyram_mode"):
        raise NotCoveredError("the budgets form a pyramid over layers, and the case holds one layer only")
    if h.get("layer_idx", 0) < (h.get("skip") or 0):  # the first layers run SnapKV
        return [CasePlan(method="snapkv", options=inner, budget=h["base_capacity"])]
    options = {"base": _label(inner), "floor_alpha": h["floor_alpha"], "rounding": "official"}
    options["normalize"] = bool(h.get("normalize"))
    return [_bounded(case, "ada-kv", options, h["base_capacity"])]


def kvpress_label(case: Case) -> str:
    """Return SnapKV with the options of a kvpress case, as text ``snapkv(...)``. Methods that build on another method
    take this text as their option `base`."""
    return _label(_options(case, "mean"))


def _label(options: dict[str, Any]) -> str:
    return f"snapkv({', '.join(f'{name}={value}' for name, value in options.items())})"


def windowed_budget(case: Case) -> int:
    """Return the budget of a kvpress case with a window. Raises NotCoveredError for a budget below the window."""
    budget = kvpress_budget(case)
    if budget < case.hyper["window_size"]:
        raise NotCoveredError(
            "the budget is below the window: all entries of the window have the same score, so kvpress keeps "
            "arbitrary ones"
        )
    return budget


def _bounded(
    case: Case, method: str, options: dict[str, Any], budget: int, sizes: Sequence[int] | None = None
) -> CasePlan:
    kept = partial(_within, budget=budget, window=case.hyper["window_size"], sizes=sizes)
    return CasePlan(method=method, options=options, budget=budget, kept=kept)


def _within(case: Case, step: int, budget: int, window: int, sizes: Sequence[int] | None) -> list[set[int]]:
    """Return the reference's kept sets, one per unit (one head of one layer), cut to the budget.

    With `sizes` (entries per head of each layer), each set is cut to the size of its layer. Without `sizes`, sets are
    cut only if together they exceed the budget: in a case of one layer, all heads lose about equally many entries; in a
    case of several layers, all layers lose about equally many, and within a layer all heads exactly equally many. If
    the case has no scores, no set is cut. The newest `window` tokens always stay.
    """
    kept, scores = case.kept(step), case.scores(step)
    if scores is None:
        return kept
    held = [len(unit) for unit in kept]
    if sizes is not None:
        cut = [min(size, now) for size, now in zip(_per_head(case, sizes), held)]
    elif sum(held) <= budget * len(held):
        return kept
    elif case.layers > 1:
        cut = _per_head(case, _reduced(held[:: case.heads], budget, window))
    else:
        cut = _reduced(held, budget, window)
    newest = set(range(case.seen[step] - window, case.seen[step]))
    for unit, size, score in zip(kept, cut, scores):
        ranked = sorted((score[token], token) for token in unit - newest)
        unit.difference_update(token for _, token in ranked[: len(unit) - size])
    return kept


def _reduced(sizes: Sequence[int], mean: int, low: int) -> list[int]:
    row = torch.tensor([sizes], dtype=torch.float64)
    reduced: list[int] = split_exactly(row, mean * len(sizes), low, row.long())[0].tolist()
    return reduced


def _per_head(case: Case, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes for _ in range(case.heads)]


VARIANTS: Variants = {
    ("snapkv", "official_prefill"): _snapkv_prefill,
    ("snapkv", "kvcache_factory_prefill"): _snapkv_prefill,
    ("snapkv", "kvpress_prefill"): _snapkv_kvpress,
    ("pyramidkv", "official_prefill"): _pyramidkv_official,
    ("pyramidkv", "kvpress_prefill"): _pyramidkv_kvpress,
    ("adakv", "official_prefill"): _adakv_official,
    ("adakv", "kvpress_prefill"): _adakv_kvpress,
}
