"""Methods around SnapKV's vote: uneven budgets worked out by hand, and what must hold for heads of uneven length."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvbench.errors import UserError
from kvbench.eviction.choose import from_label
from kvbench.eviction.select import decide, protected
from kvbench.eviction.view import make_view
from kvbench.registry import methods

BUDGET, TOTAL = 24, 60
SMALL = "snapkv(window=6, kernel=5)"
RAGGED = {
    "ada-kv": {"base": SMALL},
    "ada-kv plain": {"base": SMALL, "normalize": False, "floor_alpha": 0.5},
    "ada-kv official": {"base": SMALL, "rounding": "official"},
    "ada-kv guarantee": {"base": SMALL, "floor": "guarantee", "normalize": False, "floor_alpha": 0.6},
    "ada-kv pyramidkv": {"base": "pyramidkv(window=6, beta=5)"},
    "ada-kv gkv": {"base": "gkv(window=6)"},
    "ada-kv rkv": {"base": "rkv(window=6)"},
    "ada-kv h2o": {"base": "h2o"},
    "ada-kv knorm": {"base": "knorm"},
    "ada-kv snapkv-decode": {"base": "snapkv-decode(variant=gkv, window=6)"},
    "pyramidkv": {"window": 6, "beta": 5},
    "pyramidkv official": {"window": 6, "beta": 5, "rounding": "official"},
    "pyramidkv kvpress": {"window": 2, "beta": 5, "rounding": "kvpress"},
    "headkv": {"window": 6},
}
LAYERS = 3


@pytest.fixture(params=RAGGED)
def method(request):
    return methods.get(request.param.split()[0])(**RAGGED[request.param])


def model(method, stream, b=3, g=2, junk=0, shuffle=True):
    """Views of the layers of one model, optionally with rows of junk in between."""
    views = []
    for layer in range(LAYERS):
        queries, keys = stream(b=b, g=g, seed=10 + layer)
        generator = torch.Generator().manual_seed(layer)
        positions = torch.arange(TOTAL).expand(*keys.shape[:2], -1)
        if shuffle:
            positions = torch.rand(positions.shape, generator=generator).argsort(dim=-1)
        cached = keys.gather(2, positions[..., None].expand(-1, -1, -1, keys.shape[-1]))
        generator = torch.Generator().manual_seed(100 + layer)
        noise = torch.rand(positions.shape, generator=generator).gather(-1, positions)
        columns = {c.name: torch.where(positions < 30, noise, c.init) for c in method.columns()}
        valid = torch.ones_like(positions, dtype=torch.bool)
        if junk:
            cached, positions, valid = (
                with_junk(x, junk, fill) for x, fill in ((cached, float("nan")), (positions, -1), (valid, False))
            )
            columns = {name: with_junk(c, junk, 1e9) for name, c in columns.items()}
        width = method.needs().width
        views.append(
            make_view(
                cached,
                queries[:, :, TOTAL - width : TOTAL],
                budget=BUDGET,
                positions=positions,
                valid=valid,
                columns=columns,
                seen=TOTAL,
                prompt_len=TOTAL,
                layer=layer,
                ordinal=layer,
                layer_count=LAYERS,
                weights={"importance": torch.tensor([[1.0, 2, 3, 9], [1, 1, 1, 1], [0, 0, 5, 0]])[:, : 2 * g]},
            )
        )
    return views


def with_junk(x, count, fill):
    pad = torch.full_like(x[:, :, :count], fill)
    return torch.cat([x[:, :, :4], pad, x[:, :, 4:]], dim=2)


def pick(view, rows):
    changes = {
        f.name: getattr(view, f.name)[rows]
        for f in dataclasses.fields(view)
        if isinstance(getattr(view, f.name), torch.Tensor)
    }
    return dataclasses.replace(view, **changes, columns={name: c[rows] for name, c in view.columns.items()})


def keeps(method, views):
    return [verdict.keep for verdict in decide(method, views)]


def sets(keep, view):
    return [[set(view.positions[i, h][keep[i, h]].tolist()) for h in range(keep.shape[1])] for i in range(len(keep))]


def test_totals(method, stream):
    views = model(method, stream)
    sizes = torch.stack([keep.sum(dim=-1) for keep in keeps(method, views)], dim=1)  # [b, L, Hk]
    loose = getattr(method, "rounding", "exact") != "exact"
    total = sizes.sum(dim=(1, 2))
    assert bool((total <= LAYERS * 2 * BUDGET).all())
    assert loose or bool((total == LAYERS * 2 * BUDGET).all())
    assert bool((total > 0.9 * LAYERS * 2 * BUDGET).all())
    if type(method).__name__ == "AdaKV" and method.inner.uniform and not loose:
        assert bool((sizes.sum(dim=-1) == 2 * BUDGET).all())
    if type(method).__name__ == "PyramidKV":
        assert bool((sizes == sizes[..., :1]).all())
        assert bool((sizes.diff(dim=1) < 0).all())
    else:
        assert sizes.unique().numel() > 2  # uneven, as is the point


def test_protected_entries_stay(method, stream):
    for view, keep in zip(views := model(method, stream), keeps(method, views)):
        must = protected(method.protect(BUDGET), view.positions, view.seen, view.prompt_len, view.valid)
        assert must is None or bool(keep[must].all())
        assert bool((keep.sum(dim=-1) > 0).all())


def test_padding_does_not_matter(method, stream):
    plain = model(method, stream)
    padded = model(method, stream, junk=7)
    for a, b, x, y in zip(keeps(method, plain), keeps(method, padded), plain, padded):
        assert sets(a, x) == sets(b, y)


def test_storage_order_does_not_matter(method, stream):
    plain, shuffled = model(method, stream, shuffle=False), model(method, stream)
    for a, b, x, y in zip(keeps(method, plain), keeps(method, shuffled), plain, shuffled):
        assert sets(a, x) == sets(b, y)


def test_permuting_the_batch_permutes_the_result(method, stream):
    views = model(method, stream, b=4)
    order = [2, 0, 3, 1]
    permuted = keeps(method, [pick(view, order) for view in views])
    assert all(torch.equal(a, b[order]) for a, b in zip(permuted, keeps(method, views)))
    alone = keeps(method, [pick(view, [1]) for view in views])
    assert all(torch.equal(a[0], b[1]) for a, b in zip(alone, keeps(method, views)))


def test_one_query_head_for_each_kv_head(method, stream):
    for keep in keeps(method, model(method, stream, g=1)):
        assert keep.shape[1] == 2


def test_one_layer_alone_decides_as_among_all(method, stream):
    views = model(method, stream)
    together = keeps(method, views)
    if method.joint:
        pytest.skip("needs all layers")
    assert method.layerwise
    assert all(torch.equal(keeps(method, [view])[0], keep) for view, keep in zip(views, together))


# snapkv


def test_snapkv_reduces_the_group_before_pooling():
    """Query heads 0 and 1 look at different keys, so the mean of their maxima would be another score."""
    keys = torch.tensor([[4.0, 0], [0, 0], [0, 0], [0, 4], [0, 0]]).view(1, 1, 5, 2)
    queries = torch.tensor([[1.0, 0], [0, 1]]).view(1, 2, 1, 2)
    view = make_view(keys, queries, budget=3)
    score = methods.get("snapkv")(window=1, kernel=3).score(view)[0, 0]
    attention = view.attend(reduce_g=None, reduce_q="sum")[0, 0]  # [g, N]
    mean = attention.mean(dim=0)
    torch.testing.assert_close(score[:4], torch.stack([mean[0:2].amax(), mean[0:3].amax(), mean[1:4].amax(), mean[3]]))
    largest = methods.get("snapkv")(window=1, kernel=1, reduce_g="max").score(view)[0, 0]
    torch.testing.assert_close(largest[:4], attention[:, :4].amax(dim=0))


def test_snapkv_takes_the_sum_over_the_window_before_the_maximum_over_the_group():
    keys = torch.eye(4)[None, None] * 8
    one, other = torch.tensor([[1.0, 0, 0, 0], [1.0, 0, 0, 0]]), torch.tensor([[0.0, 1, 0, 0], [1.0, 0, 0, 0]])
    view = make_view(keys, torch.stack([one, other])[None], budget=3)
    score = methods.get("snapkv")(window=2, kernel=1, reduce_g="max").score(view)[0, 0]
    torch.testing.assert_close(score[:2], view.attend(reduce_g=None, reduce_q="sum")[0, 0].amax(dim=0)[:2])


def test_snapkv_evicts_once():
    method = methods.get("snapkv")()
    assert not method.decode_bounded
    assert method.min_budget() == 33
    assert method.uniform
    assert methods.get("snapkv")(heads="query").per_query_head


# pyramidkv


def sizes(budget, tokens, layers, **options):
    return methods.get("pyramidkv")(**{"window": 8, "beta": 10} | options).layer_sizes(budget, tokens, layers)


def test_pyramid_by_hand():
    """base 100: from 190 down to 10 in steps of 45, the window of 8 besides."""
    assert sizes(108, 1000, 5) == [198, 153, 108, 63, 18]
    assert sizes(108, 1000, 5, rounding="official") == [198, 153, 108, 63, 18]
    assert sizes(108, 1000, 1) == [108]


def test_a_pyramid_is_cut_by_the_prompt():
    """base 100, window 20: the first layer takes 190 older tokens, or the 185 that there are and the last 15 for 10."""
    assert sizes(120, 210, 3, window=20) == [210, 120, 30]
    assert sizes(120, 205, 3, window=20) == [205, 120, 35]
    assert sizes(120, 199, 3, window=20) == [120] * 3  # below 2 base the released code is uniform
    assert sizes(120, 90, 3, window=20) == [90] * 3  # nothing to evict


@pytest.mark.parametrize("rounding", ["exact", "official", "kvpress"])
def test_pyramids_keep_the_budget(rounding):
    for budget in range(12, 90, 7):
        for tokens in (60, 91, 150, 400):
            for layers in (1, 2, 7, 28):
                got = sizes(budget, tokens, layers, rounding=rounding, beta=5)
                most = min(budget, tokens) * layers
                assert sum(got) <= most
                assert rounding != "exact" or sum(got) == most
                assert min(got) >= 8
                assert max(got) <= tokens


def test_pyramid_of_kvpress():
    """Budgets with the window in them, rounded one by one; uniform where the last layer had less than the window."""
    assert sizes(104, 260, 4, beta=5, rounding="kvpress") == [187, 132, 76, 21]
    assert sizes(48, 120, 3, window=32, beta=20, rounding="kvpress") == [48] * 3


# ada-kv


def ada(**options):
    return methods.get("ada-kv")(**{"base": "knorm", "floor_alpha": 0.0, "normalize": False} | options)


def norms(*heads):
    """A view whose knorm scores are minus these numbers."""
    return make_view(torch.tensor(heads).float()[None, :, :, None], budget=3)


def lengths(method, view):
    return keeps(method, [view])[0].sum(dim=-1)[0].tolist()


def test_ada_kv_shares_by_the_best_of_all_heads():
    view = norms([1, 2, 3, 4, 9, 9], [5, 6, 9, 9, 9, 9])
    assert lengths(ada(), view) == [4, 2]
    assert lengths(ada(floor_alpha=1.0), view) == [3, 3]
    assert lengths(ada(floor_alpha=0.5), view) == [4, 2]  # 3.5 and 2.5
    [keep] = keeps(ada(), [view])
    assert keep[0].nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]]


def test_no_head_of_ada_kv_is_left_empty():
    view = norms([1, 1, 1, 1, 1, 1], [9, 9, 9, 9, 9, 9])
    assert lengths(ada(), view) == [5, 1]
    assert lengths(ada(floor="guarantee", floor_alpha=0.7), view) == [4, 2]


def test_ada_kv_takes_what_a_short_head_cannot_fill():
    view = norms([1, 1, 9, 9, 9, 9], [2, 2, 3, 3, 3, 9])
    view.valid = torch.tensor([[[True, True, False, False, False, False], [True] * 6]])
    assert lengths(ada(floor_alpha=1.0), view) == [2, 4]
    assert lengths(ada(floor="guarantee", floor_alpha=1.0), view) == [2, 4]


def test_normalize_weighs_a_head_by_its_concentration():
    """One head has all its attention on few keys, in the other it is spread; scores of the second are higher."""
    concentrated = torch.tensor([5.0, 5, 5, 0, 0, 0, 0, 0])
    spread = torch.tensor([5.2, 5.2, 5.2, 5.2, 5.2, 5.2, 5.2, 5.2])
    view = make_view(torch.zeros(1, 2, 8, 1), budget=3, columns={"acc": torch.stack([concentrated, spread])[None]})
    assert lengths(ada(base="h2o(recent=0)"), view) == [1, 5]
    assert lengths(ada(base="h2o(recent=0)", normalize=True), view) == [3, 3]


def test_normalize_keeps_heads_comparable_where_scores_are_negative():
    """The layer's lowest score is taken off, so that equal scores stay equal whatever their sign."""
    view = norms([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert lengths(ada(normalize=True), view) == [3, 3]
    view = norms([1, 1, 1, 6, 6, 6], [2, 2, 2, 2, 2, 2])
    assert lengths(ada(normalize=True), view) == [3, 3]


def test_official_rounding_loses_entries_but_never_gains_any():
    generator = torch.Generator().manual_seed(3)
    seen = set()
    for budget in range(10, 22):
        view = make_view(torch.rand(1, 5, 40, 4, generator=generator), budget=budget)
        total = sum(lengths(ada(floor_alpha=0.3, rounding="official"), view))
        seen.add(total - 5 * budget)
    assert max(seen) <= 0
    assert min(seen) < 0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_guarantee_is_a_flat_choice_with_safe_entries(alpha):
    """The rule of kvpress, entry by entry: each head's best int(alpha C) are safe, the best of all others follow."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(1, 4, 30, 3, generator=generator) * torch.tensor([1.0, 2, 3, 4]).view(1, 4, 1, 1)
    view = make_view(keys, budget=11)
    score = -keys.norm(dim=-1)[0]
    safe = score.topk(int(11 * alpha), dim=-1).indices
    flat = score.scatter(-1, safe, torch.inf).flatten().topk(44).indices
    want = torch.zeros(120, dtype=torch.bool).scatter_(0, flat, True).view(4, 30)
    assert alpha > 0 or bool((want.sum(dim=-1) > 0).all())
    assert torch.equal(keeps(ada(floor="guarantee", floor_alpha=alpha), [view])[0][0], want)


def test_ada_kv_is_its_base_in_all_else():
    method = methods.get("ada-kv")(base="gkv(window=4)")
    assert method.needs() == method.inner.needs()
    assert method.columns() == method.inner.columns()
    assert method.trigger(7) == method.inner.trigger(7)
    assert method.decode_bounded
    assert not method.uniform
    assert method.min_budget() == 5
    assert methods.get("ada-kv")(base="snapkv(heads=query)").per_query_head


@pytest.mark.parametrize(
    "base", ["nosuch", "snapkv(wind=3)", "full", "ada-kv", "snapkv+gkv", "kvzip", "headkv", "rkv(compat=reference)"]
)
def test_what_ada_kv_cannot_wrap(base):
    with pytest.raises(UserError, match="base"):
        methods.get("ada-kv")(base=base)
    with pytest.raises(UserError, match="rounding"):
        methods.get("ada-kv")(floor="guarantee", rounding="official")


def test_labels_nest():
    method = from_label("ada-kv(base=snapkv(window=16, kernel=5), floor_alpha=0.5)")
    assert (method.floor_alpha, method.inner.window, method.inner.kernel) == (0.5, 16, 5)
