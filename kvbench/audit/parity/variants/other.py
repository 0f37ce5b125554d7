"""Plans of parity cases for cake, morphkv, rpc, duo, keydiff and expected-attention."""

from __future__ import annotations

from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants, kvpress_budget, kvpress_plans
from kvbench.eviction.rope import Rope
from kvbench.lazy import torch


def _cake(case: Case) -> list[CasePlan]:
    h = case.hyper
    if h["prefill"] <= h["cache_size"] + h["window_size"]:
        raise NotCoveredError(
            "the prompt is too short: the reference keeps the whole prompt and sets no budgets for the layers"
        )
    options = {"window": h["window_size"], "tau1": h["tau1"], "tau2": h["tau2"], "gamma": h["gamma"]}
    options |= {"rounding": "official", "decode": True, "compat": "reference", "cascade": h["cascading"]}
    return [CasePlan(method="cake", options=options, budget=h["cache_size"], every_token=True)]


def _morphkv(case: Case) -> list[CasePlan]:
    h = case.hyper
    llama = case.variant == "morphkv_llama"
    fuse = h["morph_type"].removesuffix("_fused")
    options: dict[str, Any] = {"window": h["window_size"], "fuse": fuse, "form": "llama" if llama else "mistral"}
    if not llama:
        options["voters"] = h["window_size"] - 1  # the reference stores the newest query and does not count it
    capacity, prompt = h["max_capacity"], h["prefill"]

    def due(held: float, seen: int) -> bool:  # only while decoding, above a share `evict_after` of the capacity
        return seen > prompt and held - 1 > capacity * h["evict_after"]

    more: dict[str, Any] = {}
    if llama and case.tensors["q"].shape[1] > case.heads:
        first = max(prompt, int(capacity * h["evict_after"]) + 1) + 1
        reason = (
            "with grouped queries, the Llama code drops other tokens from its logits than from its keys, so logits "
            "and keys no longer match from the second eviction on"
        )
        if first not in case.seen:
            raise NotCoveredError(f"{reason}; the first eviction, at token {first}, is not in the file")
        more = {"until": first, "rest": reason}
    return [CasePlan(method="morphkv", options=options, budget=capacity + 1, every_token=True, due=due, **more)]


def _rpc(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = {"form": "native", "P": h["P"], "R": h["R"], "c": float(h["c"]), "compat": "reference"}
    options |= {"kernel": h["kernel_size"], "pool": h["pooling"].removesuffix("pool")}
    options |= {"aggregate": h["aggregation"], "selectors": h["selectors"]}
    return [CasePlan(method="rpc", options=options, budget=None, prompt_len=h["prompt_len"], scores=_rpc_scores)]


def _rpc_scores(case: Case, step: int) -> list[dict[int, float]]:
    """Return, for each head, the reference's scores of all generated tokens except the newest ones.

    The case's hyperparameter R is the number of these newest tokens. If the file has one list of scores only, the list
    applies to all heads.
    """
    h = case.hyper
    rows = case.tensors[f"aux.score.{step}"].double().expand(case.heads, -1)
    tokens = [slots[h["prompt_len"] : -h["R"]].tolist() for layer in case.slots(step) for slots in layer]
    return [dict(zip(t, row.tolist())) for t, row in zip(tokens, rows)]


def _duo(case: Case) -> list[CasePlan]:
    h = case.hyper
    units = case.layers * case.heads
    share = round(units * h["head_compression_ratio"]) / units  # kvpress rounds the number of heads
    options = {"sinks": h["sink_size"], "recent": h["recent_size"], "sparsity": share}
    return [CasePlan(method="duo", options=options, budget=None, weights={"alpha": case.tensors["head_scores"]})]


def _expected_attention(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = {"n_future": h["n_future_positions"], "sinks": h["n_sink"], "epsilon": h["epsilon"]}
    options |= {"covariance": h["use_covariance"], "vnorm": h["use_vnorm"]}
    d = case.tensors["q"].shape[-1]
    rope = Rope(1e4 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d))  # the cases' notes: theta 10000, half-split
    return [CasePlan(method="expected-attention", options=options, budget=kvpress_budget(case), rope=rope)]


VARIANTS: Variants = {
    ("cake", "cake_prefill_then_decode"): _cake,
    ("morphkv", "morphkv_llama"): _morphkv,
    ("morphkv", "morphkv_mistral"): _morphkv,
    ("rpc", "rpc_all"): _rpc,
    ("rpc", "rpc_group"): _rpc,
    ("duo_attention", "kvpress_duo"): _duo,
    ("keydiff", "kvpress_prefill"): kvpress_plans("keydiff"),
    ("expected_attention", "kvpress_prefill"): _expected_attention,
}
