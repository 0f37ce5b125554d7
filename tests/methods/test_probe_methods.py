"""kvzip, laq and speckv: the probes they ask for, what these leave in the columns, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from kvbench.errors import UserError
from kvbench.eviction.api import Method, Needs, Once, Probe
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods


@dataclass
class FakePrompt:
    """Text becomes one token a character, from 1000 on."""

    ids: tuple[int, ...] = tuple(range(10))
    budget: int = 8
    next_token: int = 77
    reply_header: tuple[int, ...] = ()
    drafts: list[tuple[str, int]] = field(default_factory=list)

    def encode(self, text):
        return tuple(1000 + ord(c) for c in text)

    def draft(self, model, count):
        self.drafts.append((model, count))
        return (5, 6, 7)[:count]


def inner():
    return "snapkv" if "snapkv" in methods.names() else "snapkv-decode(window=4)"


def laq(**options):
    return methods.get("laq")(**{"inner": inner(), **options})


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def probed(view, rows, keys=None, span=(0, 0)):
    """The view that `observe` gets: queries [b, Hq, m, d] behind the prompt, with keys of their own."""
    m, total = rows.shape[2], int(view.seen[0])
    positions = torch.arange(total, total + m).expand(rows.shape[0], -1)
    own = torch.zeros(*view.keys.shape[:2], m, rows.shape[3]) if keys is None else keys
    return replace(
        view,
        queries=rows,
        query_positions=positions,
        probe=Probe(tokens=tuple(range(m)), span=span),
        probe_keys=own,
        probe_positions=positions,
    )


@pytest.mark.parametrize("name", ["kvzip", "laq", "speckv"])
def test_they_act_once_on_the_prompt(name):
    method = laq() if name == "laq" else methods.get(name)()
    assert isinstance(method.trigger(128), Once)
    assert method.needs().probes
    assert not method.decode_bounded


# kvzip


def test_kvzip_asks_to_repeat_chunk_by_chunk():
    prompt = FakePrompt(ids=tuple(range(12)), reply_header=(50, 51))
    probes = list(methods.get("kvzip")(chunk=4, postfix=3, sinks=2).probes(prompt))
    first = prompt.encode("\n\nRepeat the previous context exactly.")
    later = prompt.encode("\n\nRepeat the part of the previous context exactly, starting with ")
    assert [p.tokens for p in probes] == [
        (*first, 50, 51, 2, 3, 4, 5),
        (*later, 3, 4, 5, 50, 51, 6, 7, 8, 9),
        (*later, 7, 8, 9, 50, 51, 10, 11),
    ]
    assert [p.span for p in probes] == [(2, 6), (6, 10), (10, 12)]
    assert all(p.against is None and not p.keep for p in probes)


def test_kvzip_does_not_name_sinks_as_the_chunk_before():
    probes = list(methods.get("kvzip")(chunk=2, postfix=8, sinks=4).probes(FakePrompt()))
    later = FakePrompt().encode("\n\nRepeat the part of the previous context exactly, starting with ")
    assert probes[1].tokens == (*later, 4, 5, 6, 7)


def test_kvzip_scores_sinks_that_another_protection_does_not_keep():
    method = methods.get("kvzip")(chunk=4, sinks=2, protection="recent=8")
    assert [p.span for p in method.probes(FakePrompt())] == [(0, 4), (4, 8), (8, 10)]
    keys, rows, own = random(1, 2, 14, 4), random(1, 4, 5, 4, seed=1), random(1, 2, 5, 4, seed=2)
    view = probed(make_view(keys, budget=6, columns={"zip": torch.zeros(1, 2, 14)}), rows, own, span=(0, 4))
    torch.testing.assert_close(method.observe(view)["zip"], kvzip_by_hand(view, (0, 4), 2))


@pytest.mark.parametrize(("protection", "first"), [("prompt", 0), ("sinks=1+prompt=50%", 1), ("sinks=9", 2)])
def test_kvzip_begins_behind_the_sinks_that_another_protection_names(protection, first):
    probes = methods.get("kvzip")(chunk=20, sinks=2, protection=protection).probes(FakePrompt())
    assert [p.span for p in probes] == [(first, 10)]


def kvzip_by_hand(view, span, sinks):
    """One query head of KV head h at a time, with nothing but a softmax."""
    b, hq, m, d = view.queries.shape
    hk = view.keys.shape[1]
    best = view.columns["zip"].clone()
    for s in range(b):
        for head in range(hq):
            h = head // (hq // hk)
            for i in range(m):
                keys = torch.cat([view.keys[s, h], view.probe_keys[s, h, : i + 1]])
                at = torch.cat([view.positions[s, h], torch.full((i + 1,), 10**6)])
                counts = (at < sinks) | ((at >= span[0]) & (at < span[1])) | (at == 10**6)
                logits = (keys @ view.queries[s, head, i]) / d**0.5
                p = logits.masked_fill(~counts, float("-inf")).softmax(0)
                for j, position in enumerate(view.positions[s, h].tolist()):
                    if span[0] <= position < span[1]:
                        best[s, h, j] = max(best[s, h, j], p[j])
    return best


def test_kvzip_by_hand():
    keys, rows, own = random(2, 2, 14, 4), random(2, 4, 5, 4, seed=1), random(2, 2, 5, 4, seed=2)
    view = make_view(keys, budget=6, columns={"zip": 0.02 * random(2, 2, 14, seed=3).abs()})
    view = probed(view, rows, own, span=(5, 9))
    got = methods.get("kvzip")(sinks=2).observe(view)["zip"]
    torch.testing.assert_close(got, kvzip_by_hand(view, (5, 9), 2))
    outside = (view.positions < 5) | (view.positions >= 9)
    assert torch.equal(got[outside], view.columns["zip"][outside])


def test_kvzip_scores_lie_where_the_entries_lie():
    """Storage order and unused rows, whatever they hold, change nothing."""
    keys, rows = random(1, 2, 14, 4), random(1, 4, 5, 4, seed=1)
    plain = make_view(keys, budget=6, columns={"zip": torch.zeros(1, 2, 14)})
    want = methods.get("kvzip")(sinks=2).observe(probed(plain, rows, span=(5, 9)))["zip"]
    order = torch.stack([random(14, seed=s).argsort() for s in (7, 8)])[None]
    stored = keys.gather(2, order[..., None].expand(-1, -1, -1, 4))
    junk = torch.full((1, 2, 3, 4), torch.nan)
    view = make_view(
        torch.cat([stored, junk], dim=2),
        budget=6,
        positions=torch.cat([order, torch.full((1, 2, 3), 6)], dim=-1),
        valid=torch.arange(17).expand(1, 2, -1) < 14,
        columns={"zip": torch.zeros(1, 2, 17)},
        seen=14,
    )
    got = methods.get("kvzip")(sinks=2).observe(probed(view, rows, span=(5, 9)))["zip"]
    torch.testing.assert_close(got[..., :14], want.gather(-1, order))
    assert not got[..., 14:].isnan().any()


def test_kvzip_level_decides_who_competes():
    """Layer 1 has the higher scores: one competition favours it, a budget for each head does not."""
    kept = {}
    for level in ("pair", "head"):
        method = methods.get("kvzip")(level=level, sinks=1)
        views = [
            make_view(
                random(1, 2, 10, 4),
                budget=4,
                columns={"zip": layer + random(1, 2, 10).abs() / 100},
                ordinal=layer,
                layer_count=2,
            )
            for layer in range(2)
        ]
        kept[level] = [verdict.keep.sum(-1)[0].tolist() for verdict in decide(method, views)]
    assert kept["head"] == [[4, 4], [4, 4]]
    assert kept["pair"][0] == [1, 1]  # the sinks
    assert sum(kept["pair"][1]) == 4 * 4 - 2
    assert methods.get("kvzip")().layerwise is False
    assert methods.get("kvzip")(level="head").uniform is True


# laq


def test_laq_generates_its_draft_token_by_token():
    method = laq(n=3)
    generator = method.probes(FakePrompt())
    probes = [next(generator)]
    for token in (11, 12):
        probes.append(generator.send(token))
    with pytest.raises(StopIteration):
        generator.send(13)
    assert [p.tokens for p in probes] == [(77,), (11,), (12,)]
    assert all(p.keep for p in probes)
    assert all(p.against is probes[0].against for p in probes)
    assert isinstance(probes[0].against, Method)


@pytest.mark.parametrize("w2", [0, 3])
def test_laq_sums_over_drafted_and_last_queries(w2):
    """Softmax over the prompt alone; every query head has one vote, the group's mean counts."""
    keys, rows = random(1, 2, 12, 4), random(1, 4, 2, 4, seed=1)
    last = random(1, 4, 5, 4, seed=2)
    method = laq(w2=w2, kernel=1)
    view = make_view(keys, last, budget=6, columns={"laq": torch.zeros(1, 2, 12)})
    for i in range(2):  # the draft comes one row at a time
        view.columns = method.observe(probed(view, rows[:, :, i : i + 1], random(1, 2, 1, 4, seed=9)))
    want = torch.zeros(1, 2, 12)
    for head in range(4):
        want[0, head // 2] += (keys[0, head // 2] @ rows[0, head].T / 2).softmax(0).sum(-1) / 2
        for i in range(5 - w2, 5):
            logits = keys[0, head // 2] @ last[0, head, i] / 2
            future = torch.arange(12) > 7 + i
            want[0, head // 2] += logits.masked_fill(future, float("-inf")).softmax(0) / 2
    older = slice(0, 12 - w2)
    torch.testing.assert_close(method.score(view)[..., older], want[..., older])
    assert method.protect(6).recent == w2


def test_laq_pools_over_neighbours_outside_its_window():
    column = torch.zeros(1, 1, 12)
    column[..., 4], column[..., 11] = 1.0, 9.0
    view = make_view(torch.zeros(1, 1, 12, 2), torch.zeros(1, 1, 2, 2), budget=6, columns={"laq": column})
    score = laq(w2=2, kernel=3).score(view)[0, 0]
    assert (score[:10] > 0.9).nonzero().flatten().tolist() == [3, 4, 5]


def test_laq_keeps_queries_for_whom_it_drafts_by():
    needs = laq(inner="snapkv-decode(window=20)", w2=8).needs()
    assert (needs.queries, needs.window) == ("window", 20)
    assert laq(inner="knorm", w2=0).needs().queries == "none"
    assert laq(inner="snapkv-decode(window=20)", w2=8).min_budget() == 21


@pytest.mark.parametrize("name", ["h2o", "gkv", "full", "kvzip", "nosuch", "snapkv-decode(window=0)"])
def test_laq_refuses_an_inner_method_that_cannot_cut_the_copy(name):
    with pytest.raises(UserError, match="inner"):
        laq(inner=name)


# speckv


def test_speckv_runs_the_draft_as_one_probe():
    prompt = FakePrompt()
    [probe] = methods.get("speckv")(draft="small", n=2).probes(prompt)
    assert prompt.drafts == [("small", 2)]
    assert probe == Probe(tokens=(5, 6))


def test_speckv_takes_an_empty_draft():
    prompt = FakePrompt()
    prompt.draft = lambda model, count: ()
    assert list(methods.get("speckv")(draft="small").probes(prompt)) == []


def test_speckv_says_that_it_needs_a_draft_model():
    with pytest.raises(UserError, match=r"speckv\.draft="):
        next(methods.get("speckv")().probes(FakePrompt()))


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_speckv_by_hand(reduce):
    keys, rows, last = random(1, 1, 10, 4), random(1, 2, 3, 4, seed=1), random(1, 2, 2, 4, seed=2)
    own = random(1, 1, 3, 4, seed=3)
    method = methods.get("speckv")(window=2, kernel=1, reduce=reduce)
    view = make_view(keys, last, budget=5, columns={"draft": torch.zeros(1, 1, 10)})
    view.columns = method.observe(probed(view, rows, own))
    every = torch.cat([keys[0, 0], own[0, 0]])
    votes = []
    for head in range(2):
        for i, query in enumerate(torch.cat([last[0, head], rows[0, head]])):
            future = torch.arange(13) > 8 + i
            votes.append((every @ query / 2).masked_fill(future, float("-inf")).softmax(0)[:8])
    stack = torch.stack(votes)
    want = stack.amax(0) if reduce == "max" else stack.sum(0) / 2  # the mean of the two heads, over five queries
    torch.testing.assert_close(method.score(view)[0, 0, :8], want)


def test_needs_are_plain():
    assert methods.get("speckv")(window=16).needs() == Needs(queries="window", window=16, probes=True, prompt=True)
    assert methods.get("kvzip")().needs() == Needs(probes=True, prompt=True)


# what must hold for scores, whatever lies around the entries


@pytest.fixture(params=["laq", "laq plain", "speckv", "speckv mean"])
def method(request):
    made = {
        "laq": lambda: laq(w2=5, inner="knorm"),
        "laq plain": lambda: laq(w2=0, inner="knorm"),
        "speckv": lambda: methods.get("speckv")(window=5),
        "speckv mean": lambda: methods.get("speckv")(window=5, reduce="mean"),
    }
    return made[request.param]()


def read_prompt(method, b=3, total=24, order=None):
    """A prompt's cache in some storage order, after one probe of three rows."""
    keys, last, rows = random(b, 2, total, 8), random(b, 4, method.needs().width, 8, seed=1), random(b, 4, 3, 8, seed=2)
    positions = torch.arange(total).expand(b, 2, -1) if order is None else order
    [column] = method.columns()
    view = make_view(
        keys.gather(2, positions[..., None].expand(-1, -1, -1, 8)),
        last,
        budget=12,
        positions=positions,
        columns={column.name: torch.full((b, 2, total), column.init)},
    )
    view.columns = method.observe(probed(view, rows, random(b, 2, 3, 8, seed=3)))
    return view


def kept(method, view):
    keep = decide(method, [view])[0].keep
    return [[set(p[k].tolist()) for p, k in zip(ps, ks)] for ps, ks in zip(view.positions, keep)]


def test_storage_order_does_not_matter(method):
    order = random(3, 2, 24, seed=5).argsort(dim=-1)
    assert kept(method, read_prompt(method)) == kept(method, read_prompt(method, order=order))


def test_a_prompt_alone_is_what_it_is_among_others(method):
    view = read_prompt(method)
    fields = ("keys", "values", "positions", "valid", "queries", "query_positions", "seen", "prompt_len")
    fields = (*fields, "eviction_index", "noise_key")
    for i in range(3):
        columns = {name: column[i : i + 1] for name, column in view.columns.items()}
        alone = replace(view, **{name: getattr(view, name)[i : i + 1] for name in fields}, columns=columns)
        assert torch.equal(method.score(alone)[0], method.score(view)[i])


def test_unused_rows_may_hold_anything(method):
    view = read_prompt(method)
    junk = torch.full((3, 2, 4, 8), torch.nan)
    [name] = view.columns
    padded = replace(
        view,
        keys=torch.cat([view.keys, junk], dim=2),
        values=None,
        positions=torch.cat([view.positions, torch.full((3, 2, 4), 3)], dim=-1),
        valid=torch.cat([view.valid, torch.zeros(3, 2, 4, dtype=torch.bool)], dim=-1),
        columns={name: torch.cat([view.columns[name], junk[..., 0]], dim=-1)},
    )
    keep = decide(method, [padded])[0].keep
    assert not keep[..., 24:].any()
    assert torch.equal(keep[..., :24], decide(method, [view])[0].keep)
