"""Hidden states and attention modules that methods read: those of the newest tokens, counted in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from support.models import build, requests

from kvbench.audit.invariants.watch import watching
from kvbench.engine.cache.layout import Lengths, plan_slot_bytes, shape_of
from kvbench.engine.loop import Engine
from kvbench.engine.model.own_attention import own_attention
from kvbench.errors import UserError
from kvbench.eviction import noise
from kvbench.eviction.api import Method, Needs
from kvbench.eviction.choose import from_label
from kvbench.eviction.combined import Combined
from kvbench.eviction.declare import WHOLE
from kvbench.eviction.modality import check_images
from kvbench.integrations.transformers_cache import EvictionCache
from kvbench.records import Sampling
from kvbench.registry import methods

NEWEST, CLASSES = 5, ("Qwen3Attention",)


@dataclass(frozen=True)
class Reads(Method):
    """Keeps the newest entries, and reads hidden states."""

    whole: bool = True

    def needs(self):
        return Needs(hidden=NEWEST, prompt_hidden=WHOLE if self.whole else NEWEST, attention=CLASSES)

    def score(self, view):
        return view.positions.float()


@pytest.mark.parametrize("whole", [True, False])
def test_the_inner_method_of_laq_reads_them(monkeypatch, whole):
    """In the copy of the prompt's cache, which the inner method evicts; while decoding, none are stored."""
    seen = []

    def score(self, view):
        seen.append((view.layer, view.hidden.shape[1], type(view.attention.module).__name__))
        return view.positions.float()

    loaded, knorm = build("qwen3"), methods.get("knorm")
    monkeypatch.setattr(knorm, "needs", Reads(whole).needs)
    monkeypatch.setattr(knorm, "score", score)
    laq = from_label("laq(inner=knorm, n=2)")
    engine = Engine(loaded, laq, budget=28, interval=16, slots=1, max_tokens=80)
    list(engine.generate(requests((40,), (20,), 1, Sampling())))
    layers = range(loaded.model.config.num_hidden_layers)
    assert seen == [(layer, 40 if whole else NEWEST, *CLASSES) for layer in layers]


def inputs_of_attention(loaded, ids):
    """What the attention of every layer reads in one plain forward pass, [layers][T, hidden size]."""
    read = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, a, k: read.append(k["hidden_states"][0]), with_kwargs=True)
        for layer in loaded.model.model.layers
    ]
    with torch.no_grad():
        loaded.model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return read


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("whole", [True, False])
def test_views_show_the_hidden_states_of_the_newest_tokens(layout, whole):
    """Of the first layer, which no eviction changes; of all layers at the prompt."""
    loaded, method = build("qwen3"), Reads(whole)
    todo = requests((31, 34), (30, 30), 1, Sampling())
    engine = Engine(loaded, method, budget=28, interval=16, slots=2, max_tokens=80, layout=layout)
    shown = []
    with watching(method) as seen, torch.no_grad():
        done = {g.request.doc_id: g for g in engine.generate(todo)}
        keys = {noise.signed64(r.noise_key(sample)): r for r in todo for sample in (-1, 0)}
        for _, [view] in seen.decisions:
            for row, key in enumerate(view.noise_key.tolist()):
                ids = [*keys[key].prompt_ids, *done[keys[key].doc_id].token_ids][: int(view.seen[row])]
                first = not int(view.eviction_index[row])
                if view.layer == 0 or first:
                    want = inputs_of_attention(loaded, ids)[view.layer]
                    width = len(ids) if first and whole else NEWEST
                    torch.testing.assert_close(view.hidden[row], want[-width:], rtol=1e-4, atol=1e-5)
                    shown.append(first)
    assert {True, False} == set(shown)


def test_what_is_stored_is_counted():
    loaded, method = build("qwen3"), Reads()
    lengths = Lengths.of(80)
    shape = shape_of(loaded.geometry, method, 28, 16, lengths, 1)
    less = plan_slot_bytes(loaded.geometry, method, replace(shape, hidden=0), torch.float32)
    size = loaded.model.config.hidden_size
    assert plan_slot_bytes(loaded.geometry, method, shape, torch.float32) - less == 4 * 3 * NEWEST * size
    engine = Engine(loaded, method, budget=28, interval=16, slots=1, max_tokens=80)
    [done] = engine.generate(requests((31,), (20,), 1))
    assert done.usage.kv_bytes_extra >= 4 * 3 * NEWEST * size
    assert done.usage.kv_bytes_prefill_peak >= 4 * (31 + 2 * NEWEST) * size


def test_generate_shows_the_same_as_the_engine():
    loaded, method = build("qwen3"), Reads()
    [request] = requests((31,), (30,), 1, Sampling())
    views = []
    for run in (
        lambda: list(Engine(loaded, method, budget=28, interval=8, slots=1, max_tokens=80).generate([request])),
        lambda: loaded.model.generate(
            torch.tensor([request.prompt_ids]),
            past_key_values=EvictionCache(loaded.model, method, budget=28, interval=8, max_tokens=80),
            max_new_tokens=30,
            do_sample=False,
        ),
    ):
        with watching(method) as seen:
            run()
        views.append([view.hidden for _, [view] in seen.decisions])
    assert len(views[0]) == len(views[1]) > 2
    for mine, other in zip(*views):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_two_methods_share_what_they_read():
    method = Combined(("reads", "reads"), Reads(), Reads(whole=False))
    needs = method.needs()
    assert (needs.hidden, needs.prompt_hidden, needs.attention) == (NEWEST, WHOLE, CLASSES)


def test_the_attention_is_the_model_s_own():
    loaded = build("qwen3")
    found = own_attention(loaded.model, loaded.geometry, CLASSES)
    assert [found[i].module for i in sorted(found)] == [layer.self_attn for layer in loaded.model.model.layers]
    x = torch.zeros(1, 2, loaded.model.config.hidden_size)
    cos, sin = found[0].rotary(x, torch.tensor([[0, 40]]))
    assert cos.shape == sin.shape == (1, 2, loaded.geometry[0].head_dim)
    assert own_attention(loaded.model, loaded.geometry, ()) == {}
    with pytest.raises(UserError, match="reads only attention of class LlamaAttention; model type 'qwen3' has a layer"):
        own_attention(loaded.model, loaded.geometry, ("LlamaAttention",))


def test_images_are_refused():
    with pytest.raises(UserError, match="image tokens have three"):
        check_images("reads", Reads())
