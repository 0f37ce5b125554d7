"""Prompts with images on small random models: logits against the dense reference, tokens against `model.generate`."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
from support.images import FAMILIES, LARGE, SMALL, WIDE, ask, generated, load, mixed
from support.methods import small, with_tables
from support.models import Words, build
from support.pretend_cuda import pretended_cuda

from kvbench import EvictionCache
from kvbench.engine import sampler
from kvbench.engine.images import joined
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.errors import UserError
from kvbench.eviction import noise
from kvbench.eviction.choose import from_label, make
from kvbench.eviction.modality import check_images
from kvbench.integrations.batch_images import BatchImages
from kvbench.records import FollowUp, Request, Sampling
from kvbench.sources.refusals import check_images_of

BUDGET, INTERVAL, ROOM = 24, 8, 240


@pytest.fixture(scope="module")
def qwen():
    return load("qwen3_vl")


def engine(loaded, method="snapkv-decode", slots=2, **more):
    chosen = small(method)
    budget = BUDGET if chosen.takes_budget else None
    return Engine(loaded, chosen, budget=budget, interval=INTERVAL, slots=slots, max_tokens=ROOM, tail=60, **more)


def worst_difference(loaded, monkeypatch, todo, **more):
    """Largest |logit - dense logit| over every generated token, and the number of evictions."""
    drawn, original = defaultdict(list), sampler.draw

    def spy(logits, keys, steps, sampling):
        for row, key, step in zip(logits, keys.tolist(), steps.tolist()):
            drawn[key, step] = row.clone()
        return original(logits, keys, steps, sampling)

    monkeypatch.setattr(sampler, "draw", spy)
    history, evictions, worst = KeptHistory(), 0, 0.0
    for done in engine(loaded, log=history, **more).generate(todo):
        request, key = done.request, noise.signed64(done.request.noise_key(done.sample))
        ids = [*request.prompt_ids, *done.token_ids[:-1]]
        keys = [noise.signed64(request.noise_key(-1)), key]
        dense = dense_logits(loaded, ids, history, keys, request.images)
        for step in range(len(done.token_ids)):
            difference = (drawn[key, step] - dense[len(request.prompt_ids) - 1 + step]).abs().max()
            worst = max(worst, float(difference))
        evictions += done.usage.evictions
    return worst, evictions


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_dense_reference(family, monkeypatch):
    """More sequences than slots, mixed prompts with and without images, evictions, refills."""
    loaded = load(family)
    worst, evictions = worst_difference(loaded, monkeypatch, mixed(loaded))
    assert evictions > 8
    assert worst < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_full_gives_the_tokens_of_generate(family):
    loaded = load(family)
    todo = mixed(loaded, sampling=Sampling())
    for done in list(engine(loaded, "full", slots=3).generate(todo)):
        assert list(done.token_ids) == generated(loaded, done.request)


@pytest.mark.parametrize(
    "method", ["gkv", "h2o", "ada-kv", "laq", "lookaheadkv", "cake", "retention", "text-first", "two methods"]
)
def test_every_way_to_read_a_prompt_equals_the_dense_reference(method, qwen, monkeypatch):
    """Layer by layer, whole, with probes after the prompt, and in the paged layout."""
    loaded = with_tables(qwen)
    worst, evictions = worst_difference(loaded, monkeypatch, mixed(loaded), method=method)
    assert evictions > 0
    assert worst < 1e-4


@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_chunks_split_no_image_and_compression_before_the_question_reads_images_too(prefill, qwen, monkeypatch):
    todo = [dataclasses.replace(r, compress_at=len(r.prompt_ids) - 3) for r in mixed(qwen)]
    worst, evictions = worst_difference(qwen, monkeypatch, todo, prefill=prefill, prefill_chunk=6)
    assert evictions > 8
    assert worst < 1e-4


@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_images_are_processed_once_per_prompt(prefill, qwen):
    """Layer by layer, in chunks that evict, and in a pass for the question after the context."""
    count = []
    request = ask(qwen, 4, (2, 3, 3, 20), (WIDE, SMALL, LARGE), 20)
    images = request.images

    def read():
        count.append(request.doc_id)
        return images.read()

    counted = dataclasses.replace(images, read=read)
    for at in (None, len(request.prompt_ids) - 3):
        asked = dataclasses.replace(request, images=counted, compress_at=at)
        [done] = engine(qwen, "snapkv", prefill=prefill, prefill_chunk=6).generate([asked])
        assert done.usage.evictions > 0
    assert len(count) == 2


@pytest.mark.parametrize("base", ["snapkv-decode(window=4)", "retention"])
def test_no_text_is_evicted_while_an_image_is_held(base, qwen):
    loaded, kept = with_tables(qwen), defaultdict(list)
    todo = mixed(loaded)

    def log(key, seen, layer, heads):
        kept[key].append((seen, [set(head.tolist()) for head in heads]))

    method = make("text-first", {"base": base})
    running = Engine(loaded, method, budget=BUDGET, interval=INTERVAL, slots=2, max_tokens=ROOM, log=log)
    list(running.generate(todo))
    full, lost = 0, 0
    for request in todo:
        inside = {p for a, b in request.images.spans for p in range(a, b)} if request.images else set()
        events = [*kept[noise.signed64(request.noise_key(-1))], *kept[noise.signed64(request.noise_key(0))]]
        gone = defaultdict(set)  # by head, text that an earlier eviction dropped
        for number, (seen, heads) in enumerate(events):
            for head, positions in enumerate(heads):
                place = number % len(qwen.geometry), head
                text = set(range(seen)) - inside - gone[place]
                recent = {p for p in positions if p >= seen - 4}
                if positions & inside - recent:
                    assert text <= positions
                    full += 1
                lost += len(inside - positions) > 0
                gone[place] |= text - positions
    assert full > 0
    assert lost > 0


def test_text_first_bounds_the_cache_where_its_base_does_and_needs_scores_of_all_entries():
    assert [make("text-first", {"base": base}).decode_bounded for base in ("gkv", "duo")] == [True, False]
    with pytest.raises(UserError, match="scores every entry"):
        make("text-first", {"base": "snapkv-decode(compat=reference)"})


def test_without_images_text_first_decides_as_its_base(qwen):
    todo = [ask(qwen, 5, (50,), (), 30), ask(qwen, 6, (9,), (), 40)]
    tokens = [
        {d.request.doc_id: d.token_ids for d in engine(qwen, name).generate(todo)} for name in ("gkv", "text-first")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("method", ["full", "gkv", "ada-kv", "retention", "text-first"])
def test_kept_shares_are_those_of_the_last_eviction(method, qwen):
    loaded, log = with_tables(qwen), KeptHistory()
    lost, done = (
        0,
        list(engine(loaded, method, log=log).generate([*mixed(loaded), ask(loaded, 7, (4, 30), (LARGE,), 1)])),
    )
    for sample in done:
        usage, request = sample.usage, sample.request
        if request.images is None:
            assert (usage.kept_text, usage.kept_images) == (None, None)
            continue
        inside = {p for a, b in request.images.spans for p in range(a, b)}
        seen = len(request.prompt_ids) + len(sample.token_ids) - 1
        keys, texts, shown = [noise.signed64(request.noise_key(i)) for i in (-1, 0)], 0, 0
        for layer in range(len(loaded.geometry)):
            heads = loaded.geometry[layer].kv_heads
            for visible in log.visible(keys, layer, heads, seen + 1)[:, -1, :seen]:  # a token that comes next
                held = set(visible.nonzero().flatten().tolist())
                shown, texts = shown + len(held & inside), texts + len(held - inside)
        count = sum(g.kv_heads for g in loaded.geometry)
        assert usage.kept_images == pytest.approx(shown / count / len(inside))
        assert usage.kept_text == pytest.approx(texts / count / (seen - len(inside)))
        lost += usage.kept_images < 1
    assert (lost > 0) is (method != "full")


@pytest.mark.parametrize("method", ["snapkv-decode", "retention"])
def test_tokens_are_bit_equal_alone_beside_neighbours_and_in_any_slot(method, qwen):
    loaded = with_tables(qwen)
    todo = mixed(loaded, samples=2)

    def tokens(some):
        done = engine(loaded, method, slots=3).generate(some)
        return {(d.request.doc_id, d.sample): (d.token_ids, d.usage.kept_images) for d in done}

    together = tokens(todo)
    loaded.model.model.rope_deltas = torch.tensor([[77]])  # as another user of the model leaves it
    assert tokens(todo[::-1]) == together
    for request in todo:
        alone = dataclasses.replace(request, samples=(1,))
        assert tokens([alone])[request.doc_id, 1] == together[request.doc_id, 1]
    loaded.model.model.rope_deltas = None


@dataclasses.dataclass(frozen=True)
class Talk:
    """A turn in the slot, then a new prompt with images, then a turn in its slot."""

    first: Request
    second: Request

    def follow(self, answers):
        if len(answers) == 2:
            return FollowUp(ids=self.second.prompt_ids, fresh=True, images=self.second.images)
        return FollowUp(ids=(5, 6, 7, 8), fresh=False) if len(answers) < 4 else None


def test_later_turns_keep_the_positions_of_their_prompt(qwen):
    """With the full cache a turn in the slot has the tokens of a prompt that holds all before it."""
    first, second = mixed(qwen, sampling=Sampling())[::2]
    first = dataclasses.replace(first, max_new_tokens=6, conversation=Talk(first, second), max_tokens=ROOM)
    [done] = engine(qwen, "full", slots=1).generate([first])
    turns = [[int(word) for word in turn.split()] for turn in done.turns]
    assert turns[0] == generated(qwen, first)
    assert turns[2] == generated(qwen, dataclasses.replace(second, max_new_tokens=6))
    for request, answer, after in ((first, turns[0], turns[1]), (second, turns[2], turns[3])):
        whole = dataclasses.replace(request, prompt_ids=(*request.prompt_ids, *answer, 5, 6, 7, 8), max_new_tokens=6)
        assert after == generated(qwen, whole)


def test_a_captured_step_waits_for_nothing_and_gives_the_tokens_of_the_cpu(qwen):
    todo = mixed(qwen, sampling=Sampling())
    expected = {d.request.doc_id: d.token_ids for d in engine(qwen, "gkv").generate(todo)}
    with pretended_cuda():
        moved = prepare(load("qwen3_vl").model.to("cuda"), Words())
        running = engine(moved, "gkv", backend="torch", compiled=False)
        assert {d.request.doc_id: d.token_ids for d in running.generate(todo)} == expected
        assert running.decoding == "torch graph"


@pytest.mark.parametrize("method", ["kvzip", "expected-attention", "kvzip+h2o", "text-first(base=expected-attention)"])
def test_methods_that_images_would_mislead_are_refused(method, qwen):
    with pytest.raises(UserError, match="another method for prompts with images"):
        check_images(method, from_label(method))
    running = Engine(qwen, from_label(method), budget=BUDGET, interval=INTERVAL, slots=1, max_tokens=ROOM)
    with pytest.raises(UserError, match="another method for prompts with images"):
        list(running.generate(mixed(qwen)[:1]))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "llama"}, "'m' .*'llama'.* reads text only"),
        ({"model_type": "gemma3", "vision_config": {}}, "earlier tokens attend to later ones"),
        ({"model_type": "mllama", "vision_config": {}}, "does not support images .*'mllama'.*qwen3_vl"),
    ],
)
def test_models_are_refused_from_their_configuration(config, why):
    with pytest.raises(UserError, match=why):
        check_images_of(config, "m")


def test_a_prompt_that_does_not_fit_its_images_is_refused(qwen):
    request = mixed(qwen)[0]
    stray = dataclasses.replace(request, prompt_ids=(*request.prompt_ids, 500, 3))
    with pytest.raises(UserError, match="image token"):
        list(engine(qwen, "full").generate([stray]))
    inside = dataclasses.replace(request, compress_at=request.images.spans[0][0] + 2)
    with pytest.raises(ValueError, match="a part of an image"):
        list(engine(qwen, "gkv").generate([inside]))
    text = build("qwen3")
    with pytest.raises(UserError, match="reads text only"):
        list(engine(text, "full").generate([dataclasses.replace(request, prompt_ids=(1, 2, 3, 4))]))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("qwen3_vl", "full"),
        *((name, "gkv") for name in ("glm4v", "llava_onevision", "qwen2_5_vl", "qwen3_5", "qwen3_vl")),
    ],
)
def test_generate_with_an_eviction_cache_has_the_engine_s_tokens(family, method):
    loaded = load(family)
    options = {"budget": None if method == "full" else BUDGET, "interval": INTERVAL, "max_tokens": ROOM}
    for done in list(engine(loaded, method, slots=3).generate(mixed(loaded, sampling=Sampling()))):
        with EvictionCache(loaded.model, small(method), **options) as cache:
            assert generated(loaded, done.request, past_key_values=cache) == list(done.token_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_grid_thw": None}, "Pass it, as the model.s processor returns it"),
        ({"pixel_values_videos": torch.zeros(1)}, "does not read videos; give images"),
        ({"mm_token_type_ids": torch.tensor([[0, 2]])}, "does not read videos; give images"),
    ],
)
def test_inputs_that_the_cache_does_not_read_are_refused_in_a_line(changes, message, qwen):
    request = next(request for request in mixed(qwen) if request.images)
    given = joined(request.images.read()) | changes
    method, ids = small("snapkv-decode"), torch.tensor([request.prompt_ids])
    with pytest.raises(UserError, match=message):
        BatchImages.of(qwen.model, "snapkv-decode", method, {"input_ids": ids, **given}, [0])


@pytest.mark.parametrize("method", ["gkv", "laq", "text-first", "retention"])
def test_padded_prompts_with_images_keep_their_own_positions(method, qwen):
    loaded = with_tables(qwen)
    asked = [dataclasses.replace(r, max_new_tokens=30) for r in mixed(loaded, sampling=Sampling())]
    todo = [request for request in asked if request.images]
    loaded.model.config._name_or_path = str(loaded.folder)
    expected = {d.request.doc_id: list(d.token_ids) for d in engine(loaded, method, slots=3).generate(todo)}
    longest = max(len(r.prompt_ids) for r in todo)
    ids = torch.tensor([[3] * (longest - len(r.prompt_ids)) + list(r.prompt_ids) for r in todo])
    mask = torch.tensor([[0] * (longest - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in todo])
    given = [joined(request.images.read()) for request in todo]
    images = {name: torch.cat([some[name] for some in given]) for name in given[0]}
    options = {"budget": BUDGET, "interval": INTERVAL, "max_tokens": ROOM, "tokenizer": loaded.tokenizer}
    with EvictionCache(loaded.model, small(method), **options) as cache:
        more = {"past_key_values": cache, "mm_token_type_ids": (ids == 500).int(), **images}
        out = loaded.model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, **more)
    for request, row in zip(todo, out[:, longest:].tolist()):
        answer = expected[request.doc_id]
        assert row[: len(answer)] == answer  # pads follow an end token
