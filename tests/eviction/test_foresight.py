"""ForesightKV's network scores the parts of its input, block by block, as it scores the joined input at once."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.terms import blocks, foresight

SIZES = {"num_hidden_layers": 3, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 6}


@pytest.mark.parametrize("layer", [1, torch.tensor([2, 0, 0, 1, 2])], ids=["one layer", "a layer per row"])
def test_parts_and_blocks(layer: int | torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(3)
    shapes = foresight.scorer_shapes("paper6", SIZES)
    weights = {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
    parts = [torch.randn(5, 2, 9, width, generator=draws) for width in (6, 6, 12)]
    wanted = foresight.drop_scores(weights, layer, torch.cat(parts, dim=-1))
    assert wanted.shape == (5, 2, 9)
    torch.testing.assert_close(foresight.drop_scores(weights, layer, *parts), wanted)
    for rows in (1, 2, 4):
        monkeypatch.setattr(blocks, "FLOATS", rows * 2 * 9 * foresight.HIDDEN)
        torch.testing.assert_close(foresight.drop_scores(weights, layer, *parts), wanted)
