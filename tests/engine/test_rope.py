"""The RoPE that a method undoes is that of the layers it evicts; RoPE that depends on other sequences is refused."""

from __future__ import annotations

import re

import pytest
import torch
from support import zoo
from support.families import LONGROPE

from kvbench.engine.attention.geometry import for_lengths
from kvbench.engine.attention.layer_kinds import refuse_unsupported
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


@pytest.mark.parametrize("told", [{}, {"factor": 2.0}, {"attention_factor": 1.5}])
def test_the_settings_that_a_refusal_names_keep_the_model(told):
    def phi3(**more):
        rope = LONGROPE | {"short_factor": [1.5] * 8} | told
        rope |= {"factor": float(more.pop("factor"))} if "factor" in more else {}
        sizes = {name: int(size) for name, size in more.items()}
        config = zoo.configuration("phi3", {"rope_parameters": rope, "original_max_position_embeddings": 512} | sizes)
        return config, zoo.build(config).model.rotary_emb

    config, rotary = phi3()
    with pytest.raises(UserError, match="uses longrope RoPE") as refused:
        refuse_unsupported(config)
    named = dict(re.findall(r"\b(max_position_embeddings|factor) to (\d+(?:\.\d+)?)", str(refused.value)))
    assert named == {"max_position_embeddings": "512"} | ({} if told else {"factor": "8.0"})
    changed, same = phi3(**named)
    refuse_unsupported(changed)
    assert same.attention_scaling == rotary.attention_scaling != 1
    assert torch.equal(same.inv_freq, rotary.inv_freq)
