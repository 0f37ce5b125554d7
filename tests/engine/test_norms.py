"""RMS norms by torch's operator against the model's own code."""

from __future__ import annotations

import pytest
import torch
from support.models import build, requests
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvbench import registry
from kvbench.engine import loop
from kvbench.engine.loop import Engine
from kvbench.engine.model.norms import fused_norms


@pytest.mark.parametrize(("name", "some"), [("qwen3", True), ("llama", True), ("gemma2", False)])
@torch.inference_mode()
def test_norms_that_are_used_have_the_bits_of_the_models_code(name, some):
    model = build(name).model  # Gemma's norms add 1 to their weight
    ids = torch.randint(5, 90, (3, 7), generator=torch.Generator().manual_seed(0))
    want = model(ids).logits
    with fused_norms(model) as count:
        assert (count > 0) == some
        assert torch.equal(model(ids).logits, want)
    assert not any("forward" in module.__dict__ for module in model.modules())


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        out = super().forward(hidden_states)
        return out if gate is None else out * gate


def test_other_modules_and_dtypes_stay_as_they_are():
    with fused_norms(torch.nn.ModuleList([LlamaRMSNorm(8), Gated(8)])) as count:
        assert count == 1  # without a gate, both give the same bits
    with fused_norms(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))) as count:
        assert count == 0
    with fused_norms(build("qwen3").model.bfloat16()) as count:
        assert count == 0


def test_the_engine_gives_the_same_answers(monkeypatch):
    loaded = build("qwen3")
    todo = requests(lengths=(9, 33), new_tokens=(20, 30), samples=1)

    def tokens():
        made = Engine(loaded, registry.methods.get("gkv")(), budget=24, interval=8, slots=2, max_tokens=70)
        return {(d.request.doc_id, d.sample): d.token_ids for d in made.generate(todo)}

    fused = tokens()
    monkeypatch.setattr(loop, "fused_norms", lambda model: fused_norms(torch.nn.Module()))
    assert tokens() == fused
