"""Plans of parity cases for methods that read values: LagKV, CriticalKV, DefensiveKV, CAOTE, DropKV, VaSE."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants, kept_prompt, kvpress_budget
from kvbench.audit.parity.variants.snapkv import kvpress_label, windowed_budget
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.value_norm import VALUE_NORM, projected_norms, shares
from kvbench.lazy import torch


def _lagkv_kvpress(case: Case) -> list[CasePlan]:
    h, budget = case.hyper, kvpress_budget(case)
    sinks, lag, rest = h["n_sink"], h["lag_size"], case.seen[0] - h["n_sink"]
    if budget < sinks + lag + (rest % lag if rest >= 2 * lag else 0):
        raise NotCoveredError(
            "the budget is below sinks plus tail: kvpress keeps an arbitrary part of both, kvbench refuses such "
            "a budget"
        )
    options = {"sinks": h["n_sink"], "lag": h["lag_size"], "cross": h["cross_scoring"]}
    return [CasePlan(method="lagkv", options=options, budget=budget)]


def _lagkv_official(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = {"form": "rate", "sinks": h["sink_size"], "lag": h["lag_size"], "keep": h["ratio"]}
    return [CasePlan(method="lagkv", options=options | {"value_weight": h["score_v_ratio"]}, budget=None)]


def _norms(case: Case) -> torch.Tensor:
    """Return the norms of projected values, [layers, heads, tokens], from the values and the projection matrices that
    the file holds."""
    norms = []
    for layer in range(case.layers):
        values, matrix = case.tensors["v"][layer][None], case.tensors["wo"][layer]  # [1, H, T, d], [D, Hq d]
        by_head = matrix.T.unflatten(0, (-1, values.shape[-1]))
        new = NewTokens(layer=layer, hidden=values, keys=values, values=values, layer_weights={"o_proj": by_head})
        norms.append(projected_norms(new)[0])
    return torch.stack(norms)


def _criticalkv(case: Case) -> list[CasePlan]:
    h, budget = case.hyper, windowed_budget(case)
    asked = case.seen[0] * (1 - h["compression_ratio"])  # like the reference, round down only in the next line
    first = int(asked * h["first_stage_ratio"])
    options = {"base": kvpress_label(case), "epsilon": h["epsilon"], "rho": h["first_stage_ratio"]}
    if int(budget * options["rho"]) != first:
        options["rho"] = (first + 0.5) / budget
    return [CasePlan(method="criticalkv", options=options, budget=budget, initial={VALUE_NORM.name: _norms(case)})]


def _criticaladakv(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = {"base": kvpress_label(case), "epsilon": h["epsilon"], "rho": h["first_stage_ratio"], "ada": True}
    options["floor_alpha"] = h["alpha_safeguard"]
    budget = windowed_budget(case)
    return [CasePlan(method="criticalkv", options=options, budget=budget, initial={VALUE_NORM.name: _norms(case)})]


def _defensivekv(case: Case) -> list[CasePlan]:
    h, total = case.hyper, case.seen[0]
    budget, share, window = windowed_budget(case), 1 - h["compression_ratio"], h["window_size"]
    limit = int((total - window) * share - window)
    if limit < 0:
        raise NotCoveredError(
            "the limit on the number of entries forced to stay is negative: the reference keeps arbitrary entries"
        )
    options = {"window": window, "kernel": h["kernel_size"], "forced": limit}
    options["level"] = "model" if case.variant.startswith("layer") else "layer"
    initial, kept = {VALUE_NORM.name: shares(_norms(case), dim=1)}, partial(_without_surplus, budget=budget)
    return [CasePlan(method="defensivekv", options=options, budget=budget, initial=initial, kept=kept)]


def _without_surplus(case: Case, step: int, budget: int) -> list[set[int]]:
    """Return the entries that the reference kept in each head. If heads that share a budget keep more than kvbench's
    budget allows, leave out their worst entries.

    The reference may keep more than kvbench, because it rounds down the budget of all heads together, while kvbench
    rounds down the budget of each head. If the case has no scores, no entry is left out.
    """
    kept, scores = case.kept(step), case.scores(step)
    size = len(kept) if case.variant.startswith("layer") else case.heads  # units that share a budget
    for group in (range(first, first + size) for first in range(0, len(kept), size)):
        ranked = sorted((scores[u][token], token, u) for u in group for token in kept[u]) if scores else []
        surplus = max(0, sum(len(kept[u]) for u in group) - budget * len(group))
        for _, token, unit in ranked[:surplus]:
            kept[unit].remove(token)
    return kept


def _engine(case: Case, method: str, options: dict[str, Any], **more: Any) -> list[CasePlan]:
    """Plan a case of VaSE's engine: while decoding, it evicts when the number of entries held is a multiple of the
    window and exceeds the budget."""
    h = case.hyper
    window, budget, prompt = h["residual_length"], h["token_budget"], h["prefill"]

    def due(held: float, seen: int) -> bool:
        return seen > prompt and held > budget and held % window == 0

    options = {"window": window} | options
    return [CasePlan(method=method, options=options, budget=budget, due=due, every_token=True, **more)]


def _caote(case: Case) -> list[CasePlan]:
    options = {"kernel": 5 if case.hyper["smooth"] else 1}
    if case.hyper["mode"].endswith("_pp"):
        options["sinks"] = kept_prompt(case)
    return _engine(case, "caote", options)


def _vase(case: Case) -> list[CasePlan]:
    h = case.hyper
    if h.get("temperature", 1) != 1:
        raise NotCoveredError(f"vase has no option for the reference's temperature {h['temperature']}")
    draws = "sample" in h["mode"]
    options = {"large": h.get("n_large", 0), "kernel": 5 if h["smooth"] else 1, "draw": draws, "compat": "reference"}
    options["sinks"] = h.get("n_sink", 0) if "sink" in h["mode"] else 0
    if h["mode"].endswith("_pp"):  # another repository, which sorts its entries
        options |= {"sinks": kept_prompt(case), "large": kept_prompt(case) + options["large"], "compat": "none"}
    return _engine(case, "vase", options, draws=draws, exponential=True)


def _dropkv(case: Case) -> list[CasePlan]:
    h = case.hyper
    budget = max(int(h["keep_ratio"] * case.seen[0]), h["window_size"], 1)
    options = {"form": "squared", "window": h["window_size"], "kernel": h["kernel_size"]}
    return [CasePlan(method="caote", options=options, budget=budget)]


VARIANTS: Variants = {
    ("lagkv", "kvpress_prefill"): _lagkv_kvpress,
    ("lagkv", "official_decode"): _lagkv_official,
    ("criticalkv", "kvpress_prefill"): _criticalkv,
    ("criticaladakv", "kvpress_prefill"): _criticaladakv,
    ("defensivekv", "defensivekv_prefill"): _defensivekv,
    ("defensivekv", "layer_defensivekv_prefill"): _defensivekv,
    ("caote", "engine_caote"): _caote,
    ("caote", "engine_caote_pp"): _caote,
    ("dropkv", "official_prefill"): _dropkv,
    ("vase", "vase_range_sink_sample_attn"): _vase,
    ("vase", "vase_range_attn"): _vase,
    ("random_attention", "range_sink_sample_attn_pp"): _vase,
    ("random_attention", "attn_pp"): _vase,
}
