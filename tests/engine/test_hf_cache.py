"""EvictionCache in a plain `model.generate`: the same greedy tokens as the engine."""

from __future__ import annotations

import gc

import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build, requests

from kvbench import EvictionCache
from kvbench.engine.loop import Engine
from kvbench.errors import UserError
from kvbench.records import Sampling


def generate(loaded, prompt, cache, tokens, rows=2):
    ids = torch.tensor([prompt] * rows)
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, do_sample=False
    )
    return out[:, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("method", "architecture"),
    [(method, "qwen3") for method in ["full", *EVICTING, *VARIANTS]]
    + [(method, name) for name in ("llama", "gemma2", "mistral-wide") for method in ("gkv", "h2o", "ada-kv")],
)
def test_greedy_tokens_equal_the_engine(method, architecture):
    loaded = with_tables(build(architecture))
    instance = small(method)
    budget = 32 if instance.takes_budget else None
    for request in requests(lengths=(20, 60), new_tokens=(50, 50), samples=1, sampling=Sampling()):
        engine = Engine(loaded, instance, budget=budget, interval=16, slots=3, max_tokens=200)
        [done] = engine.generate([request])
        loaded.model.config._name_or_path = str(loaded.folder)
        with EvictionCache(
            loaded.model, instance, budget=budget, interval=16, max_tokens=200, tokenizer=loaded.tokenizer
        ) as cache:
            rows = 1 if instance.kind == "noise" or instance.needs().probes else 2
            texts = generate(loaded, list(request.prompt_ids), cache, 50, rows=rows)
        if instance.kind != "noise":  # noise is keyed by task and doc, which generate does not have
            assert all(row == list(done.token_ids) for row in texts)
        if instance.evicts and instance.decode_bounded:
            assert max(cache.entries()) <= 48
    assert loaded.model.config._attn_implementation == "sdpa"  # the model is as before


def test_padded_batches_are_refused():
    loaded = build("qwen3")
    ids = torch.randint(0, 100, (2, 10))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with EvictionCache(loaded.model, "knorm", budget=8, interval=4) as cache, pytest.raises(UserError, match="padded"):
        loaded.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=5, do_sample=False)


def test_a_missing_or_small_budget_is_refused():
    loaded = build("qwen3")
    with pytest.raises(UserError, match="budget"):
        EvictionCache(loaded.model, "gkv")
    with pytest.raises(UserError, match="at least 17"):
        EvictionCache(loaded.model, "gkv", budget=16)


def test_an_inline_cache_gives_the_model_its_attention_back():
    """As in the README: nobody closes the cache, and several follow each other."""
    loaded = build("qwen3")
    [request] = requests(lengths=(20,), new_tokens=(30,), samples=1, sampling=Sampling())
    ids = torch.tensor([request.prompt_ids])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    plain = loaded.model.generate(ids, **options)
    for _ in range(3):
        loaded.model.generate(
            ids, past_key_values=EvictionCache(loaded.model, "knorm", budget=16, interval=8), **options
        )
        gc.collect()
        assert loaded.model.config._attn_implementation == "sdpa"
        assert loaded.model.generate(ids, **options).equal(plain)


def test_caches_live_beside_each_other_and_beside_plain_calls():
    """Several caches of one model, as in a comparison, and the full cache in between."""
    loaded = build("qwen3")
    [request] = requests(lengths=(40,), new_tokens=(30,), samples=1, sampling=Sampling())
    ids = torch.tensor([request.prompt_ids])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    plain = loaded.model.generate(ids, **options)
    alone = {}
    for method in ("gkv", "streaming-llm"):
        with EvictionCache(loaded.model, method, budget=24, interval=8) as cache:
            alone[method] = loaded.model.generate(ids, past_key_values=cache, **options)
    assert not alone["gkv"].equal(alone["streaming-llm"])
    caches = {method: EvictionCache(loaded.model, method, budget=24, interval=8) for method in alone}
    assert loaded.model.generate(ids, **options).equal(plain)
    for method, cache in caches.items():
        assert loaded.model.generate(ids, past_key_values=cache, **options).equal(alone[method])
    assert loaded.model.generate(ids, **options).equal(plain)
    with pytest.raises(UserError, match="one generate call"):
        loaded.model.generate(ids, past_key_values=caches["gkv"], **options)
    assert loaded.model.generate(ids, **options).equal(plain)  # after the error too


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "many"}, "budget"),
        ({"budget": 1.5}, "150% is above 100%"),
        ({"budget": 32, "interval": 0}, "interval"),
        ({"budget": 32, "interval": "8"}, "interval"),
        ({"budget": 32, "method": 42}, "Method"),
        ({"budget": 20, "method": "snapkv(heads=query, window=12)"}, "at least 26"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        EvictionCache(build("qwen3").model, **{"method": "gkv", **arguments})


def test_a_share_as_text():
    assert EvictionCache(build("qwen3").model, "gkv", budget="25%").budget == 0.25


def test_beam_search_is_refused():
    loaded = build("qwen3")
    ids = torch.randint(0, 100, (1, 10))
    with (
        EvictionCache(loaded.model, "knorm", budget=8, interval=4) as cache,
        pytest.raises(UserError, match=r"beam|rows"),
    ):
        loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=5,
            num_beams=3,
            do_sample=False,
        )


def test_a_sequence_must_not_outgrow_the_cache():
    loaded = build("qwen3")
    ids = torch.randint(0, 100, (1, 10))
    with EvictionCache(loaded.model, "full", max_tokens=14) as cache, pytest.raises(UserError, match="max_tokens=14"):
        generate(loaded, ids[0].tolist(), cache, 20, rows=1)
