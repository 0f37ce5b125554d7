"""Logits in blocks equal the model's own, and losses over blocks have the values and gradients of whole logits."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.models import ARCHITECTURES, build

from kvbench.errors import UserError
from kvbench.train import logits
from kvbench.train.forward import forward
from kvbench.train.logits import by_blocks, final_states, logits_of
from kvbench.train.sparse_masks import plain


def ids(rows=2, tokens=21):
    return torch.randint(3, 150, (rows, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "opt", "granite-scaled", "gemma2-capped"])
def test_logits_are_those_of_the_model(architecture, monkeypatch):
    """Also where a model scales its logits, caps them, or calls the inner of two decoders."""
    monkeypatch.setattr(logits, "PREDICTIONS", 12)
    monkeypatch.setitem(ARCHITECTURES, "opt", ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64}))
    monkeypatch.setitem(ARCHITECTURES, "granite-scaled", ("GraniteConfig", {"logits_scaling": 7.0}))
    capped = ARCHITECTURES["gemma2"][1] | {"final_logit_softcapping": 0.5}
    monkeypatch.setitem(ARCHITECTURES, "gemma2-capped", ("Gemma2Config", capped))
    model = build(architecture).model
    with torch.no_grad():
        whole = forward(model, plain, input_ids=ids(), logits=0).float()
        states = final_states(model, plain, input_ids=ids())
        found = by_blocks(lambda first, block: logits_of(model, block), states)
        last = final_states(model, plain, last=5, input_ids=ids())
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(last, states[:, -5:])
    assert "forward" not in vars(model.get_decoder())  # the decoder is again the model's own


def test_loss_and_gradients_over_blocks_are_those_of_whole_logits(monkeypatch):
    monkeypatch.setattr(logits, "PREDICTIONS", 12)
    loaded, targets = build("gemma2"), ids()[:, 1:]

    def losses(said, wanted):
        return -said.log_softmax(dim=-1).gather(-1, wanted[..., None])[..., 0]

    def read(first, states):
        sizes.append(states.shape[1])
        return losses(logits_of(loaded.model, states), targets[:, first : first + states.shape[1]])

    def gradients(loss):
        loaded.model.requires_grad_(True).zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in loaded.model.named_parameters()}

    sizes: list[int] = []
    slow = losses(forward(loaded.model, plain, input_ids=ids(), logits=0)[:, :-1].float(), targets).sum()
    wanted = gradients(slow)
    fast = by_blocks(read, final_states(loaded.model, plain, input_ids=ids())[:, :-1]).sum()
    assert sizes == [6, 6, 6, 2]
    assert fast.item() == pytest.approx(slow.item(), rel=1e-6)
    for name, gradient in gradients(fast).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5)
    assert len(sizes) == 8  # the backward pass computed each block again


def test_a_model_without_a_decoder_is_refused_by_name():
    class Bare(torch.nn.Module):
        base_model_prefix = "model"

        def __init__(self, inner):
            super().__init__()
            self.inner, self.config = inner, inner.config

        def forward(self, **inputs):
            return self.inner(**inputs)

        def set_attn_implementation(self, name):
            self.inner.set_attn_implementation(name)

        _supports_attention_backend = True

    assert transformers.Qwen3ForCausalLM.base_model_prefix == "model"
    with pytest.raises(UserError, match="in 'Bare', no head reads the output of a decoder"):
        final_states(Bare(build("qwen3").model), plain, input_ids=ids())
