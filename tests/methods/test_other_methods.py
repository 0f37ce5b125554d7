"""cake, morphkv, rpc, duo, keydiff and expected attention: small cases by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction.api import Allocation
from kvbench.eviction.rope import Rope
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods


def column(*values):
    """One head of one-dimensional keys."""
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)


def kept(method, *views):
    """Positions that each head of each view keeps, the first sequence's."""
    return [
        sorted(p[k].tolist())
        for view, verdict in zip(views, decide(method, views))
        for p, k in zip(view.positions[0], verdict.keep[0])
    ]


def allocation(budget, held, *, seen, prompt_len, stats=None, weights=None):
    """Of one sequence; held [L, Hk]."""
    layers = tuple(range(len(held)))
    return Allocation(
        budget=budget,
        layers=layers,
        ordinals=layers,
        layer_count=len(held),
        query_heads=len(held[0]),
        held=torch.tensor([held]),
        seen=torch.tensor([seen]),
        prompt_len=torch.tensor([prompt_len]),
        stats=stats or {},
        weights=weights or {},
    )


# keydiff


def test_keydiff_keeps_the_odd_direction_whatever_the_norms():
    keys = torch.tensor([[1.0, 0.0], [5.0, 0.0], [0.0, 0.1], [9.0, 0.0], [2.0, 0.1]]).view(1, 1, 5, 2)
    score = methods.get("keydiff")().score(make_view(keys, budget=2))[0, 0]
    units = torch.nn.functional.normalize(keys[0, 0], dim=-1)
    torch.testing.assert_close(score, -torch.cosine_similarity(keys[0, 0], units.mean(0)[None], dim=-1))
    assert kept(methods.get("keydiff")(), make_view(keys, budget=2)) == [[2, 3]]  # 0, 1 and 3 tie
    assert kept(methods.get("keydiff")(recent=1), make_view(keys, budget=2)) == [[2, 4]]
    assert kept(methods.get("keydiff")(recent=2), make_view(keys, budget=3)) == [[2, 3, 4]]


# morphkv


def test_morphkv_lets_the_window_before_the_current_token_vote():
    """Query 4 looks for token 0, query 5 for token 2; the current query 6 looks for token 1 and does not vote."""
    keys = torch.eye(4)[[0, 1, 2, 3, 3, 3, 3]].view(1, 1, 7, 4)
    queries = 8 * torch.eye(4)[[3, 3, 3, 3, 0, 2, 1]].view(1, 1, 7, 4)
    method = methods.get("morphkv")(window=2)
    view = make_view(keys, queries[:, :, -3:], budget=5)
    assert method.needs().width == 3
    assert method.min_budget() == 4
    assert kept(method, view) == [[0, 2, 4, 5, 6]]
    newest = methods.get("morphkv")(window=2, voters=1)
    assert kept(newest, replace(view, budget=4)) == [[2, 4, 5, 6]]


@pytest.mark.parametrize(("form", "fuse"), [("llama", "sum"), ("llama", "max"), ("mistral", "sum"), ("mistral", "max")])
def test_morphkv_forms(form, fuse):
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(1, 2, 12, 4, generator=generator), torch.randn(1, 4, 12, 4, generator=generator)
    score = methods.get("morphkv")(window=3, form=form, fuse=fuse).score(make_view(keys, queries[:, :, -4:], budget=9))
    for head in range(2):
        logits = queries[0, 2 * head : 2 * head + 2, 8:11] @ keys[0, head, :8].T / 2  # [g, w, 8]
        rows = logits.sum(0).softmax(-1) if form == "llama" else logits.softmax(-1).amax(0)
        torch.testing.assert_close(score[0, head, :8], rows.sum(0) if fuse == "sum" else rows.amax(0))


def test_morphkv_refuses_more_voters_than_its_window():
    with pytest.raises(UserError, match="voters"):
        methods.get("morphkv")(window=4, voters=5)


# rpc


def test_rpc_native_grows_by_its_ratio():
    method = methods.get("rpc")(form="native", P=8, R=2, c=4.0)
    assert [method.allowed(None, 5, 5 + n, 0) for n in (0, 9, 10, 17, 18, 26)] == [7, 7, 9, 9, 11, 13]
    trigger = method.trigger(128)
    assert [clock for clock in range(30) if trigger.due(clock)] == [10, 18, 26]
    assert not method.takes_budget
    assert not method.decode_bounded
    assert methods.get("rpc")().takes_budget
    assert methods.get("rpc")().decode_bounded


def test_rpc_native_keeps_the_prompt_and_what_the_newest_look_at():
    method = methods.get("rpc")(form="native", P=6, R=2, c=3.0, kernel=1)
    keys = column(9, 9, 9, 0, 2, 1, 0, 3, 0, 9, 9)  # prompt of 3, 6 generated, 2 newest
    view = make_view(keys, torch.ones(1, 1, 2, 1), budget=method.allowed(None, 3, 11, 0), prompt_len=3)
    assert kept(method, view) == [[0, 1, 2, 4, 7, 9, 10]]


def test_rpc_fixed_gives_up_generated_tokens_before_the_prompt():
    method = methods.get("rpc")(R=2, kernel=1)
    keys = column(-30, 0, -20, 0, 2, 1, 0, 3, 0, 9, 9)  # the prompt attracts no attention, yet it stays
    view = make_view(keys, torch.ones(1, 1, 2, 1), budget=6, prompt_len=3)
    assert kept(method, view) == [[0, 1, 2, 7, 9, 10]]
    assert kept(method, replace(view, budget=5)) == [[0, 1, 2, 9, 10]]
    assert kept(method, replace(view, budget=4)) == [[1, 2, 9, 10]]  # and goes by its own vote
    whole_prompt = make_view(keys, torch.ones(1, 1, 2, 1), budget=5, prompt_len=11)
    assert kept(method, whole_prompt) == [[4, 5, 7, 9, 10]]


def test_rpc_votes():
    """Softmax over the middle only, summed over R queries, mean over heads, then zero-padded average pooling."""
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(1, 2, 12, 4, generator=generator), torch.randn(1, 4, 12, 4, generator=generator)
    view = make_view(keys, queries[:, :, -3:], budget=9, prompt_len=4)
    logits = (queries[0, :, 9:].view(2, 2, 3, 4) @ keys[0, :, None, 4:9].transpose(-1, -2)) / 2
    pool = torch.nn.AvgPool1d(3, 1, 1)
    for options, rows in (({}, slice(None)), ({"selectors": "new"}, slice(2, 3)), ({"compat": "reference"}, [1, 2, 2])):
        votes = logits.softmax(-1)[:, :, rows].sum(2).mean(1)  # [Hk, 5]
        group = methods.get("rpc")(form="native", R=3, kernel=3, aggregate="group", **options).score(view)
        torch.testing.assert_close(group[0, :, 4:9], pool(votes))
        everyone = methods.get("rpc")(form="native", R=3, kernel=3, **options).score(view)
        torch.testing.assert_close(everyone[0, :, 4:9], pool(votes.mean(0, keepdim=True)).expand(2, -1))


# duo

ALPHA = {"alpha": torch.tensor([[0.9, 0.1], [0.5, 0.3]])}


def duo_views(method, total, prompt_len, budget, held=None):
    allowed = method.allowed(budget, prompt_len, total, 0)
    keys = torch.zeros(1, 2, total, 1)
    more = {"weights": ALPHA, "layer_count": 2, "prompt_len": prompt_len, "budget": allowed}
    return [make_view(keys, layer=i, ordinal=i, **more) for i in range(2)]


def test_duo_streams_the_given_share_of_all_heads():
    method = methods.get("duo")(sinks=2, recent=3, sparsity=0.5)
    everything, streaming = list(range(12)), [0, 1, 9, 10, 11]
    views = duo_views(method, 12, 12, None)
    assert views[0].budget == math.ceil((5 + 12) / 2)
    assert kept(method, *views) == [everything, streaming, everything, streaming]
    assert kept(replace(method, sparsity=0.3), *duo_views(replace(method, sparsity=0.3), 12, 12, None))[1::2] == [
        streaming,
        streaming,  # at least the share
    ]
    assert not method.takes_budget
    assert not method.decode_bounded


def test_duo_pays_for_as_many_retrieval_heads_as_the_budget_allows():
    method = methods.get("duo")(sinks=2, recent=3)
    sizes = {c: [len(row) for row in kept(method, *duo_views(method, 12, 12, c))] for c in (5, 6, 7, 8, 9, 11, 12)}
    # Four heads of which R keep 12 and the others 5: the mean is 5 + 7 R / 4.
    assert sizes[5] == sizes[6] == [5, 5, 5, 5]
    assert sizes[7] == sizes[8] == [12, 5, 5, 5]
    assert sizes[9] == [12, 5, 12, 5]
    assert sizes[11] == [12, 5, 12, 12]
    assert sizes[12] == [12, 12, 12, 12]


def test_duo_shrinks_streaming_heads_to_a_small_budget():
    method = methods.get("duo")(sinks=2, recent=6)
    assert kept(method, *duo_views(method, 12, 12, 4))[0] == [0, 9, 10, 11]
    assert kept(method, *duo_views(method, 12, 12, method.min_budget()))[0] == [0, 11]
    assert kept(replace(method, sinks=0), *duo_views(replace(method, sinks=0), 12, 12, 1))[0] == [11]


@pytest.mark.parametrize(("budget", "sparsity"), [(7, None), (9, None), (11, None), (None, 0.5)])
def test_duo_keeps_its_assignment_while_decoding(budget, sparsity):
    method = methods.get("duo")(sinks=2, recent=3, sparsity=sparsity)
    prompt = [len(row) for row in kept(method, *duo_views(method, 12, 12, budget))]
    for seen in (13, 20, 40):
        held = [size + seen - 12 for size in prompt]
        now = method.quotas(
            allocation(
                method.allowed(budget, 12, seen, 1), [held[:2], held[2:]], seen=seen, prompt_len=12, weights=ALPHA
            )
        )
        assert now.flatten().tolist() == [seen if size == 12 else 5 for size in prompt]
    assert method.trigger(128).full(1.0, 100)  # streaming heads shrink although the mean is within the budget


def test_duo_leaves_short_prompts_alone():
    method = methods.get("duo")(sinks=2, recent=3)
    assert kept(method, *duo_views(method, 9, 8, 8)) == [list(range(9))] * 4


# cake


def test_cake_preference_and_budgets():
    """P = H^(1/tau1) V^(1/tau2); layers get (C - window) P / sum of P in the mean, at most what they have."""
    method = methods.get("cake")(window=2, tau1=0.5, tau2=1.0)
    stats = {
        "entropy": torch.tensor([[1.0, 2.0, 1.0]], dtype=torch.float64),
        "variance": torch.tensor([[1.0, 1.0, 3.0]], dtype=torch.float64),
        "first": torch.ones(1, 3, dtype=torch.bool),
        "entries": torch.full((1, 3, 2), 100),
    }
    held = [[100, 100]] * 3
    case = allocation(10, held, seen=100, prompt_len=100, stats=stats)  # preferences 1, 4, 3 share 24
    assert method.quotas(case).tolist() == [[[5, 5], [14, 14], [11, 11]]]
    clipped = replace(case, held=torch.tensor([[[100, 100], [9, 9], [100, 100]]]))  # 5 too many, half to each
    assert method.quotas(clipped).tolist() == [[[8, 8], [9, 9], [13, 13]]]
    official = replace(method, rounding="official")
    assert official.quotas(clipped).tolist() == [[[8, 8], [9, 9], [13, 13]]]
    odd = replace(case, budget=11)  # 3.375, 13.5 and 10.125 of 27
    assert method.quotas(odd).tolist() == [[[5, 5], [16, 16], [12, 12]]]  # to the largest remainder
    assert official.quotas(odd).tolist() == [[[6, 6], [15, 15], [12, 12]]]  # to the first


def test_cake_without_attention_outside_the_window_shares_evenly():
    method = methods.get("cake")(window=2)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    stats = {"entropy": zero, "variance": zero, "first": torch.ones(1, 2, dtype=torch.bool)}
    stats["entries"] = torch.zeros(1, 2, 1)
    case = allocation(6, [[9], [9]], seen=9, prompt_len=9, stats=stats)
    assert method.quotas(case).tolist() == [[[6], [6]]]


def test_cake_score():
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(1, 2, 12, 4, generator=generator), torch.randn(1, 4, 12, 4, generator=generator)
    out = methods.get("cake")(window=3, gamma=10.0, kernel=3).score(make_view(keys, queries[:, :, 9:], budget=8))
    logits = queries[0].view(2, 2, 12, 4) @ keys[0, :, None].transpose(-1, -2) / 2
    rows = logits.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)[:, :, 9:, :9]  # [Hk, g, 3, 9]
    assert float(out.stats["entropy"]) == pytest.approx(float(-(rows * rows.log()).sum()), rel=1e-5)
    assert float(out.stats["variance"]) == pytest.approx(float(rows.var(2).sum()), rel=1e-5)
    want = torch.nn.functional.avg_pool1d((rows.mean(2) + 10 * rows.var(2)).mean(1), 3, 1, 1)
    torch.testing.assert_close(out.score[0, :, :9], want)


def test_cake_gives_the_steady_layer_less():
    steady, restless = torch.zeros(1, 1, 4, 2), 6 * torch.eye(2)[[0, 1, 0, 1]].view(1, 1, 4, 2)
    keys = torch.eye(2)[torch.arange(30) % 2].view(1, 1, 30, 2)
    method = methods.get("cake")(window=4)
    views = [make_view(keys, q, budget=10, layer_count=2) for q in (steady, restless)]
    assert [len(row) for row in kept(method, *views)] == [4, 16]


def test_cake_evicts_once_unless_told():
    assert not methods.get("cake")().decode_bounded
    assert methods.get("cake")(decode=True).decode_bounded


def test_cake_layers_keep_their_size_while_decoding():
    method = methods.get("cake")(window=2, kernel=1, decode=True)
    keys, query = column(0, 5, 1, 4, 2, 3, 0, 0, 0), torch.ones(1, 1, 2, 1)
    states = {"entries": torch.zeros(1, 1), "evicted_at": torch.tensor([6.0])}  # at 6 tokens 6 were left, then 3 came
    view = make_view(keys, query, budget=6, states=states)
    for _ in range(2):
        [verdict] = decide(method, [view])
        assert verdict.columns["entries"].tolist() == [[6.0]]
        assert kept(method, view) == [[1, 3, 4, 5, 7, 8]]
        view = replace(view, states=verdict.columns)  # from here on the size is known


def test_cake_may_follow_another_method():
    """Its first eviction while decoding sets the sizes of the layers, whoever evicted the prompt."""
    method = methods.get("cake")(window=4, decode=True)
    keys = torch.eye(2)[torch.arange(30) % 2].view(1, 1, 30, 2)
    states = {"entries": torch.zeros(1, 1), "evicted_at": torch.zeros(1)}
    more = {"budget": 10, "layer_count": 2, "states": states, "eviction_index": torch.tensor([1])}
    queries = torch.zeros(1, 1, 4, 2), 6 * torch.eye(2)[[0, 1, 0, 1]].view(1, 1, 4, 2)
    assert [len(row) for row in kept(method, *[make_view(keys, q, **more) for q in queries])] == [4, 16]


# expected attention


def moments(method, queries, rope, blocks=(None,), start=0):
    """States after all queries [1, Hq, T, d] were observed block by block."""
    _, heads, total, d = queries.shape
    sizes = {"query_heads": heads, "head_dim": d}
    states = {s.name: torch.zeros(1, *[sizes[x] for x in s.shape]) for s in method.states()}
    edges = [start, *(b for b in blocks if b), total]
    for first, last in itertools.pairwise(edges):
        view = make_view(queries[:, :, :last], queries[:, :, first:last], budget=1, states=states, rope=rope)
        states = states | method.observe(view)
    return states


@pytest.mark.parametrize("interleaved", [False, True])
def test_expected_attention_against_its_formula(interleaved):
    generator = torch.Generator().manual_seed(0)
    total, d, sinks, future = 20, 6, 3, 7
    keys = torch.randn(1, 2, total, d, generator=generator)
    values = torch.randn(1, 2, total, d, generator=generator)
    plain = torch.randn(1, 4, total, d, generator=generator)
    rope = Rope(torch.tensor([1.0, 0.1]), interleaved=interleaved)  # the last two dimensions are left alone
    queries = rope.rotate(plain, torch.arange(total))
    method = methods.get("expected-attention")(n_future=future, sinks=sinks, epsilon=0.01)
    states = moments(method, queries, rope)
    score = method.score(make_view(keys, budget=10, values=values, states=states, rope=rope))

    eye = torch.eye(d).view(1, d, 1, d)
    turns = torch.stack([rope.rotate(eye, torch.tensor([p]))[0, :, 0].T for p in range(total, total + future)])
    turn = turns.mean(0)
    for head in range(2):
        rows = []
        for q in plain[0, 2 * head : 2 * head + 2, sinks:]:
            mean, cov = turn @ q.mean(0), turn @ torch.cov(q.T, correction=0) @ turn.T
            k = keys[0, head, sinks:]
            rows.append((k @ mean / d**0.5 + ((k @ cov) * k).sum(-1) / 2 / d).softmax(-1))
        want = (torch.stack(rows).mean(0) + 0.01) * values[0, head, sinks:].norm(dim=-1)
        torch.testing.assert_close(score[0, head, sinks:], want, rtol=1e-4, atol=1e-6)


def test_expected_attention_moments_do_not_depend_on_the_blocks():
    """Far from zero, where sums of squares would lose the covariance."""
    queries = 100 + torch.randn(1, 2, 30, 4, generator=torch.Generator().manual_seed(1))
    rope = Rope(torch.zeros(2))
    method = methods.get("expected-attention")()
    whole, parts = moments(method, queries, rope), moments(method, queries, rope, blocks=(2, 5, 17, 29))
    assert float(parts["count"]) == 26  # the first four are left out
    torch.testing.assert_close(parts["mean"], whole["mean"])
    torch.testing.assert_close(parts["spread"], whole["spread"], rtol=1e-3, atol=1e-3)
    want = torch.cov(queries[0, 0, 4:].double().T, correction=0).float()
    torch.testing.assert_close(parts["spread"][0, 0] / 26, want, rtol=1e-2, atol=1e-2)


def test_expected_attention_options():
    lean = methods.get("expected-attention")(covariance=False, vnorm=False)
    assert [s.name for s in lean.states()] == ["count", "mean"]
    assert not lean.needs().values
    keys = column(0, 0, 0, 0, 3, -1, 1).expand(-1, -1, -1, 2)
    states = {"count": torch.tensor([5.0]), "mean": torch.ones(1, 1, 2)}
    view = make_view(keys, budget=6, states=states, rope=Rope(torch.zeros(1)))
    assert kept(lean, view) == [[0, 1, 2, 3, 4, 6]]
    with pytest.raises(BudgetViolation):
        kept(lean, replace(view, budget=3))  # sinks alone are more
