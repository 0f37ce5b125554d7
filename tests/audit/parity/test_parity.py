"""Decisions against the published reference code, and that the comparison would notice a mistake."""

from __future__ import annotations

import json
import shutil

import pytest
from support.folders import DATA, SHARED

from kvbench.audit.parity.cases import load_cases
from kvbench.audit.parity.compare import run_case, tied
from kvbench.audit.parity.variants import VARIANTS, CasePlan, NotCoveredError, plans, recent, valued
from kvbench.cli.commands.audit_parity import audit_parity
from kvbench.errors import UserError

HERE = DATA / "parity"
WHOLE = SHARED / "parity" / "open"  # the full collection, where it is at hand
RECENT = SHARED / "parity" / "open-2026"  # and that of methods published later
CASES = {case.name: case for case in load_cases(HERE)}
LATER = valued.VARIANTS | recent.VARIANTS  # of methods of 2025 and 2026
HELD_BACK = {("trimkv", "global_layer_wise_alpha")}  # variants of which the collection at hand has no case


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_decisions])
def test_decisions_equal_the_reference(name):
    for plan in plans(CASES[name]):
        assert all(result.equal == 1 for result in run_case(CASES[name], plan))


def test_whole_collection(capsys):
    if not WHOLE.is_dir():
        pytest.skip("the full collection is not at hand")
    code = audit_parity(WHOLE, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in document["cases"] + document["values"] if not row["equal"]] == []
    assert {entry["case"] for entry in document["not_covered"]} == {"h2o/mask_mha4_d16", "morphkv/llama_sum_gqa8x2_d16"}
    assert code == 0
    assert len(document["cases"]) >= 49
    variants = {(row["case"].split("/")[0], row["variant"]) for row in document["cases"]}
    assert variants == set(VARIANTS) - HELD_BACK - set(LATER)


@pytest.mark.parametrize("family", sorted({family for family, _ in LATER}))
def test_whole_collection_of_later_methods(family):
    if not RECENT.is_dir():
        pytest.skip("the full collection is not at hand")
    cases = [case for case in load_cases(RECENT / family) if (case.method, case.variant) not in recent.REASONS]
    assert {(case.method, case.variant) for case in cases} == {key for key in LATER if key[0] == family}
    for case in cases:
        assert all(result.equal == 1 for plan in plans(case) for result in run_case(case, plan))


MISTAKES = {
    "snapkv/decode_mqa6x1_d16_b64_w32_shortprompt": [{"compat": "none"}, {"kernel": 5}, {"window": 31}],
    "rkv/gqa8x2_d16_b96_w8": [
        {"compat": "none"}, {"lam": 0.2}, {"threshold": 0.9}, {"spare": "first"}, {"kernel": 5}, {"window": 9},
    ],
    "gkv/gkv_max_red_gqa8x2_d16_b96_w16": [
        {"form": "mean"}, {"form": "local"}, {"alpha": 1.0}, {"redundancy": False}, {"lam": 0.6}, {"norm": False},
        {"kernel": 5}, {"gamma": 1.0},
    ],
    "h2o/real_mha4_d16_hh32_r32": [{"recent": 31}, {"recent": 33}],
    "streamingllm/official_s1_r31": [{"sinks": 2}],
    "tova/kvpress_gqa8x2_d16_n300": [{"recent": 40}],
    "chunkkv/kvpress_l2_gqa4x2_d16_n110_c16": [{"chunk": 15}, {"whole": False}],
    "kvzap/kvpress_threshold_decode_l2_kv2": [{"recent": 15}, {"threshold": -4.4}],
    "kvzap/kvpress_topk_linear_kv4": [{"level": "layer"}, {"recent": 16}],
    "random_attention/random_pcap_kv3_b96_r16": [{"cap": 23}, {"prompt": "all"}, {"prompt": "none"}],
    "triattention/per_head_l2_gqa4x2_d16_b80_s32": [
        {"level": "layer_head"}, {"level": "all"}, {"normalize": False}, {"trig": False}, {"spread": False},
        {"prompt": "score"}, {"over": "max"}, {"reach": 64},
    ],
    "triattention/per_layer_head_l2_gqa6x1_d32_b64_s16": [{"group": "mean"}, {"normalize": False}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "mistake"), [(name, m) for name, ms in MISTAKES.items() for m in ms])
def test_a_wrong_option_is_noticed(name, mistake):
    plan = plans(CASES[name])[0]
    wrong = CasePlan(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, "options": plan.options | mistake})
    assert min(result.equal for result in run_case(CASES[name], wrong)) < 1


def test_a_wrong_budget_is_noticed():
    case = CASES["knorm/kvpress_mqa6x1_d32_n250"]
    assert run_case(case, CasePlan(method="knorm", budget=49))[0].equal == 1
    assert run_case(case, CasePlan(method="knorm", budget=50))[0].equal == 0


def test_ties_excuse_exchanges_at_the_cut_only():
    scores = {0: 0.9, 1: 0.5, 2: 0.5, 3: 0.5 + 1e-7, 4: 0.1}
    assert tied({0, 1}, {0, 2}, scores)
    assert tied({0, 3}, {0, 2}, scores)
    assert not tied({1, 2}, {0, 2}, scores)  # the best entry is missing
    assert not tied({0, 4}, {0, 2}, scores)
    assert not tied({0}, {0, 2}, scores)
    assert not tied({0, 9}, {0, 2}, scores)  # 9 was not ranked
    assert not tied({0, 1}, {0, 2}, None)
    assert tied({0, 1}, {0, 1}, None)


def test_after_an_exchange_the_reference_state_is_taken_over():
    """Teacher forcing starts from the file's slots, so one wrong decision does not condemn the later ones."""
    case = CASES["rkv/gqa8x2_d16_b96_w8"]
    plan = plans(case)[0]
    results = run_case(case, CasePlan(method="rkv", options=plan.options | {"lam": 0.101}, budget=plan.budget))
    assert not results[0].forced
    first_miss = next(r.step for r in results if r.exact < 1)
    assert all(r.forced == (r.step > first_miss) for r in results)


def test_document_and_exit_code(capsys, tmp_path):
    assert audit_parity(HERE, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is True
    assert {row["case"] for row in document["cases"] + document["values"]} == set(CASES)
    row = next(r for r in document["cases"] if r["case"].startswith("h2o"))
    assert (row["method"], row["budget"], row["options"], row["min_overlap"]) == ("h2o", 64, {"recent": 32}, 1.0)


def test_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert audit_parity(HERE, as_json=False) == 0
    out = capsys.readouterr().out
    assert "rkv/gqa8x2_d16_b96_w8" in out
    assert "all decisions equal up to ties" in out


def copy(name, folder, change):
    """A case with changed metadata."""
    source = HERE / f"{name}.json"
    meta = json.loads(source.read_text())
    change(meta)
    (folder / source.name).write_text(json.dumps(meta))
    shutil.copy(source.with_suffix(".safetensors"), folder)


def test_a_difference_is_reported(tmp_path, capsys):
    copy("knorm/kvpress_mqa6x1_d32_n250", tmp_path, lambda meta: meta["hyper"].update(compression_ratio=0.5))
    assert audit_parity(tmp_path, as_json=False) == 1
    assert "DECISIONS DIFFER" in capsys.readouterr().out


def test_what_is_not_covered_says_why(tmp_path, capsys):
    copy("knorm/kvpress_mqa6x1_d32_n250", tmp_path, lambda meta: meta.update(method="nosuch"))
    copy("rkv/gqa8x2_d16_b96_w8", tmp_path, lambda meta: meta["hyper"].update(retain_direction="last_percent"))
    copy("streamingllm/official_s1_r31", tmp_path, lambda meta: meta.update(format="kvbench-parity/1-values"))
    assert audit_parity(tmp_path, as_json=True) == 1  # nothing compared is nothing shown
    reasons = [entry["reason"] for entry in json.loads(capsys.readouterr().out)["not_covered"]]
    assert len(reasons) == 3
    assert all(reasons)


def test_unusable_folders(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        audit_parity(tmp_path / "nowhere", as_json=True)
    with pytest.raises(UserError, match="holds no cases"):
        audit_parity(tmp_path, as_json=True)
    (tmp_path / "x.json").write_text('{"format": "kvbench-parity/1", "method": "knorm"}')
    with pytest.raises(UserError, match="lacks 'variant'"):
        audit_parity(tmp_path, as_json=True)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match="cannot read parity case"):
        audit_parity(tmp_path, as_json=True)
    copy("streamingllm/official_s1_r31", tmp_path, lambda meta: None)
    (tmp_path / "x.json").unlink()
    (tmp_path / "official_s1_r31.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(UserError, match="cannot read the tensors"):
        audit_parity(tmp_path, as_json=True)


def test_values_are_not_decisions():
    case = CASES["knorm/kvpress_mqa6x1_d32_n250"]
    with pytest.raises(NotCoveredError):
        plans(type(case)(case.path, case.meta | {"format": "kvbench-parity/1-values"}))
