"""criticalkv and defensivekv: norms of projected values, by hand and against slow forms of their equations."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.api import ScoreOut
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.options import OptionError
from kvbench.eviction.select import competing, decide
from kvbench.eviction.terms import value_norm
from kvbench.eviction.terms.value_norm import projected_norms
from kvbench.eviction.view import make_view
from kvbench.registry import methods

CRITICAL, DEFENSIVE = methods.get("criticalkv"), methods.get("defensivekv")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(method, *views):
    return [
        sorted(p[k].tolist())
        for view, verdict in zip(views, decide(method, views))
        for p, k in zip(view.positions[0], verdict.keep[0])
    ]


def test_the_norm_is_the_mean_over_the_group_of_what_each_head_adds(monkeypatch):
    values, matrices = random(2, 2, 7, 3), random(4, 3, 5, seed=1)  # two KV heads, four query heads
    new = NewTokens(layer=0, hidden=values, keys=values, values=values, layer_weights={"o_proj": matrices})
    want = torch.stack(
        [sum((values[:, kv] @ matrices[h]).abs().sum(dim=-1) for h in (2 * kv, 2 * kv + 1)) / 2 for kv in range(2)],
        dim=1,
    )
    torch.testing.assert_close(projected_norms(new), want)
    monkeypatch.setattr(value_norm, "PRODUCT_FLOATS", 10)  # two tokens at a time
    torch.testing.assert_close(projected_norms(new), want)


# criticalkv


def line(votes, norms, budget, heads=1):
    """Entries whose keys are minus their knorm scores, [Hk, N] or [N]."""
    votes, norms = (torch.tensor(x, dtype=torch.float32).view(1, heads, -1) for x in (votes, norms))
    return make_view(-votes[..., None], budget=budget, columns={"value_norm": norms})


VOTES, NORMS = [-1.0, -9.0, -2.0, -3.0, -4.0, -8.0], [1.0, 9.0, 1.0, 1.0, 8.0, 1.0]


def test_a_part_of_the_budget_goes_by_scores_alone():
    """Scores minus the lowest: 8, 0, 7, 6, 5, 1; times the norms: 8, 0, 7, 6, 40, 1."""
    view = line(VOTES, NORMS, 3)
    assert kept(CRITICAL(base="knorm", rho=1.0), view) == [[0, 2, 3]]
    assert kept(CRITICAL(base="knorm", rho=0.0, epsilon=0.0), view) == [[0, 2, 4]]
    assert kept(CRITICAL(base="knorm", rho=0.7), view) == [[0, 2, 4]]
    assert kept(CRITICAL(base="knorm", rho=0.0, epsilon=100.0), view) == [[0, 1, 4]]


def test_protected_entries_use_up_the_first_stage_or_not():
    view = line(VOTES, [1.0, 9.0, 0.1, 0.1, 8.0, 1.0], 4)
    used = CRITICAL(base="knorm(recent=1)", rho=0.5, epsilon=10.0)
    assert kept(used, view) == [[0, 1, 4, 5]]  # the newest, the best score, and two by norm
    apart = CRITICAL(base="knorm(recent=1)", rho=0.5, epsilon=10.0, window_in_stage1=False)
    assert kept(apart, view) == [[0, 2, 4, 5]]  # the newest, the two best scores, and one by norm


def test_scores_of_all_heads_shape_the_budgets_and_norms_do_not():
    votes = [[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, -7.0, -8.0]]
    view = line(votes, [[1.0] * 4, [100.0] * 4], 2, heads=2)
    method = CRITICAL(base="knorm", ada=True, floor_alpha=0.0, rho=0.5)
    sizes = [len(head) for head in kept(method, view)]
    assert sizes == [3, 1]  # no head stays empty
    assert not method.uniform
    assert [len(head) for head in kept(CRITICAL(base="knorm"), view)] == [2, 2]


def test_bases_with_budgets_per_layer_keep_them():
    keys, norms = random(1, 2, 40, 4), random(1, 2, 40, seed=1).abs()
    views = [
        make_view(keys, random(1, 4, 4, 4, seed=i), budget=12, columns={"value_norm": norms}, layer=i, ordinal=i,
                  layer_count=2)
        for i in range(2)
    ]  # fmt: skip
    sizes = [[len(head) for head in kept(m, *views)] for m in (
        CRITICAL(base="pyramidkv(window=4)"), methods.get("pyramidkv")(window=4))]  # fmt: skip
    assert sizes[0] == sizes[1]
    assert sizes[0][0] > sizes[0][-1]


def test_sums_over_a_window_are_divided_by_it():
    """Epsilon is as large beside the votes of 2 queries as beside those of 8 equal ones."""
    keys, query, norms = random(1, 1, 30, 4), random(1, 1, 1, 4, seed=1), random(1, 1, 30, seed=2).abs()
    scores = []
    for window in (2, 8):
        view = make_view(keys, query.expand(-1, -1, window, -1), budget=14, columns={"value_norm": norms})
        view.query_positions = torch.full_like(view.query_positions, 29)
        method = CRITICAL(base=f"snapkv(window={window}, kernel=1)", rho=0.0, epsilon=0.01)
        scores.append(method.score(view).score[0, 0, :22])
    torch.testing.assert_close(scores[0], scores[1])


SUMS = {
    "snapkv(window=4)": 4, "snapkv-decode(window=4)": 1, "gkv(window=4)": 1, "rkv(window=4)": 1,
    "laq(inner=knorm, n=3, w2=4)": 7, "lookaheadkv": 5, "speckv(window=4, n=3)": 1,
    "speckv(window=4, n=3, reduce=mean)": 7, "morphkv(window=4, voters=3)": 3, "morphkv(window=4, fuse=max)": 1,
    "rpc(R=4)": 4, "rpc(R=4, selectors=new)": 1, "caote(form=squared, window=4)": 4, "vase(window=4)": 1, "h2o": 1,
    "ada-kv(base=snapkv(window=4))": 4, "text-first(base=snapkv(window=4))": 4, "chunkkv(base=snapkv(window=4))": 1,
}  # fmt: skip


@pytest.mark.parametrize(("base", "queries"), SUMS.items())
def test_only_sums_over_queries_are_divided_by_their_number(base, queries):
    method = CRITICAL(base=base, rho=0.0, epsilon=0.01)
    columns = {column.name: random(1, 2, 30, seed=i).abs() for i, column in enumerate(method.columns())}
    asked = random(1, 4, method.needs().width, 8, seed=9)
    weights = {"embeddings": torch.zeros(5, 8)}
    view = make_view(random(1, 2, 30, 8), asked, budget=14, columns=columns, weights=weights)
    free = competing(method, view)
    votes = torch.where(free, ScoreOut.of(method.inner.score(view)).score, 0.0)
    wanted = ((votes - votes.amin(dim=(1, 2), keepdim=True)) / queries + 0.01) * columns["value_norm"]
    torch.testing.assert_close(method.score(view).score[free], wanted[free])


def test_ada_kv_counts_entries_that_criticalkv_keeps_in_any_case():
    """With rho 1 each head's best two have an infinite score. The other scores of head 0 are larger than of head 1."""
    votes = [[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], [-11.0, -12.0, -13.0, -14.0, -15.0, -16.0]]
    view = line(votes, [[1.0] * 6] * 2, 2, heads=2)
    method = methods.get("ada-kv")(base="criticalkv(base=knorm, rho=1.0)", floor_alpha=0.0)
    assert kept(method, view) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("base", "wanted"),
    [
        ("full", "a method with a budget"),
        ("snapkv+gkv", "must name one method, not two combined methods"),
        ("retention", "sets each head's budget within its layer"),
        ("headkv", "sets each head's budget within its layer"),
        ("criticalkv", "scores every entry"),
        ("vase(compat=reference)", "scores every entry"),
        ("nothing", "must name a method: "),
    ],
)
def test_bases_that_do_not_serve_are_refused(base, wanted):
    with pytest.raises(OptionError, match=wanted):
        CRITICAL(base=base)


def test_all_else_is_as_the_base_declares_it():
    method = CRITICAL(base="gkv(window=4)")
    assert method.decode_bounded
    assert method.needs().layer_weights == ("o_proj",)
    assert [c.name for c in method.columns()] == ["memory", "value_norm"]
    assert method.reads_tokens
    out = method.score(
        make_view(
            random(1, 1, 20, 4), random(1, 1, 4, 4, seed=1), budget=9,
            columns={"value_norm": torch.ones(1, 1, 20), "memory": torch.full((1, 1, 20), float("nan"))},
        )
    )  # fmt: skip
    assert isinstance(out, ScoreOut)
    assert "memory" in out.columns


# defensivekv


def slow(view, norms, *, window, kernel, mass, most):
    """Scores [Hk, N] of entries in text order, in loops over heads and queries."""
    keys, queries = view.keys[0], view.queries[0]
    heads, n, d = keys.shape
    old = n - window
    group = len(queries) // heads
    paid = torch.zeros(heads, group, window, old)
    for h in range(heads * group):
        for i in range(window):
            logits = keys[h // group, : old + i + 1] @ queries[h, i] / d**0.5
            paid[h // group, h % group, i] = logits.softmax(dim=-1)[:old]
    score, forced = torch.zeros(heads, old), []
    bias = float(paid[..., old - window :].sum(dim=-1).mean())
    for head in range(heads):
        rows = paid[head].flatten(0, 1)
        smooth = torch.nn.functional.avg_pool1d(rows[None], kernel, stride=1, padding=kernel // 2)[0]
        worst = (smooth * (rows.sum(1) / smooth.sum(1))[:, None]).amax(dim=0)
        score[head] = worst.clamp(min=float(worst.mean())) * norms[head, :old] / norms[:, :old].sum(dim=0)
        mean = paid[head].mean(dim=(0, 1))
        ranked, total = mean.argsort(descending=True).tolist(), 0.0
        chosen = []
        for j in ranked:
            total += float(mean[j] / mean.sum())
            if total >= mass - bias:
                break
            chosen.append(j)
        forced.append(chosen[:most])
    best = float(score.max())
    for head, chosen in enumerate(forced):
        score[head, chosen] = best
    return torch.cat([score, torch.full((heads, window), best)], dim=-1)


def defensive_view(budget=20, heads=2, **more):
    keys, queries = random(1, heads, 60, 8), 2 * random(1, 2 * heads, 6, 8, seed=1)
    norms = random(1, heads, 60, seed=2).abs() + 0.1
    return make_view(keys, queries, budget=budget, columns={"value_norm": norms / norms.sum(1, True)}, **more), norms[0]


@pytest.mark.parametrize(("mass", "most"), [(0.9, 3), (0.9, 40), (0.5, 40)])
def test_the_score_is_that_of_the_equations(mass, most):
    view, norms = defensive_view()
    method = DEFENSIVE(window=6, kernel=3, mass=mass, forced=most)
    torch.testing.assert_close(method.score(view)[0], slow(view, norms, window=6, kernel=3, mass=mass, most=most))


def test_forced_entries_follow_from_the_budget():
    """54 entries before the window, a third of 60: at most 54 / 3 - 6 = 12 are forced; none if the window is larger."""
    view, norms = defensive_view(budget=20)
    want = slow(view, norms, window=6, kernel=5, mass=0.9, most=12)
    torch.testing.assert_close(DEFENSIVE(window=6).score(view)[0], want)
    view, norms = defensive_view(budget=7)
    want = slow(view, norms, window=6, kernel=5, mass=0.9, most=0)
    torch.testing.assert_close(DEFENSIVE(window=6).score(view)[0], want)


def test_heads_of_a_layer_or_of_the_model_share_the_budget():
    views = [defensive_view(layer=i, ordinal=i, layer_count=2)[0] for i in range(2)]
    views[1].keys = 3 * views[1].keys
    by_layer = [len(head) for head in kept(DEFENSIVE(window=6), *views)]
    assert sum(by_layer[:2]) == sum(by_layer[2:]) == 40
    assert by_layer[0] != by_layer[1]
    whole = [len(head) for head in kept(DEFENSIVE(window=6, level="model"), *views)]
    assert sum(whole) == 80
    assert sum(whole[:2]) != 40


def test_new_tokens_bring_their_share_of_the_norms():
    values, matrices = random(1, 2, 5, 3), random(4, 3, 6, seed=1)
    new = NewTokens(layer=0, hidden=values, keys=values, values=values, layer_weights={"o_proj": matrices})
    shares = DEFENSIVE().on_tokens(new)["value_norm"]
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(1, 5))
    values[:, :, 2] = 0.0  # as of a padding token whose embedding is zero
    assert DEFENSIVE().on_tokens(new)["value_norm"][:, :, 2].tolist() == [[0.0, 0.0]]
    torch.testing.assert_close(DEFENSIVE(norm="tokens").on_tokens(new)["value_norm"], projected_norms(new))


def test_the_biases_differ():
    view, _ = defensive_view(budget=50)
    scores = [DEFENSIVE(window=6, bias=bias).score(view)[0] for bias in ("released", "window", "off")]
    best = [int((score == score.amax()).sum()) for score in scores]
    assert best[2] > max(best[:2])
