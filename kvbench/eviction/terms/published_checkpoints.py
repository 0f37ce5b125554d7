"""Converts published checkpoints to kvbench's gates, scorers and surrogates.

    ngocbh/trimkv           model.layers.N.self_attn.retention_gate.linear1.weight ...
    RUCAIBox/ForesightKV    model.layers.N.self_attn.judge_model.fc1.weight ...
    nvidia/KVzap-...        layers.N.0.weight ... with a hidden layer, layers.N.weight ... without

ForesightKV's layer norm over features is left out: the released code never applies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvbench.eviction.terms.gates import Gate
from kvbench.lazy import torch

Layers = list[dict[str, torch.Tensor]]  # per layer: tensors by the name after `retention_gate.` or `judge_model.`

GATE, SCORER, SURROGATE = "retention_gate", "judge_model", "surrogate"
SURROGATE_NAMES = re.compile(r"^layers\.([0-9]{1,9})\.((?:[02]\.)?(?:weight|bias))$")
NAMES = re.compile(rf"(?:^|\.)layers\.([0-9]{{1,9}})\.self_attn\.({GATE}|{SCORER})\.(.+)$")
# Gate -> {released name: ours}; the last linear layer and the bias are the projection out.
GATES: dict[Gate, dict[str, str]] = {
    "rg": {"linear1.weight": "in.weight", "linear1.bias": "in.bias", "linear2.weight": "out.weight"},
    "rg2": {"linear1.weight": "kv.weight", "linear1.bias": "kv.bias", "linear2.weight": "out.weight"},
    "rg3": {"gate_proj.weight": "kv_gate.weight", "up_proj.weight": "kv_up.weight", "down_proj.weight": "out.weight"},
    "rg10": {
        "linear1.weight": "in.weight",
        "linear1.bias": "in.bias",
        "linear2.weight": "mid.weight",
        "linear2.bias": "mid.bias",
        "linear3.weight": "out.weight",
    },
}
SCORERS = {"fc1.weight": "w1", "fc1.bias": "b1", "fc2.weight": "w2", "fc2.bias": "b2"}
SURROGATES: dict[str, dict[str, str]] = {  # form -> {released name: ours}
    "mlp": {"0.weight": "in.weight", "0.bias": "in.bias", "2.weight": "out.weight", "2.bias": "out.bias"},
    "linear": {"weight": "out.weight", "bias": "out.bias"},
}
UNUSED = ("feature_norm.weight", "feature_norm.bias")


def wanted(names: Iterable[str], module: str) -> dict[str, tuple[int, str]]:
    """Select the names of tensors that belong to `module` (GATE, SCORER or SURROGATE); return each with its layer and
    its name inside the module."""
    if module == SURROGATE:
        return {name: (int(m[1]), m[2]) for name in names if (m := SURROGATE_NAMES.match(name))}
    matches = ((name, NAMES.search(name)) for name in names)
    return {name: (int(m[1]), m[3]) for name, m in matches if m is not None and m[2] == module}


def dimensions(module: str, name: str) -> int | None:
    """Return the number of dimensions of a released tensor; None for an unknown name. A scorer has one network per KV
    head, so its tensors have one dimension more than a gate's."""
    if module == SCORER:
        return {name: 3 if name.endswith("weight") else 2 for name in SCORERS}.get(name)
    if module == SURROGATE:
        return {"weight": 2, "bias": 1}[name.rpartition(".")[2]]
    names = {released for layers in GATES.values() for released in layers} | {"bias"}
    return {name: 2 if name.endswith("weight") else 1 for name in names}.get(name)


def gate_kinds(layer: Mapping[str, torch.Tensor]) -> list[Gate]:
    """Return the kinds of gate whose released tensors have the names in `layer`. The tensors of rg and rg2 have the
    same names, so these names give both kinds."""
    return [gate for gate, names in GATES.items() if layer.keys() == names.keys() | {"bias"}]


def gates(layers: Layers, gate: Gate) -> dict[str, torch.Tensor]:
    """Return a gate's tensors in kvbench's layout. A last projection that is equal in all layers is stored once."""
    tensors = {ours: torch.stack([layer[name] for layer in layers]) for name, ours in GATES[gate].items()}
    tensors["out.bias"] = torch.stack([layer["bias"] for layer in layers])
    shared = ("out.weight", "out.bias")
    if len(layers) > 1 and all(bool((tensors[name] == tensors[name][:1]).all()) for name in shared):
        tensors |= {name: tensors[name][0] for name in shared}
    return tensors


def scorer(layers: Layers) -> dict[str, torch.Tensor]:
    """Return a scorer's tensors in kvbench's layout."""
    tensors = {ours: torch.stack([layer[name] for layer in layers]) for name, ours in SCORERS.items()}
    return tensors | {name: tensors[name][..., 0] for name in ("w2", "b2")}  # one output


def surrogate(layers: Layers) -> tuple[str, dict[str, torch.Tensor]] | None:
    """Return a surrogate's form, mlp or linear, and its tensors in kvbench's layout; None if it has neither form."""
    form = next((form for form, names in SURROGATES.items() if names.keys() == layers[0].keys()), None)
    if form is None:
        return None
    return form, {ours: torch.stack([layer[name] for layer in layers]) for name, ours in SURROGATES[form].items()}
