"""The RoPE that a method undoes is that of the layers it evicts."""

from __future__ import annotations

import pytest
import torch
from support import zoo

from kvbench.engine.attention.geometry import for_lengths
from kvbench.engine.attention.rope import read_rope
from kvbench.engine.model.load import prepare
from kvbench.errors import UserError


@pytest.fixture(scope="module")
def gemma3():
    """A model whose layers with a sliding window rotate by other frequencies than those with full attention."""
    kinds = ["sliding_attention", "full_attention"]
    return prepare(zoo.build(zoo.configuration("gemma3_text", {"layer_types": kinds})), None)


def test_windowed_layers_do_not_decide(gemma3):
    buffers = {name.split(".")[-1]: buffer for name, buffer in gemma3.model.named_buffers()}
    full, sliding = buffers["full_attention_inv_freq"], buffers["sliding_attention_inv_freq"]
    assert not torch.equal(full, sliding)
    assert torch.equal(read_rope(gemma3.model, gemma3.geometry).frequencies, full)


def test_evicted_layers_that_differ_are_refused(gemma3):
    both = for_lengths(gemma3.geometry, 8)  # shorter than the window: every layer is evicted
    assert all(g.evicts for g in both)
    with pytest.raises(UserError, match="differ between the layers that it evicts"):
        read_rope(gemma3.model, both)
