"""Published checkpoints of gates and scorers, as their repositories write them, become weights that methods load."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.weights import load_weights
from kvbench.errors import SetupError, UserError
from kvbench.eviction.choose import make
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.foresight import drop_scores
from kvbench.eviction.terms.gates import log_retention
from kvbench.eviction.terms.surrogate import log_worth
from kvbench.train.import_weights import import_weights

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 40,
    "head_dim": 16,
    "vocab_size": 99,
}
LAYERS, HEADS, WIDTH = 3, 2, 12
NEW = [torch.randn(*size, generator=torch.Generator().manual_seed(5)) for size in ((1, 5, 40), (1, 2, 5, 16))]
SIZES = {  # of a released gate: {name: (outputs, inputs)}
    "rg": {"linear1": (WIDTH, 40), "linear2": (HEADS, WIDTH)},
    "rg2": {"linear1": (WIDTH, 64), "linear2": (HEADS, WIDTH)},
    "rg3": {"gate_proj": (WIDTH, 64), "up_proj": (WIDTH, 64), "down_proj": (HEADS, WIDTH)},
    "rg10": {"linear1": (WIDTH, 40), "linear2": (WIDTH, WIDTH), "linear3": (HEADS, WIDTH)},
}


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def gate_states(gate, tied=False, layers=LAYERS, prefix="model."):
    """The state dict of a released checkpoint of gates, in bfloat16."""
    g, states = torch.Generator().manual_seed(1), {}
    for layer in range(layers):
        base = f"{prefix}layers.{layer}.self_attn.retention_gate."
        last = list(SIZES[gate])[-1]
        for name, (outputs, inputs) in SIZES[gate].items():
            states[f"{base}{name}.weight"] = torch.randn(outputs, inputs, generator=g).bfloat16()
            if gate != "rg3" and name != last:
                states[f"{base}{name}.bias"] = torch.randn(outputs, generator=g).bfloat16()
        states[f"{base}bias"] = torch.randn(HEADS, generator=g).bfloat16()
        for name in (f"{last}.weight", "bias") if tied and layer else ():
            first = f"{prefix}layers.0.self_attn.retention_gate.{name}"
            states[f"{base}{name}"] = states[first].clone()
    return states


def released_gate(gate, states, layer):
    """log beta as the released modules compute it."""

    def linear(name, x):
        base = f"model.layers.{layer}.self_attn.retention_gate.{name}"
        bias = states.get(f"{base}.bias")
        return torch.nn.functional.linear(x, states[f"{base}.weight"].float(), None if bias is None else bias.float())

    act, (hidden, keys) = torch.nn.functional.silu, NEW
    kv = torch.cat([keys, keys + 1], dim=-1).transpose(1, 2).reshape(1, 5, -1)
    if gate == "rg3":
        out = linear("down_proj", act(linear("gate_proj", kv)) * linear("up_proj", kv))
    elif gate == "rg10":
        out = linear("linear3", act(linear("linear2", act(linear("linear1", hidden)))))
    else:
        out = linear("linear2", act(linear("linear1", kv if gate == "rg2" else hidden)))
    out = out + states[f"model.layers.{layer}.self_attn.retention_gate.bias"].float()
    return torch.nn.functional.logsigmoid(out).transpose(1, 2)


@pytest.mark.parametrize("gate", SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_imported_gates_answer_as_the_released_ones(tmp_path, out, gate, tied):
    states = gate_states(gate, tied)
    torch.save(states, tmp_path / "trimkv_weights.pth")
    made = import_weights(tmp_path / "trimkv_weights.pth", "trimkv", CONFIG, "org/m", out)
    assert (made.card["made"]["gate"], made.card["made"]["tie"]) == (gate, "layers" if tied else "none")
    assert made.card["base_model"] == "org/m"
    method = make("trimkv", {"gates": str(out), "gate": gate, "tie": "layers" if tied else "none"})
    weights = load_weights(method.weights(), None, CONFIG, "cpu")
    hidden, keys = NEW
    for layer in range(LAYERS):
        new = NewTokens(layer=layer, hidden=hidden, keys=keys, values=keys + 1, weights=weights)
        torch.testing.assert_close(log_retention(new), released_gate(gate, states, layer))


def scorer_states(features, folder):
    """Two shards with a whole model around the scorers, as `save_pretrained` writes them."""
    g, inputs = torch.Generator().manual_seed(2), 32 + features * 2
    for layer in range(LAYERS):
        base = f"model.layers.{layer}.self_attn."
        sizes = {"fc1.weight": (HEADS, inputs, 16), "fc1.bias": (HEADS, 16), "fc2.weight": (HEADS, 16, 1)}
        sizes |= {"fc2.bias": (HEADS, 1), "feature_norm.weight": (inputs,), "feature_norm.bias": (inputs,)}
        shard = {f"{base}judge_model.{name}": torch.randn(size, generator=g) for name, size in sizes.items()}
        shard[f"{base}q_proj.weight"] = torch.zeros(64, 40)
        save_file(shard, folder / f"model-{layer + 1:05}-of-00003.safetensors")


@pytest.mark.parametrize(("features", "count"), [("released8", 8), ("paper6", 6)])
def test_imported_scorers_answer_as_the_released_ones(tmp_path, out, features, count):
    scorer_states(count, tmp_path)
    made = import_weights(tmp_path, "foresightkv", CONFIG, "m", out)
    assert made.options == {"features": features}
    assert len(made.card["made"]["files"]) == 3
    method = make("foresightkv", {"scorer": str(out), "features": features})
    weights = load_weights(method.weights(), None, CONFIG, "cpu")
    assert set(weights) == {"w1", "b1", "w2", "b2"}  # no layer norm, no other tensors of the model
    from safetensors.torch import load_file

    states = load_file(tmp_path / "model-00002-of-00003.safetensors")
    fc1, b1, fc2, b2 = (
        states[f"model.layers.1.self_attn.judge_model.{n}"]
        for n in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    )
    x = torch.randn(1, 7, HEADS, fc1.shape[1], generator=torch.Generator().manual_seed(0))  # their order of axes
    h = torch.nn.functional.gelu(torch.einsum("...hi,hio->...ho", x, fc1) + b1)
    theirs = (torch.einsum("...hi,hio->...ho", h, fc2) + b2)[..., 0].transpose(1, 2)
    torch.testing.assert_close(drop_scores(weights, 1, x.transpose(1, 2)), theirs)
    other = make("foresightkv", {"scorer": str(out), "features": {8: "paper6", 6: "released8"}[count]})
    with pytest.raises(SetupError, match=f"they read features={features}"):
        load_weights(other.weights(), None, CONFIG, "cpu")


@pytest.mark.parametrize("form", ["mlp", "linear"])
def test_imported_surrogates_answer_as_the_released_ones(tmp_path, out, form):
    g = torch.Generator().manual_seed(3)
    sizes = {"0": (WIDTH, 40), "2": (HEADS, WIDTH)} if form == "mlp" else {"": (HEADS, 40)}
    states = {}
    for layer in range(LAYERS):
        for name, size in sizes.items():
            base = f"layers.{layer}.{name}.".replace("..", ".")
            states[f"{base}weight"] = torch.randn(size, generator=g).bfloat16()
            states[f"{base}bias"] = torch.randn(size[0], generator=g).bfloat16()
    save_file(states, tmp_path / "model.safetensors")
    made = import_weights(tmp_path, "kvzap", CONFIG, "org/m", out)
    assert made.card["made"]["form"] == form
    weights = load_weights(make("kvzap", {"surrogate": str(out)}).weights(), None, CONFIG, "cpu")
    hidden, keys = NEW
    for layer in range(LAYERS):
        x = hidden
        for name in sizes:
            base = f"layers.{layer}.{name}.".replace("..", ".")
            x = torch.nn.functional.gelu(x) if name == "2" else x
            x = torch.nn.functional.linear(x, states[f"{base}weight"].float(), states[f"{base}bias"].float())
        new = NewTokens(layer=layer, hidden=hidden, keys=keys, values=keys, weights=weights)
        torch.testing.assert_close(log_worth(new), x.transpose(1, 2))
    with pytest.raises(SetupError, match="surrogate weights are for 3 layers x 2 KV heads; the model has 4 x 2"):
        import_weights(tmp_path, "kvzap", CONFIG | {"num_hidden_layers": 4}, "m", out)
    with pytest.raises(SetupError, match=r"in.weight is \[3, 12, 40\]|out.weight is \[3, 2, 40\]"):
        import_weights(tmp_path, "kvzap", CONFIG | {"hidden_size": 48}, "m", out)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_nothing_in_a_pickle_is_run(tmp_path, out, zipped):
    evil, mark = tmp_path / "trimkv_weights.pth", str(tmp_path / "was-run")
    states = gate_states("rg") | {"extra": Malicious(mark)}
    if zipped:
        torch.save(states, evil)
    else:
        evil.write_bytes(pickle.dumps(states, protocol=2))
    with pytest.raises(SetupError, match="kvbench ran no code from it"):
        import_weights(evil, "trimkv", CONFIG, "m", out)
    assert not Path(mark).exists()
    assert not list(out.iterdir())


def test_a_wrapped_state_dict_and_other_prefixes(tmp_path, out):
    torch.save({"state_dict": gate_states("rg10", prefix="module.model.language_model.")}, tmp_path / "x.pt")
    made = import_weights(tmp_path, "retention", CONFIG, "m", out)
    assert made.card["shapes"]["mid.weight"] == [LAYERS, WIDTH, WIDTH]


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"num_hidden_layers": 4}, "gate weights are for 3 layers x 2 KV heads; the model has 4 x 2"),
        ({"num_key_value_heads": 4}, "gate weights are for 3 layers x 2 KV heads; the model has 3 x 4"),
        ({"hidden_size": 48}, "in.weight is .3, 12, 40.; this model needs .3, 12, 48."),
    ],
)
def test_gates_of_another_model_are_refused(tmp_path, out, config, match):
    torch.save(gate_states("rg10"), tmp_path / "x.pth")
    with pytest.raises(SetupError, match=match):
        import_weights(tmp_path, "retention", CONFIG | config, "m", out)


def test_scorers_of_another_model_are_refused(tmp_path, out):
    scorer_states(8, tmp_path)
    for change, match in (
        ({"num_hidden_layers": 2}, "scorer weights are for 3 layers x 2 KV heads; the model has 2 x 2"),
        ({"head_dim": 20}, r"48 numbers per entry; a scorer for this model reads 52 \(paper6\) or 56 \(released8\)"),
    ):
        with pytest.raises(SetupError, match=match):
            import_weights(tmp_path, "foresightkv", CONFIG | change, "m", out)


def test_what_is_no_checkpoint_is_refused(tmp_path, out):
    def refused(match, source, kind="trimkv"):
        with pytest.raises(SetupError, match=match):
            import_weights(source, kind, CONFIG, "m", out)

    refused("does not exist", tmp_path / "nowhere")
    refused("holds no file that ends in one of .safetensors", tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 30)
    refused("cannot be read", tmp_path)
    (tmp_path / "a.safetensors").unlink()
    torch.save([1, 2], tmp_path / "a.pth")
    refused("holds no dictionary of named tensors", tmp_path)
    torch.save({"model.embed.weight": torch.zeros(2)}, tmp_path / "a.pth")
    refused("holds no tensors named", tmp_path)
    torch.save(gate_states("rg"), tmp_path / "a.pth")
    refused("holds no tensors named .*judge_model", tmp_path, "foresightkv")
    states = gate_states("rg")
    del states["model.layers.1.self_attn.retention_gate.bias"]
    torch.save(states, tmp_path / "a.pth")
    refused("the tensors of layer 1 differ in names or shapes from those of layer 0", tmp_path)
    torch.save({f"{name}.x": tensor for name, tensor in gate_states("rg").items()}, tmp_path / "a.pth")
    refused("are not those of a known gate", tmp_path)
    torch.save(gate_states("rg"), tmp_path / "a.pth")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_act": "gelu"}))
    refused("only silu gates", tmp_path)


def test_a_gate_that_could_be_two_asks_which(tmp_path, out):
    """Hidden states, and keys and values of all heads, are of one size in some models."""
    same = CONFIG | {"hidden_size": 64}
    torch.save(gate_states("rg2"), tmp_path / "x.pth")
    with pytest.raises(UserError, match="Give --gate rg or --gate rg2"):
        import_weights(tmp_path, "trimkv", same, "m", out)
    made = import_weights(tmp_path, "trimkv", same, "m", out, gate="rg2")
    assert made.card["made"]["gate"] == "rg2"
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"retention_gate": "rg", "memory_size": 128}}))
    made = import_weights(tmp_path, "trimkv", same, "m", out).card["made"]
    assert (made["gate"], made["memory_size"]) == ("rg", 128)


def test_a_given_gate_counts_more_than_the_checkpoint_s(tmp_path, out):
    torch.save(gate_states("rg2"), tmp_path / "x.pth")
    (tmp_path / "config.json").write_text(json.dumps({"retention_gate": "rg"}))
    for gate in ("rg2", "rg"):
        made = import_weights(tmp_path, "trimkv", CONFIG | {"hidden_size": 64}, "m", out, gate=gate)
        assert made.card["made"]["gate"] == gate


def test_gates_that_fit_neither_kind_are_of_another_model(tmp_path, out):
    torch.save(gate_states("rg2"), tmp_path / "x.pth")
    with pytest.raises(SetupError, match=r"reads 64 numbers .* reads 48 \(rg\) or 128 \(rg2\)\. Give weights that"):
        import_weights(tmp_path, "trimkv", CONFIG | {"hidden_size": 48, "head_dim": 32}, "m", out)


def tiny_gates(folder):
    """Gates for the built-in model: 4 layers, 2 heads, hidden size 128."""
    sizes = {"linear1.weight": (8, 128), "linear1.bias": (8,), "linear2.weight": (8, 8), "linear2.bias": (8,)}
    sizes |= {"linear3.weight": (2, 8), "bias": (2,)}
    names = {
        f"model.layers.{i}.self_attn.retention_gate.{name}": size for i in range(4) for name, size in sizes.items()
    }
    torch.save({name: torch.zeros(size) for name, size in names.items()}, folder / "trimkv_weights.pth")


def test_the_command_writes_weights_and_says_how_to_use_them(tmp_path, capsys):
    tiny_gates(tmp_path)
    out = tmp_path / "gates"
    arguments = ["weights", "import", str(tmp_path), "--model", "tiny", "--out", str(out)]
    assert main([*arguments, "--method", "dbtrimkv", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 layers x 2 heads, gate rg10, tie layers, width 8" in lines[0]
    assert f"--method retention --method-opt retention.gates={out} --model tiny" in lines[1]
    document = json.loads(lines[-1])
    assert document["options"] == {"gates": str(out)}
    assert document["made"]["files"].keys() == {"trimkv_weights.pth"}
    config = json.loads((tiny.path() / "config.json").read_text())
    assert load_weights(make("retention", {"gates": str(out)}).weights(), None, config, "cpu")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--method", "gkv", "--model", "tiny"], 2, "kvbench imports weights only for trimkv, retention, foresightkv"),
        (["--method", "trimvk", "--model", "tiny"], 2, "Did you mean 'trimkv'"),
        (["--method", "trimkv", "--model", "tiny", "--gate", "rg5"], 2, "choose rg, rg2, rg3, rg10"),
        (["--method", "trimkv", "--model", "org/unknown"], 3, "its sizes are unknown"),
        (["--method", "foresightkv", "--model", "tiny"], 3, "holds no tensors named"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, code, message):
    tiny_gates(tmp_path)
    assert main(["weights", "import", str(tmp_path), "--out", str(tmp_path / "out"), *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


GATE = "model.layers.{}.self_attn.retention_gate.{}"
DAMAGED = {  # a file -> what writes it, what is said of it
    "deep.pth": (b"\x80\x02" + b"(" * 9999 + b"t" * 20000 + b".", "is damaged or holds more than tensors"),
    "nested.pth": (b"\x80\x02" + b"(t" * 10 + b"0" * 50 + b".", "is damaged or holds more than tensors"),
    "empty.pth": (b"", "is damaged or holds more than tensors"),
    "point.pth": (
        {GATE.format(0, "bias"): torch.tensor(1.0)},
        "tensor 'bias' of layer 0 \\(shape \\[\\]\\) is sparse or has a wrong number of dimensions",
    ),
    "sparse.pth": ({GATE.format(0, "bias"): torch.eye(2).to_sparse()}, "layer 0 \\(shape \\[2, 2\\]\\) is sparse"),
    "digits.pth": ({GATE.format("9" * 5000, "bias"): torch.zeros(2)}, "holds no tensors named"),
    "far.safetensors": (
        {GATE.format(10**9 - 1, "bias"): torch.zeros(2)},
        "layer 999999999 has tensors, but layer 0 has none; the checkpoint is incomplete. Download it again.",
    ),
}


@pytest.mark.parametrize("file", DAMAGED)
def test_damaged_checkpoints_are_refused_in_one_line(tmp_path, out, file):
    """Tensors of a layer without others, of other dimensions, and pickles that end in the middle of a step."""
    content, match = DAMAGED[file]
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        {"pth": torch.save, "safetensors": save_file}[file.partition(".")[2]](content, tmp_path / file)
    with pytest.raises(SetupError, match=match) as caught:
        import_weights(tmp_path / file, "trimkv", CONFIG, "org/m", out)
    assert "\n" not in str(caught.value)


def test_a_refused_pickle_is_told_without_torch_s_advice(tmp_path, out):
    class Hostile:
        def __reduce__(self):
            return os.system, ("true",)

    torch.save({"x": Hostile()}, tmp_path / "x.pth")
    with pytest.raises(SetupError) as caught:
        import_weights(tmp_path / "x.pth", "trimkv", CONFIG, "org/m", out)
    said = str(caught.value)
    assert "holds more than tensors (it calls '" in said
    assert "system'). kvbench ran no code from it; give another file." in said
    assert not any(word in said for word in ("weights_only", "torch", "\x1b", "WeightsUnpickler"))
