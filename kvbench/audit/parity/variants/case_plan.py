"""The plan by which kvbench repeats a parity case: method, options, budget, and the steps to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.eviction.rope import Rope
from kvbench.lazy import torch


@dataclass(frozen=True, kw_only=True)
class CasePlan:
    """How kvbench repeats one parity case: the method, its options and budget, and which decisions to compare.

    `states` maps the name of a method's column to the name under which the file stores the reference's values.
    """

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    budget: int | None
    due: Callable[[float, int], bool] | None = None  # (entries held, tokens seen) -> whether to evict; None: trigger
    until: int | None = None  # compare only steps with at most this many tokens seen
    rest: str = ""  # why the other steps are not compared
    every_token: bool = False  # the reference is called after every token; the file stores some of the calls
    states: dict[str, str] = field(default_factory=dict)
    prompt_memory: bool = False  # G-KV's memory starts with the attention that the prompt's own queries pay
    sorted_steps: bool = False  # compare only steps with `Case.in_text_order`, each from the reference's state
    prompt_len: int = 0  # 0: the tokens seen at the first step
    prefix: int = 0  # tokens that the method observes before the first step
    initial: Mapping[str, torch.Tensor] = field(default_factory=dict)  # first values of columns, [L, H, T]
    resume: Callable[[int], Mapping[str, float]] | None = None  # number of evictions -> states from which a step starts
    rope: Rope | None = None  # set if the file holds queries before RoPE
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)  # in place of the file of `Method.weights`
    steps: tuple[int, ...] = ()  # compare only these steps, each from the reference's state; empty: all
    probes: Callable[[Case, int], Iterable[dict[str, Any]]] | None = None  # fields of a layer's view, per probe
    draws: bool = False  # `LayerView.noise` returns the file's noise instead of a hash
    exponential: bool = False  # the file's noise is -log u; `LayerView.noise` returns u
    kept: Callable[[Case, int], list[set[int]]] = Case.kept  # or kept sets corrected to an exact budget
    scores: Callable[[Case, int], list[dict[int, float]] | None] = Case.scores  # or scores stored under other names


class NotCoveredError(Exception):
    """Raised for a parity case that kvbench cannot repeat; the message is the reason."""


Variants = dict[tuple[str, str], Callable[[Case], list[CasePlan]]]


def kvpress_budget(case: Case) -> int:
    """Return the budget of a kvpress case: tokens * (1 - compression_ratio), rounded down, at least 1."""
    return max(1, int(case.seen[0] * (1 - case.hyper["compression_ratio"])))


def kept_prompt(case: Case) -> int:
    """Return the number of first prompt tokens that Random Attention's code protects in its modes "..._pp"."""
    h = case.hyper
    return int(min(h["prefill"], h["token_budget"] - h["residual_length"] - 1))


def kvpress_plans(method: str, **options: Any) -> Callable[[Case], list[CasePlan]]:
    return lambda case: [CasePlan(method=method, options=options, budget=kvpress_budget(case))]
