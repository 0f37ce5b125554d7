"""pyramidinfer: the sizes of layers, nested choices, and the score by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.models import build

from kvbench.engine.loop import Engine
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.records import Request
from kvbench.registry import methods


def views(count, tokens=24, budget=10, window=3):
    draw = torch.Generator().manual_seed(0)
    for layer in range(count):
        keys = torch.randn(2, 2, tokens, 4, generator=draw)
        queries = torch.randn(2, 4, window, 4, generator=draw)
        yield make_view(keys, queries, budget=budget, layer=layer, ordinal=layer, layer_count=count, prompt_len=tokens)


def test_layers_shrink_as_the_schedule_says_and_fill_the_budget():
    method = methods.get("pyramidinfer")(window=8, sinks=1, decay=0.5)
    keeps = [decision.keep for decision in decide(method, list(views(4, tokens=60, budget=20, window=8)))]
    sizes = [keep.sum(dim=-1) for keep in keeps]
    assert all(bool((size == size[0, 0]).all()) for size in sizes)
    # r = 1, 0.927, 0.75: shares 1, 1, 0.927, 0.695 of 48 entries, and the window of 8 in every layer
    assert [int(size[0, 0]) for size in sizes] == [21, 21, 21, 17]


def test_each_layer_keeps_a_part_of_what_the_layer_below_keeps():
    method = methods.get("pyramidinfer")(window=3, sinks=1, decay=0.5)
    keeps = [decision.keep for decision in decide(method, list(views(4)))]
    for below, above in pairwise(keeps):
        assert not (above & ~below).any()
    assert bool(keeps[-1][..., [0, 21, 22, 23]].all())
    best = [method.score(view)[..., 1:21].topk(3).indices + 1 for view in views(4)]  # without the layers below
    assert not all(bool(keep.gather(-1, top).all()) for keep, top in zip(keeps, best, strict=True))
    assert all(torch.equal(keep[:, 0], keep[:, 1]) for keep in keeps)


def test_the_score_is_a_rising_mean_over_queries_and_heads():
    [view] = views(1)
    logits = torch.einsum("bkgwd,bknd->bkgwn", view.queries.unflatten(1, (2, 2)), view.keys) / 2
    seen = view.positions[:, :, None, None] <= view.query_positions[:, None, None, :, None]
    paid = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    wanted = (paid * torch.tensor([1.0, 1.5, 2.0])[:, None]).mean(dim=(1, 2, 3))
    score = methods.get("pyramidinfer")(window=3, rise=2.0).score(view)
    torch.testing.assert_close(score, wanted[:, None].expand_as(score))


@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_the_engine_keeps_nested_tokens(prefill):
    kept = {}
    engine = Engine(
        build("llama"),
        methods.get("pyramidinfer")(window=4),
        budget=20,
        interval=8,
        slots=1,
        max_tokens=120,
        prefill=prefill,
        prefill_chunk=16,
        log=lambda _, seen, layer, heads: kept.setdefault(seen, {}).update({layer: heads}),
    )
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=tuple(range(3, 63)), max_new_tokens=20)]))
    assert (len(kept) > 1) == (prefill == "chunked")
    for layers in kept.values():
        sets = [{tuple(head.tolist()) for head in heads} for _, heads in sorted(layers.items())]
        assert all(len(tokens) == 1 for tokens in sets)
        tokens = [set(next(iter(of_heads))) for of_heads in sets]
        assert sum(map(len, tokens)) == 20 * len(tokens)
        assert all(above <= below for below, above in pairwise(tokens))
