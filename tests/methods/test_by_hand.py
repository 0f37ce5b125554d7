"""Sets and scores that can be worked out on paper."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.eviction.api import ScoreOut
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods


def kept(method, view):
    keep = decide(method, [view])[0].keep
    return sorted(view.positions[0, 0][keep[0, 0]].tolist())


def line(n, d=2):
    return torch.ones(1, 1, n, d)


def test_streaming_keeps_sinks_and_the_newest():
    assert kept(methods.get("streaming-llm")(sinks=2), make_view(line(10), budget=5)) == [0, 1, 7, 8, 9]
    assert kept(methods.get("streaming-llm")(sinks=0), make_view(line(10), budget=3)) == [7, 8, 9]


def test_knorm_keeps_small_norms():
    keys = torch.tensor([3.0, -1.0, 2.0, 5.0, -0.5, 4.0]).view(1, 1, 6, 1)
    assert kept(methods.get("knorm")(), make_view(keys, budget=3)) == [1, 2, 4]
    assert kept(methods.get("knorm")(recent=1), make_view(keys, budget=3)) == [1, 4, 5]


def test_random_keeps_the_newest_and_repeats():
    method = methods.get("random")(recent=3)
    first = kept(method, make_view(line(40), budget=10))
    assert first[-3:] == [37, 38, 39]
    assert first == kept(method, make_view(line(40), budget=10))
    view = make_view(line(40), budget=10)
    view.eviction_index += 1
    assert first != kept(method, view)


def test_random_is_uniform_over_the_older():
    counts = torch.zeros(12)
    for key in range(300):
        view = make_view(line(12), budget=6)
        view.noise_key = torch.tensor([key])
        counts[kept(methods.get("random")(recent=2), view)] += 1
    assert counts[10:].tolist() == [300, 300]
    assert bool((counts[:10] / 300 - 0.4).abs().max() < 0.12)


def test_tova_keeps_what_the_newest_query_sees():
    keys = torch.tensor([[0.0], [4.0], [1.0], [3.0], [-9.0]]).view(1, 1, 5, 1)
    query = torch.ones(1, 1, 1, 1)
    assert kept(methods.get("tova")(), make_view(keys, query, budget=2)) == [1, 3]
    assert kept(methods.get("tova")(recent=1), make_view(keys, query, budget=2)) == [1, 4]


def test_tova_takes_the_mean_over_heads_whatever_their_storage_order():
    keys = torch.tensor([[[5.0], [0.0], [1.0]], [[0.0], [0.0], [4.0]]]).view(1, 2, 3, 1)
    query = torch.ones(1, 2, 1, 1)
    score = methods.get("tova")().score(make_view(keys, query, budget=2))
    torch.testing.assert_close(score[0, 0], keys.softmax(2)[0].mean(0)[:, 0])
    torch.testing.assert_close(score[0, 0], score[0, 1])
    swap = torch.tensor([2, 0, 1])
    moved = torch.stack([keys[0, 0], keys[0, 1, swap]])[None]
    positions = torch.stack([torch.arange(3), swap])[None]
    again = methods.get("tova")().score(make_view(moved, query, positions=positions, budget=2))
    torch.testing.assert_close(again[0, 1], score[0, 1, swap])


def test_h2o_sums_attention_of_all_queries():
    """Equal keys: query i gives 1/(i+1) to each key so far, so key j has H_n - H_j."""
    view = make_view(line(4), torch.zeros(1, 1, 4, 2), columns={"acc": torch.zeros(1, 1, 4)}, budget=3)
    method = methods.get("h2o")(recent=1)
    acc = method.observe(view)["acc"][0, 0]
    harmonic = [1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]
    torch.testing.assert_close(acc, torch.tensor(harmonic))
    view.columns = {"acc": acc.view(1, 1, 4)}
    assert kept(method, view) == [0, 1, 3]


def test_h2o_in_two_blocks_is_h2o_in_one():
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(1, 4, 20, 8, generator=generator), torch.randn(1, 2, 20, 8, generator=generator)
    method = methods.get("h2o")()
    once = method.observe(make_view(keys, queries, columns={"acc": torch.zeros(1, 2, 20)}, budget=9))["acc"]
    half = make_view(keys[:, :, :12], queries[:, :, :12], columns={"acc": torch.zeros(1, 2, 12)}, budget=9)
    acc = torch.cat([method.observe(half)["acc"], torch.zeros(1, 2, 8)], dim=-1)
    twice = method.observe(make_view(keys, queries[:, :, 12:], columns={"acc": acc}, budget=9))["acc"]
    torch.testing.assert_close(twice, once)


@pytest.mark.parametrize(
    ("recent", "budget", "want"), [(0.5, 48, 24), (0.5, 7, 3), (0.25, 48, 12), (0, 48, 0), (1, 48, 1), (16, 48, 16)]
)
def test_h2o_recent_is_a_share_or_a_number(recent, budget, want):
    assert methods.get("h2o")(recent=recent).protect(budget).recent == want


def test_snapkv_variants_have_their_own_defaults():
    needs = {v: methods.get("snapkv-decode")(variant=v).needs().window for v in ("rkv", "gkv")}
    assert needs == {"rkv": 8, "gkv": 16}
    assert methods.get("snapkv-decode")(variant="gkv", window=4).protect(64).recent == 4
    with pytest.raises(UserError, match="variant=rkv"):
        methods.get("snapkv-decode")(variant="gkv", compat="reference")


def test_snapkv_variants_are_different_methods():
    """The rkv form compares a key with older keys only, the gkv form also with the window."""
    keys = torch.tensor([1.0, 1.0, 0.0, 50.0]).view(1, 1, 4, 1)
    view = make_view(keys, torch.ones(1, 1, 1, 1), budget=2)
    rkv = methods.get("snapkv-decode")(variant="rkv", window=1, kernel=1).score(view).score[0, 0, :3]
    gkv = methods.get("snapkv-decode")(variant="gkv", window=1, kernel=1).score(view).score[0, 0, :3]
    assert float(rkv.sum()) == pytest.approx(1)
    assert float(gkv.sum()) < 1e-6


def test_rkv_evicts_a_copy_before_its_original_idea():
    """Three copies of one key: with attention out of play, the newest copy survives the two older ones."""
    keys = torch.eye(16)[None, None].clone()
    keys[0, 0, [2, 5, 9]] = keys[0, 0, 2].clone()
    view = make_view(keys, torch.zeros(1, 1, 2, 16), budget=14)
    assert kept(methods.get("rkv")(window=2, lam=0.0), view) == [p for p in range(16) if p not in (2, 5)]


def gkv_score(view, **options):
    out = methods.get("gkv")(window=2, redundancy=False, **options).score(view)
    assert isinstance(out, ScoreOut)
    return out.score[..., :-2]


@pytest.fixture
def gkv_view():
    generator = torch.Generator().manual_seed(2)
    keys, queries = torch.randn(1, 2, 10, 8, generator=generator), torch.randn(1, 4, 2, 8, generator=generator)
    memory = torch.rand(1, 2, 10, generator=generator)
    memory[..., 5:] = torch.nan
    return make_view(keys, queries, columns={"memory": memory}, budget=6)


def test_gkv_forgets_as_alpha_goes_to_zero(gkv_view):
    local = gkv_score(gkv_view, form="local")
    for form in ("max", "sum"):
        torch.testing.assert_close(gkv_score(gkv_view, form=form, alpha=1e-9), local)
    assert float(local.amax()) == 1.0


def test_gkv_forms(gkv_view):
    local, memory = gkv_score(gkv_view, form="local"), gkv_view.columns["memory"][..., :8]
    old = ~memory.isnan()
    want = {"max": torch.maximum(0.8 * memory, local), "mean": 0.8 * memory + 0.2 * local, "sum": 0.8 * memory + local}
    for form, merged in want.items():
        torch.testing.assert_close(gkv_score(gkv_view, form=form), torch.where(old, merged, local))


def test_gkv_on_a_static_cache_adds_up_attention(gkv_view):
    """`sum`, alpha 1, no norm: n equal evictions give n times the local score."""
    method = methods.get("gkv")(window=2, redundancy=False, form="sum", alpha=1.0, norm=False)
    gkv_view.columns = {"memory": torch.full((1, 2, 10), torch.nan)}
    for _ in range(3):
        out = method.score(gkv_view)
        gkv_view.columns = out.columns
    local = gkv_view.attend(reduce_g="max", reduce_q="mean")[..., :8]
    torch.testing.assert_close(out.score[..., :8], 3 * local)


def test_gkv_pools_the_ranking_but_not_the_memory(gkv_view):
    plain = methods.get("gkv")(window=2, redundancy=False).score(gkv_view)
    pooled = methods.get("gkv")(window=2, redundancy=False, kernel=3).score(gkv_view)
    assert torch.equal(plain.columns["memory"].nan_to_num(-1), pooled.columns["memory"].nan_to_num(-1))
    assert not torch.equal(plain.score, pooled.score)


def test_gkv_with_all_weight_on_redundancy_or_none(gkv_view):
    out = methods.get("gkv")(window=2, lam=1.0).score(gkv_view)
    torch.testing.assert_close(out.score[..., :8], gkv_score(gkv_view))
    assert not methods.get("gkv")(window=2, lam=0.0).score(gkv_view).score.isnan().any()


def test_full_evicts_nothing():
    full = methods.get("full")()
    assert not full.evicts
    assert not full.trigger(128).full(10**9, 1)
    assert full.trigger(128).growth is None
