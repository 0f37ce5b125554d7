"""What new tokens bring with them: hidden states reach the method, and its columns the entries they belong to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.methods import with_tables
from support.models import ARCHITECTURES, VOCABULARY, build, requests

from kvbench.audit.invariants.watch import watching
from kvbench.engine.attention.geometry import homes
from kvbench.engine.attention.interface import route
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import load_weights
from kvbench.errors import PluginError
from kvbench.eviction import noise
from kvbench.eviction.api import Method
from kvbench.eviction.choose import make
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.gates import log_retention
from kvbench.eviction.view import LayerView
from kvbench.integrations.transformers_cache import EvictionCache

BUDGET, INTERVAL = 40, 16  # the first eviction comes after 16 generated tokens: till then the cache is the full one


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return with_tables(build("qwen3"))


def dense(loaded: LoadedModel, weights: dict[str, torch.Tensor], ids: list[int]) -> list[torch.Tensor]:
    """log beta [Hk, T] of every layer, from one plain forward pass of transformers."""
    inputs: list[torch.Tensor] = []
    layers = loaded.model.model.layers
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, a, k: inputs.append(k["hidden_states"]), with_kwargs=True)
        for layer in layers
    ]
    try:
        with torch.no_grad():
            loaded.model(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    nothing = torch.zeros(1, 2, len(ids), 16)
    return [
        log_retention(NewTokens(layer=i, hidden=x, keys=nothing, values=nothing, weights=weights))[0]
        for i, x in enumerate(inputs)
    ]


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_every_entry_has_the_gate_of_its_own_token(loaded: LoadedModel, layout: str) -> None:
    method, todo = make("trimkv", {}), requests((31, 34), (30, 30), 1)
    engine = Engine(loaded, method, budget=BUDGET, interval=INTERVAL, slots=2, max_tokens=80, layout=layout)
    with watching(method) as seen:
        done = {g.request.doc_id: g for g in engine.generate(todo)}
    weights = load_weights(method.weights(), loaded.folder, loaded.model.config, "cpu")
    owners = {noise.signed64(request.noise_key(0)): request for request in todo}
    first = [view for _, [view] in seen.decisions if not int(view.eviction_index.max())]
    for view in first:
        for row, key in enumerate(view.noise_key.tolist()):
            ids = [*owners[key].prompt_ids, *done[owners[key].doc_id].token_ids][: int(view.seen[row])]
            want = dense(loaded, weights, ids)[view.layer].gather(-1, view.positions[row])
            torch.testing.assert_close(view.columns["log_beta"][row], want, rtol=1e-4, atol=1e-5)
    assert len(first) > 1


@dataclass(frozen=True)
class Unfinished(Method):
    """Declares a column, but does not compute its values."""

    def columns(self) -> tuple[GivenColumn, ...]:
        return (GivenColumn(name="x"),)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["x"]


def test_a_column_without_values_is_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, Unfinished(), budget=BUDGET, interval=INTERVAL, slots=1, max_tokens=80)
    with pytest.raises(PluginError, match=r"^Unfinished declares a GivenColumn, so it must define on_tokens\(\)\.$"):
        list(engine.generate(requests((50,), (4,), 1)))


def test_generate_with_a_cache_gives_entries_the_same_gates(loaded: LoadedModel) -> None:
    method, [request] = make("trimkv", {}), requests((31,), (30,), 1)
    ids = torch.tensor([request.prompt_ids])
    label = f"trimkv(gates={loaded.folder})"
    with watching(method) as seen, EvictionCache(loaded.model, label, budget=BUDGET, interval=INTERVAL) as cache:
        out = loaded.model.generate(
            ids, past_key_values=cache, max_new_tokens=20, do_sample=False, eos_token_id=VOCABULARY
        )
    weights = load_weights(method.weights(), loaded.folder, loaded.model.config, "cpu")
    for _, [view] in seen.decisions:
        want = dense(loaded, weights, out[0, : int(view.seen[0])].tolist())[view.layer].gather(-1, view.positions[0])
        torch.testing.assert_close(view.columns["log_beta"][0], want, rtol=1e-4, atol=1e-5)
    assert seen.decisions


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_hands_over_what_attention_reads(name: str) -> None:
    model, heard = build(name), []

    def handler(call):
        heard.append(call.hidden)
        return call.value.new_zeros(
            *call.query.shape[:1], call.query.shape[2], call.query.shape[1], call.value.shape[-1]
        )

    with torch.no_grad(), route(model.model, handler, hidden=True):
        model.model(torch.tensor([[1, 2, 3]]), attention_mask=None, use_cache=False)
    assert len(heard) == len(homes(model.geometry))
    assert all(hidden.shape == (1, 3, 64) for hidden in heard)


def test_nobody_else_pays_for_it(loaded: LoadedModel) -> None:
    heard = []

    def handler(call):
        heard.append(call.hidden)
        return call.value.new_zeros(1, call.query.shape[2], call.query.shape[1], call.value.shape[-1])

    with torch.no_grad(), route(loaded.model, handler):
        loaded.model(torch.tensor([[1, 2, 3]]), attention_mask=None, use_cache=False)
    assert heard == [None] * 3
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())
