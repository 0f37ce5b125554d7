"""Retention gates: small networks that predict, when a token is read, how slowly the worth of its entry decays.

The worth of an entry is multiplied by its beta, at most 1, at each further token. TRIM-KV (arXiv 2512.03324) and global
retention (arXiv 2605.09649) compute log beta = logsigmoid(out(h) + b) per KV head. The last hidden layer h is

    rg     silu(W1 x + b1)                     x: input of the layer's attention
    rg2    silu(W1 [k; v] + b1)                keys (post-RoPE) and values of all KV heads
    rg3    silu(W1 [k; v]) * (W2 [k; v])
    rg10   silu(W2 silu(W1 x + b1) + b2)

`tie` says which layers and heads share the last projection and its bias:

    none               each layer has its own
    layers             one projection for all layers, with an output per head (released code of global retention)
    layers_and_heads   one vector u for all, log beta = logsigmoid(u h_head + b); h consists of Hk vectors h_head of
                       width I, one per head (paper of global retention)

Tensors, stacked over the layers of the model unless shared (I: the width, D: hidden size, S = 2 Hk d):

    rg     in.weight [L, I, D]   in.bias [L, I]
    rg2    kv.weight [L, I, S]   kv.bias [L, I]
    rg3    kv_gate.weight and kv_up.weight [L, I, S]
    rg10   as rg, and mid.weight [L, I, I]   mid.bias [L, I]
    out.weight [L, Hk, I], [Hk, I] or [I], and out.bias [L, Hk], [Hk] or [1], as tied

With layers_and_heads, the tensors from which h follows (in, kv, kv_gate and kv_up; in rg10 only mid) give Hk I
outputs instead of I.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.learned import Shapes, Sizes
from kvbench.eviction.new_tokens import NewTokens
from kvbench.lazy import torch

Gate = Literal["rg", "rg2", "rg3", "rg10"]
Tie = Literal["none", "layers", "layers_and_heads"]
WIDTH = 512  # of the published gates
TIES: dict[int, Tie] = {3: "none", 2: "layers", 1: "layers_and_heads"}  # number of dimensions of out.weight -> tie


@dataclass(frozen=True, slots=True)
class GateForm:
    """The architecture of a gate: its kind, how layers share the last projection, and the width of hidden layers."""

    gate: Gate
    tie: Tie
    width: int = WIDTH

    def shapes(self, model: Sizes) -> Shapes:
        """Return the shapes of a gate's tensors for a model of these sizes."""
        layers, heads = model["num_hidden_layers"], model["num_key_value_heads"]
        source = model["hidden_size"] if self.gate in ("rg", "rg10") else 2 * heads * model["head_dim"]
        last = self.width * (heads if self.tie == "layers_and_heads" else 1)  # units of the last hidden layer
        first = self.width if self.gate == "rg10" else last
        out = {"none": (layers, heads, self.width), "layers": (heads, self.width), "layers_and_heads": (self.width,)}
        bias = {"none": (layers, heads), "layers": (heads,), "layers_and_heads": (1,)}
        shapes: Shapes = {"out.weight": out[self.tie], "out.bias": bias[self.tie]}
        if self.gate == "rg3":
            return shapes | dict.fromkeys(("kv_gate.weight", "kv_up.weight"), (layers, first, source))
        name = "kv" if self.gate == "rg2" else "in"
        shapes |= {f"{name}.weight": (layers, first, source), f"{name}.bias": (layers, first)}
        if self.gate == "rg10":
            shapes |= {"mid.weight": (layers, last, self.width), "mid.bias": (layers, last)}
        return shapes


def form_of(tensors: Mapping[str, torch.Tensor]) -> GateForm | None:
    """Return the form of the gate that tensors of these names and shapes make up; None if they are not a gate."""
    out = tensors.get("out.weight")
    if out is None or out.dim() not in TIES:
        return None
    marks: dict[str, Gate] = {"kv_gate.weight": "rg3", "kv.weight": "rg2", "mid.weight": "rg10", "in.weight": "rg"}
    gate = next((gate for mark, gate in marks.items() if mark in tensors), None)
    return None if gate is None else GateForm(gate, TIES[out.dim()], out.shape[-1])


def log_retention(new: NewTokens) -> torch.Tensor:
    """Return log beta of new tokens, [b, Hk, t] float32, at most 0: the gate in `new.weights` computes it."""
    w, heads = new.weights, new.keys.shape[1]
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

    def layer(name: str) -> torch.Tensor:
        return w[name][new.layer]

    if "in.weight" in w:
        h = silu(linear(new.hidden.float(), layer("in.weight"), layer("in.bias")))
    else:
        kv = torch.cat([new.keys, new.values], dim=-1).float().transpose(1, 2).flatten(2)  # [b, t, Hk * 2d]
        if "kv.weight" in w:
            h = silu(linear(kv, layer("kv.weight"), layer("kv.bias")))
        else:
            h = silu(linear(kv, layer("kv_gate.weight"))) * linear(kv, layer("kv_up.weight"))
    if "mid.weight" in w:
        h = silu(linear(h, layer("mid.weight"), layer("mid.bias")))
    out, bias = w["out.weight"], w["out.bias"]
    if out.dim() == 1:
        logit = h.unflatten(-1, (heads, -1)) @ out + bias
    else:
        logit = linear(h, out, bias) if out.dim() == 2 else linear(h, layer("out.weight"), layer("out.bias"))
    return torch.nn.functional.logsigmoid(logit).transpose(1, 2)
