"""cake, morphkv, rpc, duo, expected attention: the comparison notices mistakes, and says what it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from support.folders import DATA

from kvbench.audit.parity.cases import load_cases
from kvbench.audit.parity.compare import run_case
from kvbench.audit.parity.variants import NotCoveredError, plans
from kvbench.cli.commands.audit_parity import audit_parity

HERE = DATA / "parity"
CASES = {case.name: case for case in load_cases(HERE)}
MORPHKV = "morphkv/mistral_sum_mqa6x1_d16"

MISTAKES = {
    "cake/l4_mha2_d16_casc": [
        {"gamma": 49.0}, {"tau1": 1.0}, {"tau2": 1.0}, {"kernel": 7}, {"rounding": "exact"}, {"compat": "none"},
        {"window": 9},
    ],
    MORPHKV: [{"voters": 8}, {"fuse": "max"}, {"form": "llama"}],
    "rpc/group_mqa4x1_max": [{"compat": "none"}, {"kernel": 7}, {"pool": "avg"}, {"selectors": "new"}, {"R": 7}],
    "duo_attention/l2h8": [{"sinks": 5}, {"recent": 31}, {"sparsity": 0.3}],
    "expected_attention/kvpress_gqa8x2_d16_n300": [
        {"n_future": 64}, {"sinks": 3}, {"covariance": False}, {"vnorm": False}, {"epsilon": 0.1},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), [(name, m) for name, ms in MISTAKES.items() for m in ms])
def test_a_wrong_option_is_noticed(name, mistake):
    [plan] = plans(CASES[name])
    assert min(result.equal for result in run_case(CASES[name], plan)) == 1
    wrong = replace(plan, options=plan.options | mistake)
    assert min(result.equal for result in run_case(CASES[name], wrong)) < 1


def test_a_wrong_rotation_is_noticed():
    case = CASES["expected_attention/kvpress_gqa8x2_d16_n300"]
    [plan] = plans(case)
    assert plan.rope is not None
    slower = replace(plan.rope, frequencies=plan.rope.frequencies / 2)
    assert run_case(case, replace(plan, rope=slower))[0].equal < 1


def test_cake_whose_prompt_stays_whole_is_not_covered():
    case = CASES["cake/l4_mha2_d16_casc"]
    short = replace(case, meta=case.meta | {"hyper": case.hyper | {"prefill": 64}})
    with pytest.raises(NotCoveredError, match="the prompt is too short: the reference keeps the whole prompt"):
        plans(short)


def as_llama(folder, first):
    """The Mistral case, whose queries are grouped, under the other name. `first`: tokens seen at its second step."""
    meta = json.loads(CASES[MORPHKV].path.read_text())
    meta["variant"] = "morphkv_llama"
    meta["steps"][1]["seen"] = first
    (folder / "case.json").write_text(json.dumps(meta))
    save_file(load_file(CASES[MORPHKV].path.with_suffix(".safetensors")), folder / "case.safetensors")
    [case] = load_cases(folder)
    return case


def test_morphkv_misaligned_steps_are_left_out_with_a_reason(tmp_path, capsys):
    """Only the first eviction of the Llama file is judged where queries are grouped."""
    case = as_llama(tmp_path, 121)
    [plan] = plans(case)
    assert plan.until == 121
    assert [result.step for result in run_case(case, plan)] == [0, 1]
    assert audit_parity(tmp_path, as_json=True) == 1  # the decisions are those of the other file
    [row] = json.loads(capsys.readouterr().out)["cases"]
    assert row["steps"] == 2
    assert "second eviction" in row["steps_not_judged"]


def test_morphkv_without_its_first_eviction_is_not_covered(tmp_path):
    case = as_llama(tmp_path, 130)
    with pytest.raises(NotCoveredError, match="the first eviction, at token 121, is not in the file"):
        plans(case)
