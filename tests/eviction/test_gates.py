"""Retention gates: every form and tie, and which tensors are one."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.learned import misfit
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.gates import GateForm, form_of, log_retention

MODEL = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 10, "head_dim": 6}
FORMS = [
    GateForm(gate, tie, 5) for gate in ("rg", "rg2", "rg3", "rg10") for tie in ("none", "layers", "layers_and_heads")
]


def drawn(form, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in form.shapes(MODEL).items()}


def tokens(weights, layer=1, count=4, seed=9):
    g = torch.Generator().manual_seed(seed)
    hidden, keys, values = (torch.randn(*size, generator=g) for size in ((2, count, 10), *[(2, 2, count, 6)] * 2))
    return NewTokens(layer=layer, hidden=hidden, keys=keys, values=values, weights=weights)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_is_known_by_its_tensors_and_answers(form):
    weights = drawn(form)
    assert form_of(weights) == form
    assert misfit(weights, form.shapes(MODEL)) == ""
    log_beta = log_retention(tokens(weights))
    assert log_beta.shape == (2, 2, 4)
    assert log_beta.dtype == torch.float32
    assert bool((log_beta < 0).all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_token_has_its_retention_whatever_comes_with_it(form):
    weights, new = drawn(form), tokens(drawn(form))
    alone = NewTokens(
        layer=1, hidden=new.hidden[:1, 2:3], keys=new.keys[:1, :, 2:3], values=new.values[:1, :, 2:3], weights=weights
    )
    torch.testing.assert_close(log_retention(alone)[0, :, 0], log_retention(new)[0, :, 2])


def test_layers_have_gates_of_their_own():
    weights = drawn(GateForm("rg10", "layers", 5))
    here, there = (log_retention(tokens(weights, layer)) for layer in (0, 2))
    assert not torch.allclose(here, there)
    for name in ("in.weight", "in.bias", "mid.weight", "mid.bias"):
        weights[name] = weights[name][:1].expand_as(weights[name])
    assert torch.equal(*(log_retention(tokens(weights, layer)) for layer in (0, 2)))  # the projection is shared


def test_heads_read_parts_of_the_last_layer_where_they_share_the_projection():
    """By hand: log beta of head h is logsigmoid(u . h_h + b)."""
    form = GateForm("rg", "layers_and_heads", 5)
    weights, silu = drawn(form), torch.nn.functional.silu
    new = tokens(weights)
    h = silu(new.hidden @ weights["in.weight"][1].T + weights["in.bias"][1])
    for head in range(2):
        logit = h[..., 5 * head : 5 * head + 5] @ weights["out.weight"] + weights["out.bias"]
        torch.testing.assert_close(log_retention(new)[:, head], torch.nn.functional.logsigmoid(logit))


def test_half_precision_states_are_read_in_float32():
    weights = drawn(GateForm("rg10", "layers", 5))
    new = tokens(weights)
    half = NewTokens(
        layer=1, hidden=new.hidden.bfloat16(), keys=new.keys.bfloat16(), values=new.values.bfloat16(), weights=weights
    )
    assert log_retention(half).dtype == torch.float32


def test_what_is_no_gate():
    weights = drawn(GateForm("rg", "none", 5))
    assert form_of({}) is None
    assert form_of({"out.weight": torch.zeros(2, 2)}) is None
    assert form_of(weights | {"out.weight": torch.zeros(1, 2, 3, 4)}) is None
    form = form_of(weights)
    larger = form.shapes(MODEL | {"hidden_size": 11})
    assert misfit(weights, larger) == "in.weight is [3, 5, 10]; this model needs [3, 5, 11]"
    assert misfit(weights | {"more": torch.zeros(1)}, form.shapes(MODEL)) == "more is not expected"
    del weights["in.bias"]
    assert misfit(weights, form.shapes(MODEL)) == "in.bias is missing; this model needs [3, 5]"
