"""EvictionCache in a plain `model.generate`: the same greedy tokens as the engine."""

from __future__ import annotations

import copy
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
    # Qwen3 norms its keys, so that a random model's keys are equally long: knorm would compare last bits.
    [(method, "llama" if method == "knorm" else "qwen3") for method in ["full", *EVICTING, *VARIANTS]]
    + [
        (method, name) for name in ("llama", "gemma2", "gemma3n", "mistral-wide") for method in ("gkv", "h2o", "ada-kv")
    ],
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
            rows = 1 if instance.kind == "noise" else 2
            texts = generate(loaded, list(request.prompt_ids), cache, 50, rows=rows)
        if instance.kind != "noise":  # noise is keyed by task and doc, which generate does not have
            assert all(row == list(done.token_ids) for row in texts)
        if instance.evicts and instance.decode_bounded:
            assert max(cache.entries()) <= 48
    assert loaded.model.config._attn_implementation == "sdpa"  # the model is as before


@pytest.mark.parametrize(("method", "architecture"), [("gkv", "qwen3"), ("ada-kv", "qwen3"), ("snapkv", "lfm2")])
def test_a_loop_of_forward_passes_needs_no_block_without_gradients(method, architecture):
    loaded = build(architecture)
    ids, tokens = torch.tensor([list(range(5, 45))]), list[int]()
    how = {"budget": 32, "interval": 8, "max_tokens": 100}
    with EvictionCache(loaded.model, small(method), **how) as cache:
        read = ids
        for _ in range(20):
            logits = loaded.model(read, past_key_values=cache, use_cache=True).logits
            read = logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens.append(int(read))
            assert torch.is_grad_enabled()
    with EvictionCache(loaded.model, small(method), **how) as cache:
        assert generate(loaded, ids[0].tolist(), cache, 20, rows=1) == [tokens]


def test_a_model_that_peft_wraps():
    peft = pytest.importorskip("peft", reason="peft wraps models with adapters; it is in the extra 'adapters'")
    loaded = build("qwen3")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = copy.deepcopy(loaded.model)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(loaded.model, config)
    ids = torch.tensor([list(range(5, 25))])
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    wanted = wrapped.generate(input_ids=ids, **how)
    assert wanted.tolist() != plain.generate(input_ids=ids, **how).tolist()
    with EvictionCache(wrapped, "full", max_tokens=100) as cache:
        assert wrapped.generate(input_ids=ids, past_key_values=cache, **how).tolist() == wanted.tolist()
    with EvictionCache(wrapped, "tova", budget=16, interval=8, max_tokens=100) as cache:
        wrapped.generate(input_ids=ids, past_key_values=cache, **how)
        assert max(cache.entries()) <= 24
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UserError, match="adds tokens before the prompt"):
        EvictionCache(peft.get_peft_model(plain, prompts), "full", max_tokens=100)


def padded(prompts):
    """Left-padded ids and mask [b, t]; pads are token 3, which a cache must never see."""
    length = max(map(len, prompts))
    ids = torch.tensor([[3] * (length - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@pytest.mark.parametrize(
    ("method", "architecture"),
    [(method, "qwen3") for method in ("full", "gkv", "h2o", "ada-kv", "snapkv", "laq", "trimkv")]
    + [("gkv", "gemma2"), ("gkv", "gemma4"), ("tova", "mistral-wide")],
)
def test_left_padded_rows_get_the_tokens_that_they_get_alone(method, architecture):
    loaded = with_tables(build(architecture))
    instance = small(method)
    budget = 32 if instance.takes_budget else None
    prompts = [r.prompt_ids for r in requests(lengths=(60, 41, 60, 3), new_tokens=(1,) * 4, samples=1)]
    options = {"budget": budget, "interval": 16, "max_tokens": 200, "tokenizer": loaded.tokenizer}
    loaded.model.config._name_or_path = str(loaded.folder)
    ids, mask = padded(prompts)
    with EvictionCache(loaded.model, instance, **options) as cache:
        together = loaded.model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=40, do_sample=False, eos_token_id=None
        )[:, ids.shape[1] :].tolist()
        held = cache.entries()
    for row, prompt in enumerate(prompts):
        with EvictionCache(loaded.model, instance, **options) as cache:
            alone = torch.tensor([prompt])
            out = loaded.model.generate(
                alone,
                attention_mask=torch.ones_like(alone),
                past_key_values=cache,
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
            )
            assert out[0, len(prompt) :].tolist() == together[row]
            assert cache.entries() == [held[row]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], "left-padded"),
        ([[0, 1, 0, 1], [1, 1, 1, 1]], "left-padded"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "prompt 0 of the batch .* has only pads"),
    ],
)
def test_pads_elsewhere_are_refused(mask, message):
    loaded = build("qwen3")
    ids = torch.randint(5, 100, (2, 4))
    with EvictionCache(loaded.model, "knorm", budget=8) as cache, pytest.raises(UserError, match=message):
        loaded.model(ids, attention_mask=torch.tensor(mask), past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("method", ["full", "gkv", "snapkv", "ada-kv"])
@pytest.mark.parametrize("pads", [0, 7])
def test_a_second_turn_goes_on_with_the_evicted_cache(method, pads):
    """Equal to one sequence whose tokens are all forced, of which the engine's turns are made too."""
    loaded, instance = build("qwen3"), small(method)
    budget = 32 if instance.takes_budget else None
    [one] = requests(lengths=(50,), new_tokens=(1,), samples=1)
    rows = [one.prompt_ids, one.prompt_ids[pads:]] if pads else [one.prompt_ids]
    ids, mask = padded(rows)
    greedy = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    turn = torch.randint(5, 100, (len(rows), 9), generator=torch.Generator().manual_seed(1))
    with EvictionCache(loaded.model, instance, budget=budget, interval=16, max_tokens=200) as cache:
        first = loaded.model.generate(ids, attention_mask=mask, past_key_values=cache, **greedy)
        talk = torch.cat([first, turn], 1)
        longer = torch.cat([mask, torch.ones(len(rows), talk.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        second = loaded.model.generate(talk, attention_mask=longer, past_key_values=cache, **greedy)
        if budget:
            assert max(cache.entries()) <= budget + 16 or not instance.decode_bounded
    for row, prompt in enumerate(rows):
        with EvictionCache(loaded.model, instance, budget=budget, interval=16, max_tokens=200) as cache:
            own = second[row, ids.shape[1] - len(prompt) :]
            with torch.no_grad():
                logits = loaded.model(own[None, : len(prompt)], past_key_values=cache, use_cache=True).logits[:, -1]
                for place in range(len(prompt), len(own)):
                    if place < len(prompt) + 25 or place >= len(prompt) + 34:
                        assert int(logits.argmax()) == int(own[place])
                    logits = loaded.model(own[None, place : place + 1], past_key_values=cache, use_cache=True).logits[
                        :, -1
                    ]


def test_a_prompt_in_two_passes_is_refused():
    loaded = build("qwen3")
    ids = torch.randint(5, 100, (1, 30))
    with EvictionCache(loaded.model, "knorm", budget=8) as cache, pytest.raises(UserError, match="one forward pass"):
        loaded.model.generate(ids, past_key_values=cache, max_new_tokens=5, prefill_chunk_size=10)


def test_its_text_says_what_it_holds():
    loaded = build("qwen3")
    ids = torch.randint(5, 100, (2, 30))
    cache = EvictionCache(loaded.model, "knorm", budget=8, interval=4)
    assert repr(cache).startswith("EvictionCache(knorm, budget=8, interval=4, tokens=0, ")
    loaded.model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False, eos_token_id=None)
    per_entry = sum(2 * g.kv_heads * g.head_dim * 4 for g in loaded.geometry)
    assert cache.entries()[0] == cache.entries()[1] > 0
    assert cache.bytes() == pytest.approx(sum(cache.entries()) * per_entry, rel=0.5)
    assert f"entries per layer and head={cache.entries()[0]:g}, " in repr(cache)
    assert f"bytes={cache.bytes():,})" in repr(cache)


def test_a_missing_or_small_budget_is_refused():
    loaded = build("qwen3")
    with pytest.raises(UserError, match="budget"):
        EvictionCache(loaded.model, "gkv")
    with pytest.raises(UserError, match=r"method 'gkv' .* at least 17"):
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
    with pytest.raises(UserError, match="a later turn must bring"):
        loaded.model.generate(ids, past_key_values=caches["gkv"], **options)
    assert loaded.model.generate(ids, **options).equal(plain)  # after the error too


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "many"}, "budget"),
        ({"budget": 1.5}, "150% is above 100%"),
        ({"budget": 32, "interval": 0}, "interval"),
        ({"budget": 32, "interval": "8"}, "interval"),
        ({"budget": 32, "max_tokens": 0}, "max_tokens"),
        ({"budget": 32, "max_tokens": -5}, "max_tokens"),
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


def test_a_closed_cache_and_a_foreign_module_are_refused():
    """Nothing would be stored there, and every token would attend to itself alone."""
    loaded = build("qwen3")
    ids = torch.randint(5, 100, (1, 20))
    closed = EvictionCache(loaded.model, "full")
    closed.close()
    with pytest.raises(UserError, match="is closed or belongs to another model"):
        generate(loaded, ids[0].tolist(), closed, 5, rows=1)
    other = build("llama").model
    with (
        EvictionCache(loaded.model, "full") as cache,
        pytest.raises(UserError, match="is closed or belongs to another model"),
    ):
        other(ids, past_key_values=cache, use_cache=True)


def test_inputs_by_place_are_inputs_by_name():
    loaded = build("qwen3")
    ids = torch.randint(5, 100, (2, 20))
    with torch.no_grad(), EvictionCache(loaded.model, "full") as cache, EvictionCache(loaded.model, "full") as named:
        out = loaded.model(ids, torch.ones_like(ids), None, cache)
        want = loaded.model(input_ids=ids, past_key_values=named)
    assert torch.equal(out.logits, want.logits)
    assert "tokens=20" in repr(cache)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": {"full_attention": None}}, "one number per token"),
        ({"attention_mask": torch.ones(1, 1, 20, 20)}, "one number per token"),
        ({"position_ids": torch.arange(5, 25)[None]}, "leave out position_ids"),
    ],
)
def test_other_masks_and_positions_are_refused(inputs, message):
    loaded = build("qwen3")
    ids = torch.randint(5, 100, (1, 20))
    with EvictionCache(loaded.model, "full") as cache, pytest.raises(UserError, match=message):
        loaded.model(ids, past_key_values=cache, **inputs)


def test_a_draft_begins_with_the_greedy_token_whichever_comes_next():
    loaded, kept = build("qwen3"), []
    ids = torch.tensor([list(range(5, 65)), [3] * 9 + list(range(5, 56))])
    for other in (0, 1):
        with EvictionCache(loaded.model, "laq(inner=knorm, n=3)", budget=16, max_tokens=100) as cache:
            how = {"past_key_values": cache, "return_dict": not other}
            logits = loaded.model(ids, attention_mask=(ids != 3).long(), **how)[0]
            loaded.model(logits[:, -1:].argmax(-1) ^ other, **how)
            kept.append([layer.positions[..., :16].sort(-1).values for layer in cache.slots.evicting])
    assert all(map(torch.equal, *kept))


def test_a_cache_is_not_copied():
    with pytest.raises(UserError, match="cannot be deep-copied"):
        copy.deepcopy(EvictionCache(build("qwen3").model, "full"))
