"""lagkv, criticalkv, defensivekv, caote and vase against the reference: the comparison notices mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.folders import DATA, SHARED

from kvbench.audit.parity.cases import load_cases
from kvbench.audit.parity.compare import run_case
from kvbench.audit.parity.variants import NotCoveredError, plans, valued

CASES = {case.name: case for case in load_cases(DATA / "parity")}
LAGKV, OFFICIAL = "lagkv/kvpress_kv1_d16_n240", "lagkv/official_decode_kv2_d16"
CRITICAL, ADA = "criticalkv/kvpress_mha3_d32_n100", "criticaladakv/kvpress_mha3_d16_n130"
DEFENSIVE, VASE = "defensivekv/official_l2_gqa4x2_d16_n100", "vase/l2_gqa2x1_d16_b80_r16_longprompt"

MISTAKES = {
    LAGKV: [{"value_weight": 0.0}, {"lag": 39}, {"sinks": 5}, {"cross": True}],
    OFFICIAL: [{"value_weight": 0.0}, {"sinks": 3}],
    CRITICAL: [{"rho": 0.0}, {"rho": 0.6}, {"window_in_stage1": False}, {"epsilon": 0.0}, {"ada": True}],
    ADA: [{"ada": False}, {"rho": 0.0}, {"rho": 1.0}, {"floor_alpha": 0.9}, {"window_in_stage1": False}],
    DEFENSIVE: [
        {"bias": "off"}, {"bias": "window"}, {"norm": "tokens"}, {"mass": 0.8}, {"kernel": 7}, {"forced": 0},
    ],
    "caote/engine_l2_gqa2x1_d16_b48_r8": [{"kernel": 5}, {"window": 7}, {"form": "squared"}],
    "dropkv/official_gqa6x2_d16_n140": [{"kernel": 1}, {"window": 7}, {"form": "mean", "kernel": 1}],
    VASE: [{"compat": "none"}, {"sinks": 0}, {"kernel": 1}, {"large": 13}, {"draw": False}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), [(name, m) for name, ms in MISTAKES.items() for m in ms])
def test_a_wrong_option_is_noticed(name, mistake):
    [plan] = plans(CASES[name])
    wrong = replace(plan, options=plan.options | mistake)
    assert min(result.equal for result in run_case(CASES[name], wrong)) < 1


def test_whole_collection():
    whole = SHARED / "parity" / "open-2026"
    if not whole.is_dir():
        pytest.skip("the full collection is not at hand")
    cases = [case for case in load_cases(whole) if (case.method, case.variant) in valued.VARIANTS]
    assert {(case.method, case.variant) for case in cases} == set(valued.VARIANTS)
    for case in cases:
        assert all(result.equal == 1 for plan in plans(case) for result in run_case(case, plan)), case.name


@pytest.mark.parametrize("name", [CRITICAL, ADA, DEFENSIVE])
def test_the_norms_of_values_matter(name):
    [plan] = plans(CASES[name])
    blind = replace(plan, initial={key: torch.ones_like(x) for key, x in plan.initial.items()})
    assert min(result.equal for result in run_case(CASES[name], blind)) < 1


def test_norms_equal_those_of_the_reference():
    [plan] = plans(CASES[CRITICAL])
    [norms] = plan.initial.values()
    torch.testing.assert_close(norms.flatten(0, 1), CASES[CRITICAL].tensors["aux.projected_norm.0"], rtol=1e-5, atol=0)


def test_other_noise_draws_other_entries():
    [plan] = plans(CASES[VASE])
    assert plan.draws
    assert min(result.equal for result in run_case(CASES[VASE], replace(plan, exponential=False))) < 1


def changed(name, **hyper):
    case = CASES[name]
    return replace(case, meta=case.meta | {"hyper": case.hyper | hyper})


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (changed(LAGKV, compression_ratio=0.8), "below sinks plus tail"),
        (changed(CRITICAL, compression_ratio=0.95), "below the window"),
        (changed(DEFENSIVE, compression_ratio=0.83, window_size=16), "number of entries forced to stay is negative"),
        (changed(VASE, temperature=0.5), "temperature"),
    ],
)
def test_cases_that_decide_nothing_are_not_covered(case, reason):
    with pytest.raises(NotCoveredError, match=reason):
        plans(case)


def test_stage_1_is_rounded_as_in_the_reference():
    """kvpress rounds tokens * share * rho at once: 100 * 0.408 * 0.37 is 15.1, but 40 * 0.37 is 14.8."""
    [plan] = plans(changed(CRITICAL, compression_ratio=0.592, first_stage_ratio=0.37))
    assert (plan.budget, int(plan.budget * plan.options["rho"])) == (40, 15)
    [plan] = plans(changed(CRITICAL, compression_ratio=0.592, first_stage_ratio=0.5))
    assert (plan.budget, plan.options["rho"]) == (40, 0.5)


def test_entries_beyond_the_budget_are_those_with_the_lowest_scores():
    """The reference rounds the budget of a layer's heads together down, kvbench that of each head."""
    case = CASES[DEFENSIVE]
    scores, kept = case.scores(0), case.kept(0)
    assert scores is not None
    less = valued._without_surplus(case, 0, 49)
    for heads in ((0, 1), (2, 3)):
        lost = [scores[u][token] for u in heads for token in kept[u] - less[u]]
        assert len(lost) == 2
        assert max(lost) <= min(scores[u][token] for u in heads for token in less[u])
    assert valued._without_surplus(case, 0, 50) == kept
