"""kvzap: the surrogate's arithmetic, its two modes, and checks of its weights."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.select import decide
from kvbench.eviction.terms.surrogate import log_worth, surrogate_misfit, surrogate_shapes
from kvbench.eviction.view import make_view
from kvbench.registry import methods

MODEL = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 24, "head_dim": 6}


def random_weights(width):
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=generator) for n, shape in surrogate_shapes(MODEL, width).items()}


@pytest.mark.parametrize("width", [0, 5])
def test_the_surrogate_is_a_network_per_layer(width):
    weights, hidden, keys = random_weights(width), torch.randn(2, 7, 24), torch.randn(2, 2, 7, 6)
    for layer in range(3):
        net = [torch.nn.Linear(24, width), torch.nn.GELU()] if width else []
        net = torch.nn.Sequential(*net, torch.nn.Linear(width or 24, 2))
        with torch.no_grad():
            if width:
                net[0].weight.copy_(weights["in.weight"][layer])
                net[0].bias.copy_(weights["in.bias"][layer])
            net[-1].weight.copy_(weights["out.weight"][layer])
            net[-1].bias.copy_(weights["out.bias"][layer])
            new = NewTokens(layer=layer, hidden=hidden, keys=keys, values=keys, weights=weights)
            torch.testing.assert_close(log_worth(new), net(hidden).transpose(1, 2))


def test_weights_of_another_shape_are_named():
    assert surrogate_misfit(random_weights(5), MODEL) == surrogate_misfit(random_weights(0), MODEL) == ""
    assert "in.bias is missing" in surrogate_misfit(
        {k: v for k, v in random_weights(5).items() if k != "in.bias"}, MODEL
    )
    wrong = random_weights(0) | {"out.bias": torch.zeros(3, 4)}
    assert surrogate_misfit(wrong, MODEL) == "out.bias is [3, 4]; this model needs [3, 2]"


SCORES = torch.tensor([[-1.0, -9, -2, -3, -8, -7, -1, -9, -9], [-9.0, -9, -9, -4, -9, -5, -4, -9, -9]])


def kept(budget=4, **options):
    method = methods.get("kvzap")(recent=2, **options)
    view = make_view(torch.zeros(1, 2, 9, 4), budget=budget, columns={"zap": SCORES[None]})
    [decision] = decide(method, [view])
    return [row.nonzero()[:, 0].tolist() for row in decision.keep[0]]


def test_a_budget_of_heads_layers_or_the_model():
    assert kept(level="head") == [[0, 6, 7, 8], [3, 6, 7, 8]]
    assert kept(level="layer") == kept(level="model") == [[0, 2, 3, 6, 7, 8], [7, 8]]


def test_a_threshold_judges_what_has_left_the_window():
    method = methods.get("kvzap")(strategy="threshold")
    assert not method.takes_budget
    assert not method.decode_bounded
    assert not method.uniform
    for level in ("model", "layer", "head"):
        assert kept(9, strategy="threshold", threshold=-4.0, level=level) == [[0, 2, 3, 6, 7, 8], [3, 6, 7, 8]]
    assert kept(9, strategy="threshold", threshold=-0.5) == [[7, 8]] * 2
    assert kept(9, strategy="threshold", threshold=-20.0) == [[*range(9)]] * 2
