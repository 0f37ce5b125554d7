"""Plans of parity cases for methods of 2025 and 2026: ChunkKV, KVzap, Random Attention, TriAttention."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants, kept_prompt, kvpress_budget
from kvbench.audit.parity.variants.snapkv import kvpress_label
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.rope import Rope
from kvbench.eviction.terms.surrogate import log_worth
from kvbench.lazy import torch


def _chunkkv(case: Case) -> list[CasePlan]:
    """Plan a ChunkKV case of kvpress. kvpress computes how many chunks to keep; the plan's budget is this number times
    the length of a chunk.

    If the case is shorter than one chunk, the plan's budget is `kvpress_budget`. Raises NotCoveredError for a budget
    below the window.
    """
    h = case.hyper
    total, length, window = case.seen[0], h["chunk_length"], h["window_size"]
    options = {"base": kvpress_label(case), "chunk": length, "whole": True}
    if total < length:  # there is no full chunk, so the base method decides alone
        return [CasePlan(method="chunkkv", options=options, budget=kvpress_budget(case))]
    runs = -(-total // length)
    kept = max(1, int(runs * (1 - h["compression_ratio"])))
    if kept < runs - (total - window) // length:
        raise NotCoveredError("the budget is below the window: kvpress drops chunks of the window, kvbench never does")
    return [CasePlan(method="chunkkv", options=options, budget=kept * length)]


def _kvzap_top(case: Case) -> list[CasePlan]:
    return [_kvzap(case, kvpress_budget(case), {"level": "head", "recent": 0})]


def _kvzap_threshold(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = {"strategy": "threshold", "threshold": h["threshold"], "recent": h["sliding_window_size"]}
    return [_kvzap(case, None, options)]


def _kvzap(case: Case, budget: int | None, options: dict[str, Any]) -> CasePlan:
    """Plan a case of kvpress's KVzap; the case's network, run by kvbench, gives the scores of all tokens."""
    initial = {"zap": predictions(case)}
    return CasePlan(method="kvzap", options=options, budget=budget, initial=initial, every_token=True)


def predictions(case: Case) -> torch.Tensor:
    """Return the scores that a KVzap case's network predicts for all tokens, [layers, KV heads, tokens]."""
    t = case.tensors
    names = {"w1": "in.weight", "b1": "in.bias", "w2": "out.weight", "b2": "out.bias"}
    names |= {"w": "out.weight", "b": "out.bias"}
    weights = {ours: t[name] for name, ours in names.items() if name in t}
    empty = torch.zeros(1, case.heads, t["x"].shape[1], 0)
    layers = (
        NewTokens(layer=i, hidden=x[None], keys=empty, values=empty, weights=weights) for i, x in enumerate(t["x"])
    )
    return torch.cat([log_worth(new) for new in layers])


def _random(case: Case, prompt: str) -> list[CasePlan]:
    """Plan a case of Random Attention. prompt: the value of the option `prompt` of the method `random`."""
    h = case.hyper
    options = {"recent": h["residual_length"], "prompt": prompt, "cap": h.get("prompt_cap", 512)}
    return [_as_engine(case, "random", options, draws=True)]


def _recency(case: Case) -> list[CasePlan]:
    """Plan a case whose reference keeps the newest tokens and the first `kept_prompt` tokens of the prompt. The plan's
    method is streaming-llm, with these prompt tokens as sinks."""
    return [_as_engine(case, "streaming-llm", {"sinks": kept_prompt(case)})]


def _as_engine(case: Case, method: str, options: dict[str, Any], **more: Any) -> CasePlan:
    h = case.hyper
    return CasePlan(method=method, options=options, budget=h["token_budget"], prompt_len=h["prefill"], **more)


def _triattention(case: Case, level: str) -> list[CasePlan]:
    """Plan a TriAttention case. level: the value of the option `level` of the method `triattention`."""
    h, t = case.hyper, case.tensors
    if h["allow_prefill_compression"] is False and h["prefill"] >= h["budget"]:
        raise NotCoveredError(
            "the prompt fills the budget: the reference cuts the prompt and drops all generated tokens"
        )
    if h["pruning_seed"] is not None:
        raise NotCoveredError("the reference adds noise to the scores")
    options = {"level": level, "reach": h["offset_max_length"], "over": h["score_aggregation"]}
    options |= {"group": h["layer_perhead_aggregation"], "normalize": h["normalize_scores"]}
    options |= {"trig": not h["disable_trig"], "spread": not h["disable_mlr"]}
    options["prompt"] = "score" if h["allow_prefill_compression"] else "keep"
    weights = {"mean": torch.cat([t["q_mean_real"], t["q_mean_imag"]], dim=-1), "modulus": t["q_abs_mean"]}
    rope = Rope(t["inv_freq"].double())
    more: dict[str, Any] = {"weights": weights, "rope": rope, "due": lambda held, seen: True}
    return [CasePlan(method="triattention", options=options, budget=h["budget"], prompt_len=h["prefill"], **more)]


PROTECTED = "the reference scores by {} and protects the prompt; in kvbench --protect, not a method, protects prompts"
REASONS = {
    ("random_attention", "attn_rkv_pp"): PROTECTED.format("the engine's R-KV"),
}
VARIANTS: Variants = {
    ("chunkkv", "kvpress_prefill"): _chunkkv,
    ("kvzap", "kvpress_topk"): _kvzap_top,
    ("kvzap", "kvpress_threshold_prefill"): _kvzap_threshold,
    ("kvzap", "kvpress_threshold_decode"): _kvzap_threshold,
    ("triattention", "official_per_head"): partial(_triattention, level="head"),
    ("triattention", "official_per_layer_head"): partial(_triattention, level="layer_head"),
    ("triattention", "official_union"): partial(_triattention, level="all"),
    ("random_attention", "random_pp"): partial(_random, prompt="all"),
    ("random_attention", "random_pcap"): partial(_random, prompt="cap"),
    ("random_attention", "recency_pp"): _recency,
}
