"""Hybrids by command: budgets and bytes of `walk` and `chain`, and methods with tables and trained weights."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from support import zoo
from support.methods import small, with_tables

from kvbench.cli.app import main
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base, save_weights
from kvbench.engine.reference import KeptHistory
from kvbench.records import Request
from kvbench.store import read_rows

BUDGET, INTERVAL, NEW = 48, 8, 24
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
ASK = (
    f"run --task walk/orbit-100,chain --limit 1 --samples 1 --budget {BUDGET} --interval {INTERVAL} "
    f"--max-new-tokens {NEW} --dtype float32 --slots 2 --run-name r --json -q --method"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    changes = {"text_config": {"num_hidden_layers": len(KINDS), "layer_types": KINDS}}
    return zoo.repository(tmp_path_factory.mktemp("hybrid") / "model", zoo.configuration("qwen3_5", changes))


@pytest.fixture(scope="module")
def loaded(folder):
    torch.set_num_threads(1)
    return with_tables(load(str(folder), device="cpu", dtype="float32"))


def asked(capsys, *more):
    capsys.readouterr()
    code = main([*ASK, *more])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if code == 0 else None, err


def test_entries_stay_within_the_budget_and_bytes_are_those_planned(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ask = "full,gkv,snapkv+gkv,ada-kv", "--model", str(folder)
    code, plan, err = asked(capsys, *ask, "--dry-run")
    assert code == 0, err
    code, _, err = asked(capsys, *ask)
    assert code == 0, err
    rows = read_rows(tmp_path / "results/r")
    assert (rows["status"] == "ok").all()
    assert set(rows["task"]) == {"walk/orbit-100", "chain"}
    evicted = rows[rows["method"] != "full"]
    assert (evicted.groupby("method")["evictions"].max() > 0).all()
    assert (evicted["entries_after_evict"].dropna() <= BUDGET).all()
    bounded = evicted[evicted["decode_bounded"]]
    assert set(bounded["method"]) == {"gkv", "snapkv+gkv"}
    assert (bounded["entries_peak"] <= BUDGET + INTERVAL).all()
    planned = {(cell["task"], cell["method"]): cell["slot_bytes"] for cell in plan["plan"]}
    for row in rows.to_dict("records"):
        slot = planned[row["task"], row["method"]]
        assert abs(row["kv_bytes_slot"] - slot) <= 0.05 * slot
        assert 0 < row["state_bytes"] < row["kv_bytes_peak"] <= 1.05 * slot


def kept(loaded, name, folder):
    """Return [(layer, positions that each head keeps)] of one prompt, with weights or tables of `folder`."""
    history = KeptHistory()
    model, sizes = dataclasses.replace(loaded, folder=folder), {"interval": INTERVAL, "slots": 1, "max_tokens": 120}
    engine = Engine(model, small(name), budget=BUDGET, **sizes, log=history)
    ids = tuple(torch.randint(3, 250, (80,), generator=torch.Generator().manual_seed(1)).tolist())
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=ids, max_new_tokens=1)]))
    return [(layer, [h.tolist() for h in heads]) for of in history.events.values() for _, layer, heads in of]


def changed(loaded, name, folder, layers, change):
    """Write the weights of a method anew, with `change` applied to the rows of these layers; return the folder."""
    kind, tensors = small(name).weights().kind, load_file(loaded.folder / f"{name}.safetensors")
    for tensor in tensors.values():
        if tensor.ndim > 1 and len(tensor) == len(KINDS):  # a row per layer of the model
            tensor[layers] = change(tensor[layers])
    folder.mkdir()
    config = loaded.model.config
    save_weights(folder / f"{kind}.safetensors", kind, tensors, Base(name="random", config=config), made={})
    return folder


@pytest.mark.parametrize("name", ["headkv", "duo", "retention", "trimkv", "foresightkv"])
def test_row_i_of_a_table_or_of_weights_is_that_of_layer_i(loaded, name, tmp_path):
    """Rows of layers that keep a state are never read."""
    before = kept(loaded, name, loaded.folder)
    assert {layer for layer, _ in before} == {1, 3}

    def turned(rows):
        return rows.flip(0)  # those of one layer for the other's

    linear, full = ([i for i, kind in enumerate(KINDS) if kind.startswith(what)] for what in ("linear", "full"))
    assert kept(loaded, name, changed(loaded, name, tmp_path / "linear", linear, turned)) == before
    assert kept(loaded, name, changed(loaded, name, tmp_path / "full", full, turned)) != before


def test_the_important_layer_of_a_table_keeps_more(loaded, tmp_path):
    for best in (1, 3):
        empty = changed(loaded, "headkv", tmp_path / f"0-{best}", [0, 1, 2, 3], torch.zeros_like)
        model = dataclasses.replace(loaded, folder=empty)
        table = changed(model, "headkv", tmp_path / f"{best}", [best], torch.ones_like)
        counts = {layer: sum(map(len, heads)) for layer, heads in kept(loaded, "headkv", table)}
        assert counts[best] > 1.5 * counts[4 - best]
        assert sum(counts.values()) == 4 * BUDGET


def test_an_adapter_for_layers_without_attention_is_refused_in_a_line(folder, loaded, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tensors = load_file(loaded.folder / "lookaheadkv.safetensors")
    assert {name.split(".")[1] for name in tensors if name.startswith("A.")} == {"1", "3"}
    wrong = tensors | {f"{part}.0.q_proj": tensors[f"{part}.1.q_proj"].clone() for part in "AB"}
    base = Base(name="random", config=loaded.model.config)
    for name, some in (("right", tensors), ("wrong", wrong)):
        save_weights(tmp_path / f"{name}.safetensors", "lookaheadkv", some, base, made={})
        more = "--method-opt", f"lookaheadkv.lookahead={name}.safetensors", "--model", str(folder), "--run-name", name
        code, _, err = asked(capsys, "lookaheadkv", *more)
        if name == "right":
            assert code == 0, err
        else:
            assert code == 3
            [line] = [line for line in err.splitlines() if line.startswith("error: ")]
            assert "'0.q_proj', which this model does not have" in line
