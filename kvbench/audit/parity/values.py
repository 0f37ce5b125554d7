"""Compares numbers that the reference code computed besides its decisions: gates, features, labels, losses.

The numbers are float32, as in the files; kvbench's numbers may differ by 1e-4 (relative) plus 1e-6 (absolute).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.compare import run_case
from kvbench.audit.parity.variants import plans
from kvbench.audit.parity.variants.recent import predictions
from kvbench.eviction.choose import make
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms import published_checkpoints
from kvbench.eviction.terms.foresight import drop_scores
from kvbench.eviction.terms.gates import log_retention
from kvbench.eviction.terms.golden import block_attention, golden_evictions
from kvbench.eviction.terms.objectives import policy_loss, ranking_loss
from kvbench.eviction.terms.retention import decay, gated_attention, occupancy
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

RELATIVE, ABSOLUTE = 1e-4, 1e-6
FAR = 1e9  # the error of tensors of different sizes, and of NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueResult:
    """How far kvbench's numbers for one recorded value of a case (for example a loss) are from the reference's.

    The comparison covers all stored steps.
    """

    value: str
    numbers: int
    error: float  # largest ratio of a number's difference to its tolerance

    @property
    def equal(self) -> bool:
        return self.error <= 1


Pairs = Iterator[tuple[str, torch.Tensor, torch.Tensor]]  # name, ours, theirs


def values(case: Case) -> list[ValueResult]:
    """Compare the numbers that a case records and kvbench can compute too; return one result per recorded value."""
    make_pairs = VALUES.get((case.method, case.variant if case.has_decisions else case.path.stem.partition("_")[0]))
    errors: dict[str, list[tuple[int, float]]] = {}
    for name, ours, theirs in make_pairs(case) if make_pairs else ():
        errors.setdefault(name, []).append((theirs.numel(), _error(ours, theirs)))
    return [
        ValueResult(value=name, numbers=sum(n for n, _ in parts), error=max(error for _, error in parts))
        for name, parts in errors.items()
    ]


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.numel() != theirs.numel():
        return FAR
    a, b = ours.double().reshape(-1), theirs.double().reshape(-1)
    share = ((a - b).abs() / (ABSOLUTE + RELATIVE * b.abs())).nan_to_num(nan=FAR).clamp_max(FAR)
    return float(share.max()) if share.numel() else 0.0


def _gates(case: Case) -> Pairs:
    t, h = case.tensors, case.hyper
    keys, cached = t["kv"][..., : h["head_dim"]], t["kv"][..., h["head_dim"] :]
    for gate in published_checkpoints.GATES:
        layer = {name.removeprefix(f"{gate}."): x for name, x in t.items() if name.startswith(f"{gate}.")}
        if (log_beta := layer.pop("log_beta", None)) is None:
            continue
        weights = published_checkpoints.gates([layer], gate)
        new = NewTokens(layer=0, hidden=t["x"], keys=keys, values=cached, weights=weights)
        yield f"{gate} log_beta", log_retention(new)[0], log_beta
    powers = next(x for name, x in t.items() if name.startswith("power_stair"))  # for the first tokens
    log_beta = t["rg.log_beta"][:, : powers.shape[-1]]
    yield "decay", decay(log_beta), powers
    alive = occupancy(log_beta, block=16)
    yield "occupancy", alive, t["summarized_retention"]
    yield "occupancy hinge", (alive - h["capacity_M"]).clamp_min(0), t["occupancy_hinge"]
    q, k, v = (t[f"attn.{name}"] for name in "qkv")
    out = gated_attention(q, k, v, log_beta[None], scaling=q.shape[-1] ** -0.5, form="scale")
    yield "gated attention", out.transpose(1, 2), t["attn.output"]


def _policy(case: Case) -> Pairs:
    t, h = case.tensors, case.hyper
    inputs = (t[name] for name in ("log_probs", "log_probs_old", "log_probs_ref", "advantages"))
    loss, divergence = policy_loss(*inputs, clip=h["clip_eps"], kl_weight=h["kl_weight"])
    yield "policy loss", loss, t["loss"]
    yield "divergence", divergence, t["kl_mean"]


def _at_decisions(case: Case, compare: Callable[[Case, Any, int, list[LayerView]], Pairs]) -> Pairs:
    """Run a case, and yield the pairs of numbers to compare. compare: makes the pairs; it is called right before each
    eviction, with the views of all layers."""
    [plan] = plans(case)
    method, pairs = make(plan.method, plan.options), list[Any]()
    run_case(case, plan, lambda step, views: pairs.extend(compare(case, method, step, views)))
    yield from pairs


def _scorer_step(case: Case, method: Any, step: int, views: list[LayerView]) -> Pairs:
    """Yield two pairs of tensors: kvbench's and the file's attention features, then kvbench's and the file's scores.

    The scorer (the method's network, which scores entries) reads the features and returns the scores. Entries are in
    the file's order.
    """
    [view] = views
    x = method.inputs(view)
    theirs = case.tensors[f"aux.drop_score.{step}"]
    order = view.positions.argsort(dim=-1)[..., : theirs.shape[-1]]
    attention = x[..., 2 * view.keys.shape[-1] :]
    ours = attention.gather(2, order[..., None].expand(-1, -1, -1, attention.shape[-1]))
    yield "attention features", ours, case.tensors[f"aux.attn_info.{step}"]
    yield "drop score", drop_scores(view.weights, 0, x).gather(-1, order), theirs


def _scorer_and_labels(case: Case) -> Pairs:
    yield from _at_decisions(case, _scorer_step)
    t, h = case.tensors, case.hyper
    interval, budget = h["window_size"], h["budget"]
    first = (1 + budget // interval) * interval
    attention = block_attention(t["q"][0], t["k"][0], interval, first, scaling=t["q"].shape[-1] ** -0.5)
    golden = golden_evictions(attention, budget, interval)
    yield "golden scores", golden.scores, t["golden_scores"]
    slots = t["golden_drop_slots"].long().sort(dim=-1).values
    yield "golden evictions", golden.dropped, golden.candidates.gather(-1, slots)
    for margin in h["margin"]:
        ours = ranking_loss(t["aux.drop_score.0"], golden.scores[0], margin)
        yield f"ranking loss, margin {margin:g}", ours, t[f"rank_loss_margin{margin:g}"]


def _retention_step(case: Case, method: Any, step: int, views: list[LayerView]) -> Pairs:
    """Yield kvbench's and the reference's scores of entries; nothing if the file has no scores for this step. Entries
    to which the reference gives an infinite score are left out."""
    ours = [scores for view in views for scores in zip(view.positions[0].tolist(), method.score(view)[0].tolist())]
    for (positions, scores), theirs in zip(ours, case.scores(step) or ()):
        mine = dict(zip(positions, scores))
        scored = [(mine.get(token, float("nan")), score) for token, score in theirs.items() if score < float("inf")]
        own, other = torch.tensor(scored, dtype=torch.float64).T
        yield "score", own, other


def _surrogate(case: Case) -> Pairs:
    """Yield the surrogate network's predictions, as kvbench computes them and as the file holds them.

    For each step whose scores the file holds there is a pair per head and layer: the predictions for the tokens in the
    reference's cache before the step. If the file also holds predictions for all tokens, a pair with these follows.
    """
    ours = predictions(case).flatten(0, 1)
    for step in range(len(case.seen)):
        for mine, theirs in zip(ours, case.scores(step) or ()):
            yield "score", mine[list(theirs)], torch.tensor(list(theirs.values()), dtype=torch.float64)
    for name in (name for name in case.tensors if name.startswith("aux.kvzap_score.")):
        yield "prediction", ours, case.tensors[name]


_retention_scores = partial(_at_decisions, compare=_retention_step)
VALUES: dict[tuple[str, str], Callable[[Case], Pairs]] = {
    ("foresightkv", "training_loop_topk"): _scorer_and_labels,
    ("foresightkv", "eval_deterministic_topk"): partial(_at_decisions, compare=_scorer_step),
    ("foresightkv", "grpo"): _policy,
    ("trimkv", "gate"): _gates,
    **{("kvzap", f"kvpress_{form}"): _surrogate for form in ("topk", "threshold_prefill", "threshold_decode")},
    **{("trimkv", f"local_{scores}"): _retention_scores for scores in ("alpha", "knorm_alpha")},
    **{("trimkv", f"global_{scores}"): _retention_scores for scores in ("alpha", "knorm_alpha", "layer_wise_alpha")},
}
