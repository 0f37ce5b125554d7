"""Plans of parity cases for methods with weights: ForesightKV and TRIM-KV, whose weights come from the case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants
from kvbench.eviction.terms.published_checkpoints import SCORERS, scorer


def _foresightkv_training(case: Case) -> list[CasePlan]:
    """Plan a case of ForesightKV's training code: it reads `budget` tokens, then evicts every `window_size` tokens."""
    h = case.hyper
    states = {"cumulative": "cumsum", "decayed": "cumsum_decay"}
    return [_foresightkv(case, h["budget"], states, prefix=h["budget"], recent=h["window_size"])]


def _foresightkv_evaluation(case: Case) -> list[CasePlan]:
    """Plan a case of ForesightKV's evaluation code. The method sums attention over chunks of queries. This code counts
    all queries as one chunk until the cache first holds as many entries as the budget."""
    h = case.hyper
    lengths = [min(step["cache_len"]) for step in case.meta["steps"]]
    first = next((seen for seen, held in zip(case.seen, lengths) if held >= h["budget"]), case.seen[-1])
    states = {"cumulative": "attn_acc", "decayed": "attn_acc_decay"}
    return [_foresightkv(case, first, states, recent=h["length"], compat="reference")]


def _foresightkv(case: Case, prompt_len: int, states: dict[str, str], prefix: int = 0, **options: Any) -> CasePlan:
    weights = {name: case.tensors[f"weights.{name.replace('.', '_')}"] for name in SCORERS}
    return CasePlan(
        method="foresightkv",
        options={"features": "released8", "sampling": False} | options,
        budget=case.hyper["budget"],
        prefix=prefix,
        prompt_len=prompt_len,
        weights=scorer([weights]),
        scores=_drop_scores,
        states=states,
        resume=lambda evictions: {"chunk": evictions + 1.0},  # the file's sums include the newest chunk
    )


def _drop_scores(case: Case, step: int) -> list[dict[int, float]]:
    """Return the reference's scores of entries, negated: the reference drops the highest, kvbench keeps the highest."""
    slots = [slots for layer in case.slots(step) for slots in layer]
    scores = (-case.tensors[f"aux.drop_score.{step}"].double()).tolist()
    return [dict(zip(tokens.tolist(), row)) for tokens, row in zip(slots, scores)]


def _trimkv_local(case: Case) -> list[CasePlan]:
    return [_trimkv(case, "trimkv", {"recent": case.hyper.get("sliding_window_size", 0)})]


def _trimkv_global(case: Case) -> list[CasePlan]:
    h = case.hyper
    plan = _trimkv(case, "retention", {"level": "layer" if "layer_wise" in h["strategy"] else "model"})
    floor = h.get("floor_budget_ratio", 0.0)
    if not floor or plan.options["level"] == "layer":  # the code ignores the floor if each layer competes alone
        return [plan]
    plan.options["floor"] = floor
    return [replace(plan, steps=tuple(range(len(case.seen))), kept=_floored, scores=_worths)]


def _floored(case: Case, step: int) -> list[set[int]]:
    """Return the reference's kept sets with two mistakes of its code corrected.

    Each head must keep at least a given number of entries, the floor. The reference's code counts each head's first
    entry as an entry of the previous head. The code also rounds down both the floor and the rest of the budget, so it
    may keep fewer entries than the budget allows.
    """
    h, kept, worths = case.hyper, case.kept(step), _worths(case, step)
    slots = [slots.tolist() for layer in case.slots(step) for slots in layer]
    total, sure = len(kept) * h["memory_size"], int(h["memory_size"] * h["floor_budget_ratio"])
    ranked = [sorted(own, key=lambda token: (own[token], token), reverse=True) for own in worths]
    overall = sorted(((worths[u][token], u, token) for u, own in enumerate(slots) for token in own), reverse=True)
    best = {(u, token) for _, u, token in overall[: int(total * (1 - h["floor_budget_ratio"]))]}
    for unit in range(1, len(kept)):
        if (unit, slots[unit][0]) in best:
            kept[unit - 1].remove(min(kept[unit - 1], key=worths[unit - 1].__getitem__))
            kept[unit].add(next(token for token in ranked[unit] if token not in kept[unit]))
    while sum(map(len, kept)) < total:
        # A head's next entry competes with the score of the entry `sure` ranks above it.
        open_ = [u for u in range(len(kept)) if len(kept[u]) < len(ranked[u])]
        unit = max(open_, key=lambda u: worths[u][ranked[u][len(kept[u]) - sure]])
        kept[unit].add(next(token for token in ranked[unit] if token not in kept[unit]))
    return kept


def _worths(case: Case, step: int) -> list[dict[int, float]]:
    """Return the score of each entry, computed by the reference's formula. Cases with a floor (a smallest number of
    entries that each head must keep) need this: their files hold no scores."""
    seen, scores = case.seen[step], []
    for layer, units in enumerate(case.slots(step)):
        for head, slots in enumerate(units):
            worth = (seen + 1 - slots) * case.tensors["log_beta"].view(case.layers, case.heads, -1)[layer, head, slots]
            if "knorm" in case.hyper["strategy"]:
                worth = worth + case.tensors["k"][layer, head, slots].norm(dim=-1).log()
            scores.append(dict(zip(slots.tolist(), worth.tolist())))
    return scores


def _trimkv(case: Case, method: str, options: dict[str, Any]) -> CasePlan:
    h = case.hyper
    if not all(all(case.kept(step)) for step in range(len(case.seen))):
        raise NotCoveredError("the reference leaves a head without entries; kvbench keeps at least one in every head")
    full, strict = h["memory_size"] + h["buffer_size"], "layer_wise" in h["strategy"]

    def due(held: float, seen: int) -> bool:
        return held > full if strict else held >= full

    options |= {"age_offset": 1, "knorm": "knorm" in h["strategy"]}
    initial = {"log_beta": case.tensors["log_beta"].view(case.layers, case.heads, -1)}
    return CasePlan(method=method, options=options, budget=h["memory_size"], due=due, initial=initial)


VARIANTS: Variants = {
    ("foresightkv", "training_loop_topk"): _foresightkv_training,
    ("foresightkv", "eval_deterministic_topk"): _foresightkv_evaluation,
    **{("trimkv", f"local_{scores}"): _trimkv_local for scores in ("alpha", "knorm_alpha")},
    **{("trimkv", f"global_{scores}"): _trimkv_global for scores in ("alpha", "knorm_alpha", "layer_wise_alpha")},
}
