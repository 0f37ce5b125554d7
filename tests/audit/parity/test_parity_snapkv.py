"""Uneven budgets against the reference: wrong options are noticed, and totals above the budget are cut."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from support.folders import DATA

from kvbench.audit.parity.cases import Case, load_cases
from kvbench.audit.parity.compare import run_case
from kvbench.audit.parity.variants import NotCoveredError, plans

HERE = DATA / "parity"
CASES = {case.name: case for case in load_cases(HERE)}
ADA = "adakv/official_mean_norm1_f0.4_hq8hkv2_d16_n320"
PYRAMID = "pyramidkv/kvpress_l4_gqa4x2"
SNAPKV = "snapkv/official_prefill_hq8hkv2_d16_n320"
BASE = "snapkv(window=32, kernel=5, pool=avg"

MISTAKES = {
    ADA: [
        {"floor_alpha": 0.2}, {"normalize": False}, {"rounding": "exact"}, {"floor": "guarantee", "rounding": "exact"},
        {"base": f"{BASE}, reduce_g=max)"}, {"base": "snapkv(window=32, kernel=5)"},
    ],
    PYRAMID: [{"beta": 10}, {"rounding": "exact"}, {"rounding": "official"}, {"kernel": 7}, {"pool": "max"}],
    SNAPKV: [{"pool": "max"}, {"kernel": 7}, {"window": 31}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), [(name, m) for name, ms in MISTAKES.items() for m in ms])
def test_a_wrong_option_is_noticed(name, mistake):
    plan = plans(CASES[name])[0]
    wrong = dataclasses.replace(plan, options=plan.options | mistake)
    assert min(result.equal for result in run_case(CASES[name], wrong)) < 1


def made(name, sizes, **hyper):
    """A case of which the reference kept, by its own scores, so many entries of every unit."""
    case = CASES[name]
    changed = Case(case.path, case.meta | {"hyper": case.hyper | hyper})
    scores, total = case.scores(0), case.seen[0]
    window = changed.hyper["window_size"]
    kept = []
    for size, unit in zip(sizes, scores):
        older = sorted((token for token in unit if token < total - window), key=unit.get, reverse=True)
        kept.append(torch.tensor(sorted(older[: size - window] + list(range(total - window, total)))))
    offsets = torch.tensor([0, *itertools.accumulate(map(len, kept))])
    vars(changed)["tensors"] = case.tensors | {"kept.0": torch.cat(kept), "kept_off.0": offsets}
    return changed


def test_what_rounding_adds_above_the_budget_is_not_expected():
    """Two heads with 3 entries above the budget give 1.5 each; the earlier one keeps the remainder."""
    case = CASES[ADA]
    [plan] = plans(case)
    mean = plan.budget
    [cut] = plans(made(ADA, [mean + 21, mean - 18]))
    assert [len(unit) for unit in cut.kept(made(ADA, [mean + 21, mean - 18]), 0)] == [mean + 20, mean - 20]
    same = made(ADA, [mean + 21, mean - 22])
    assert plans(same)[0].kept(same, 0) == same.kept(0)


def test_layers_are_cut_alike_in_all_heads():
    """104 entries a layer; the reference has 190 + 132 + 76 + 22 of 416."""
    case = made(PYRAMID, [190, 190, 132, 132, 76, 76, 22, 22])
    got = [len(unit) for unit in plans(case)[0].kept(case, 0)]
    assert got == [189, 189, 131, 131, 75, 75, 21, 21]


def test_shares_that_are_no_whole_number():
    """kvpress keeps 104.26 entries a layer here and rounds the layers of that; 104 give less."""
    case = made(PYRAMID, [188, 188, 132, 132, 77, 77, 21, 21], compression_ratio=0.599)
    [plan] = plans(case)
    assert plan.budget == 104
    assert all(result.equal == 1 for result in run_case(case, plan))
    case = made(PYRAMID, [188, 188, 132, 132, 77, 77, 21, 21], compression_ratio=0.901)
    with pytest.raises(NotCoveredError, match="gives all layers 25"):
        plans(case)


@pytest.mark.parametrize(
    ("name", "hyper", "why"),
    [
        (SNAPKV, {"pooling": "median"}, "pooling"),
        (SNAPKV, {"kernel_size": 4}, "even"),
        (SNAPKV, {"gqa_score_agg": "min"}, "reduction"),
        (PYRAMID, {"compression_ratio": 0.98}, "arbitrary"),
        (ADA, {"pyram_mode": True}, "layers"),
    ],
)
def test_what_is_not_covered_says_why(name, hyper, why):
    case = CASES[name]
    with pytest.raises(NotCoveredError, match=why):
        plans(Case(case.path, case.meta | {"hyper": case.hyper | hyper}))


def test_skipped_layers_are_snapkv():
    case = CASES[ADA]
    [plan] = plans(Case(case.path, case.meta | {"hyper": case.hyper | {"skip": 1}}))
    assert (plan.method, plan.options["window"]) == ("snapkv", 32)
