"""Trained methods against the reference: mistakes in options, features, labels and gates are noticed."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from support.folders import DATA

from kvbench.audit.parity import values as parity_values
from kvbench.audit.parity.cases import Case, load_cases
from kvbench.audit.parity.compare import run_case
from kvbench.audit.parity.values import FAR, values
from kvbench.audit.parity.variants import NotCoveredError, learned, plans
from kvbench.cli.commands.audit_parity import audit_parity
from kvbench.eviction.terms import foresight

HERE = DATA / "parity"
CASES = {case.name: case for case in load_cases(HERE)}
TRAINING, FLOOR, KNORM = "foresightkv/train_mqa3x1_d16", "trimkv/global_floor", "trimkv/global_knorm"

MISTAKES = {
    TRAINING: [{"recent": 15}, {"compat": "reference"}, {"sampling": True}],
    "trimkv/local_alpha_sw": [{"recent": 0}, {"recent": 7}, {"age_offset": 0}, {"knorm": True}, {"horizon": 64}],
    FLOOR: [{"floor": 0.0}, {"floor": 0.5}, {"floor": 9.0}, {"level": "layer"}],
    KNORM: [{"knorm": False}, {"age_offset": 20}, {"level": "layer"}, {"floor": 0.5}],
}


@pytest.mark.parametrize(("name", "mistake"), [(name, m) for name, ms in MISTAKES.items() for m in ms])
def test_a_wrong_option_is_noticed(name, mistake):
    [plan] = plans(CASES[name])
    wrong = dataclasses.replace(plan, options=plan.options | mistake)
    assert min(result.equal for result in run_case(CASES[name], wrong)) < 1


def test_a_chunk_that_begins_elsewhere_is_noticed():
    [plan] = plans(CASES[TRAINING])
    assert min(result.equal for result in run_case(CASES[TRAINING], dataclasses.replace(plan, prefix=0))) < 1


@pytest.mark.parametrize("name", [TRAINING, KNORM])
def test_every_step_can_start_from_the_state_of_the_file(name):
    case = CASES[name]
    [plan] = plans(case)
    forced = dataclasses.replace(plan, steps=tuple(range(1, len(case.seen))), prefix=0)
    results = run_case(case, forced)
    assert len(results) == len(case.seen) - 1
    assert all(result.forced and result.exact == 1 for result in results)


VALUES = {
    TRAINING: {
        "attention features", "drop score", "golden scores", "golden evictions",
        "ranking loss, margin 0.01", "ranking loss, margin 0.5",
    },
    "foresightkv/grpo_loss": {"policy loss", "divergence"},
    "trimkv/gate_rg": {
        "rg log_beta", "rg2 log_beta", "rg3 log_beta", "decay", "occupancy", "occupancy hinge", "gated attention",
    },
    "trimkv/local_alpha_sw": {"score"},
    FLOOR: set(),
    KNORM: {"score"},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_equal_the_reference(name):
    found = values(CASES[name])
    assert {result.value for result in found} == VALUES[name]
    assert all(result.equal and result.numbers > 0 for result in found)


def spoiled(name, **tensors):
    """A case whose file says something else."""
    case = CASES[name]
    changed = Case(case.path, case.meta)
    vars(changed)["tensors"] = case.tensors | tensors
    return changed


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [
        (TRAINING, "aux.attn_info.3", "attention features"),
        (TRAINING, "golden_scores", "golden scores"),
        (TRAINING, "rank_loss_margin0.5", "ranking loss, margin 0.5"),
        ("foresightkv/grpo_loss", "kl_mean", "divergence"),
        ("trimkv/gate_rg", "rg3.up_proj.weight", "rg3 log_beta"),
        ("trimkv/gate_rg", "attn.output", "gated attention"),
        (KNORM, "score.2", "score"),
    ],
)
def test_another_value_is_noticed(name, tensor, value):
    x = CASES[name].tensors[tensor].clone()
    x.view(-1)[0] *= 1.01
    changed = {result.value for result in values(spoiled(name, **{tensor: x})) if not result.equal}
    assert changed == {value}


def test_what_cannot_be_compared_is_far_off():
    case = spoiled("foresightkv/grpo_loss", loss=torch.zeros(2), kl_mean=torch.tensor([float("nan")]))
    assert {result.error for result in values(case)} == {FAR}


def test_values_that_differ_are_told(tmp_path, capsys, monkeypatch):
    for name in ("foresightkv/grpo_loss", "trimkv/local_alpha_sw"):
        for path in CASES[name].path.parent.glob(f"{CASES[name].path.stem}.*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert audit_parity(tmp_path, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["case"] for row in document["values"]} == {"foresightkv/grpo_loss", "trimkv/local_alpha_sw"}
    assert {row["case"] for row in document["cases"]} == {"trimkv/local_alpha_sw"}
    monkeypatch.setattr(parity_values, "policy_loss", lambda *_, **__: (torch.zeros(1), torch.zeros(1)))
    monkeypatch.setenv("COLUMNS", "160")
    assert audit_parity(tmp_path, as_json=False) == 1
    assert "VALUES DIFFER" in capsys.readouterr().out


def test_the_decayed_sum_is_not_the_plain_one(monkeypatch):
    """The released training decays by 0.9 at every eviction; its evaluation does not."""
    monkeypatch.setattr("kvbench.methods.foresightkv.DECAY", 1.0)
    assert not all(result.equal for result in values(CASES[TRAINING]))
    assert foresight.DECAY == 0.9


def evaluation(**changes):
    """The training case told as one of the evaluation: the prompt reaches the budget at a later step."""
    case = CASES[TRAINING]
    hyper = case.hyper | {"length": 16, "prefill": 60, "chunk": 16}
    steps = [step | {"cache_len": [length]} for step, length in zip(case.meta["steps"], (60, 92, 112, 112))]
    meta = case.meta | {"variant": "eval_deterministic_topk", "hyper": hyper, "steps": steps} | changes
    made = Case(case.path, meta)
    vars(made)["tensors"] = case.tensors
    return made


def test_the_evaluation_counts_from_the_budget_on():
    [plan] = plans(evaluation())
    assert plan.prompt_len == CASES[TRAINING].seen[2]
    assert plan.options == {"features": "released8", "recent": 16, "sampling": False, "compat": "reference"}


def test_entries_that_rounding_leaves_to_nobody_go_to_the_next_best():
    """The reference kept 240 entries; for a budget of 41 a head there are 246."""
    case = CASES[FLOOR]
    larger = Case(case.path, case.meta | {"hyper": case.hyper | {"memory_size": 41}})
    vars(larger)["tensors"] = case.tensors
    before, after = case.kept(0), learned._floored(larger, 0)
    assert (sum(map(len, before)), sum(map(len, after))) == (240, 246)
    worths = learned._worths(case, 0)
    for kept, worth in zip(after, worths):
        assert kept == set(sorted(worth, key=worth.__getitem__)[-len(kept) :])


def test_a_head_without_entries_is_not_covered():
    case = CASES[KNORM]
    offsets = case.tensors["kept_off.1"].clone()
    offsets[1] = 0
    with pytest.raises(NotCoveredError, match="leaves a head without entries"):
        plans(spoiled(KNORM, **{"kept_off.1": offsets}))
