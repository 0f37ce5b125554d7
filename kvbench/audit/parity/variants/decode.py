"""Plans of parity cases for methods that evict while decoding, and for simple methods such as StreamingLLM and TOVA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants.case_plan import CasePlan, NotCoveredError, Variants, kvpress_budget, kvpress_plans


def _snapkv_rkv_repo(case: Case) -> list[CasePlan]:
    h = case.hyper
    options = {"variant": "rkv", "window": h["window_size"], "kernel": h["kernel_size"]}
    return _reference_and_sorted("snapkv-decode", h, options)


def _rkv_rkv_repo(case: Case) -> list[CasePlan]:
    h = case.hyper
    spare = h.get("retain_direction", "last")
    if spare not in ("last", "first"):
        raise NotCoveredError(f"rkv's option `spare` has no value for the reference's retain_direction {spare!r}")
    options = {"window": h["window_size"], "kernel": h["kernel_size"], "lam": h["mix_lambda"], "spare": spare}
    reference, in_text_order = _reference_and_sorted("rkv", h, options)
    return [reference, in_text_order] if spare == "last" else [reference]  # "first" always spares slot 0, a defect


def _reference_and_sorted(method: str, hyper: dict[str, Any], options: dict[str, Any]) -> list[CasePlan]:
    """Return two plans: one with the option ``compat=reference``, one without this option. The first plan compares all
    steps. The second compares only steps in which the reference's cache is in text order."""
    budget = hyper["budget"]
    return [
        CasePlan(method=method, options={**options, "compat": "reference"}, budget=budget),
        CasePlan(method=method, options=options, budget=budget, sorted_steps=True),
    ]


def _gkv_repo(case: Case) -> list[CasePlan]:
    """Plan a case of the G-KV repository. The repository has one class for all methods: the switches of this class
    also select forms of SnapKV, R-KV and H2O."""
    h = case.hyper
    memory, redundancy = h.get("enable_score_cache", False), h.get("suppressing_redundancy", False)
    shift = h.get("attention_shift_indicator", False)
    kernel = h.get("kernel_size", 5) if h.get("enable_pooling", False) else 1
    if not (memory or redundancy or shift):
        options = {"variant": "gkv", "window": h["window_size"], "kernel": kernel}
        return [CasePlan(method="snapkv-decode", options=options, budget=h["budget"])]
    options = {"window": h["window_size"], "kernel": kernel, "redundancy": redundancy}
    if memory:
        options |= {"form": h["smooth_method"], "alpha": h["alpha"], "norm": not h.get("disable_norm", False)}
    else:
        options |= {"form": "local", "norm": False}
    if redundancy:
        # Only the repository's PyTorch similarity has the slot-0 defect, its Triton kernel does not.
        options |= {"lam": h["mix_lambda"], "compat": "none" if h.get("triton_similarity", True) else "reference"}
    if shift:
        options["gamma"] = h["gamma"]
    states = {"memory": "score_cache"} if memory else {}
    prompt_memory = h.get("init_from_prefill", False)
    return [CasePlan(method="gkv", options=options, budget=h["budget"], states=states, prompt_memory=prompt_memory)]


def _h2o_real_drop(case: Case) -> list[CasePlan]:
    h = case.hyper
    budget = h["hh_size"] + h["recent_size"]
    options = {"recent": h["recent_size"]}
    return [CasePlan(method="h2o", options=options, budget=budget, every_token=True, states={"acc": "hh_score"})]


def _h2o_prefill(case: Case) -> list[CasePlan]:
    h = case.hyper
    group = case.tensors["q"].shape[1] // case.tensors["k"].shape[1]
    options = {"recent": h["window_size"]}
    if h.get("gqa_score_agg", "mean") == "max" and group > 1:
        options |= {"reduce_g": "max", "group": group}
    return [CasePlan(method="h2o", options=options, budget=h["max_capacity_prompt"])]


def _streaming(case: Case, sizes: Callable[[Case, dict[str, Any]], tuple[int, int]]) -> list[CasePlan]:
    """Plan a StreamingLLM case. sizes: returns the number of sinks and the budget, given a case and its
    hyperparameters."""
    sinks, budget = sizes(case, case.hyper)
    return [CasePlan(method="streaming-llm", options={"sinks": sinks}, budget=budget)]


VARIANTS: Variants = {
    ("snapkv", "decode_rkv_repo"): _snapkv_rkv_repo,
    ("snapkv", "snapkv_form"): _gkv_repo,
    ("rkv", "r1kv"): _rkv_rkv_repo,
    ("rkv", "rkv_form"): _gkv_repo,
    **{("gkv", f"gkv_{form}"): _gkv_repo for form in ("max", "mean", "sum", "max_red", "max_red_raw", "max_pool")},
    **{("gkv", form): _gkv_repo for form in ("local_noscorecache", "attention_shift")},
    ("h2o", "h2o_real_drop"): _h2o_real_drop,
    ("h2o", "gkv_repo_sum_form"): _gkv_repo,
    ("h2o", "kvcache_factory_prefill"): _h2o_prefill,
    ("streamingllm", "official_call"): partial(
        _streaming, sizes=lambda _, h: (h["start_size"], h["start_size"] + h["recent_size"])
    ),
    ("streamingllm", "official_evict_for_space"): partial(  # evicts before `num_coming` tokens arrive
        _streaming, sizes=lambda _, h: (h["start_size"], h["start_size"] + h["recent_size"] - h["num_coming"])
    ),
    ("streamingllm", "decode_rkv_repo"): partial(_streaming, sizes=lambda _, h: (h["first_tokens"], h["budget"])),
    ("streamingllm", "kvcache_factory_prefill"): partial(  # there, every kept token outside the window is a sink
        _streaming, sizes=lambda _, h: (h["max_capacity_prompt"] - h["window_size"], h["max_capacity_prompt"])
    ),
    ("streamingllm", "kvpress_prefill"): partial(_streaming, sizes=lambda case, h: (h["n_sink"], kvpress_budget(case))),
    ("knorm", "kvpress_prefill"): kvpress_plans("knorm"),
    ("tova", "kvpress_prefill"): kvpress_plans("tova", recent=1),
}
