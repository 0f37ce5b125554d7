"""Evictions that take several layers in one view: the same kept entries and tokens as layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from kvbench.methods.gkv import GKV
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build, requests

from kvbench.engine.cache import stack
from kvbench.engine.loop import Engine
from kvbench.errors import BudgetViolation
from kvbench.eviction.api import Method, TopK
from kvbench.eviction.view import LayerView, StackView

TODO = dict(lengths=(9, 60, 33, 5, 100, 48), new_tokens=(40, 50, 30, 40, 30, 30), samples=2)
STACKED = [n for n in (*EVICTING, *VARIANTS) if small(n).during("decode").stacked]


@pytest.fixture(scope="module")
def loaded():
    return with_tables(build("qwen3"))


def answers(loaded, method, stacked=True):
    events = []

    def log(key, seen, layer, heads):
        events.append((key, seen, layer, [positions.tolist() for positions in heads]))

    budget = 24 if method.takes_budget else None
    engine = Engine(loaded, method, budget=budget, interval=8, slots=4, max_tokens=200, log=log)
    engine.evictor.stacked = stacked and engine.evictor.stacked
    done = {(d.request.doc_id, d.sample): d.token_ids for d in engine.generate(requests(**TODO))}
    return done, sorted(events)


def test_most_methods_are_stacked():
    layerwise = {"gkv", "rkv", "snapkv-decode", "tova", "knorm", "h2o", "trimkv", "ada-kv while decoding"}
    assert layerwise | {"retention", "duo"} <= set(STACKED)


@pytest.mark.parametrize("name", STACKED)
def test_a_stack_of_layers_keeps_what_single_layers_keep(loaded, name):
    assert answers(loaded, small(name)) == answers(loaded, small(name), stacked=False)


@pytest.mark.parametrize("name", ["gkv", "retention", "duo"])
def test_views_of_any_size_keep_the_same(loaded, monkeypatch, name):
    whole = answers(loaded, small(name))
    for size in (1, 60_000):  # one row per view, and a few
        monkeypatch.setitem(stack.SCRATCH_BYTES, "cpu", size)
        assert answers(loaded, small(name)) == whole


@dataclass(frozen=True)
class Layered(Method):
    """Prefers old entries in even layers, new ones in odd layers. Notes the views that it was shown."""

    shown: list[LayerView] = field(default_factory=list)

    def score(self, view):
        self.shown.append(view)
        return view.positions.float() * (1 if view.layer % 2 else -1)


@dataclass(frozen=True)
class LayeredGKV(GKV):
    """A subclass of a stacked method with a score of its own."""

    def score(self, view):
        out = super().score(view)
        out.score[:] = view.positions * (1.0 if view.layer % 2 else -1.0)
        return out


@pytest.mark.parametrize("method", [Layered(), LayeredGKV(window=1)])
def test_a_method_that_declares_nothing_sees_one_layer_at_a_time(loaded, method):
    _, events = answers(loaded, method)
    for _, seen, layer, heads in events:
        if seen > 110:
            assert all((max(head) < 100) == (layer % 2 == 0) for head in heads) or isinstance(method, GKV)
            assert all(sorted(head)[:20] == list(range(20)) for head in heads) == (layer % 2 == 0)
    assert {layer for _, _, layer, _ in events} == {0, 1, 2}
    assert not any(isinstance(view, StackView) for view in getattr(method, "shown", ()))


@dataclass(frozen=True)
class Promises(Layered):
    stacked = True


def test_a_method_that_promises_not_to_read_the_layer_and_does_is_told(loaded):
    with pytest.raises(AttributeError, match="'layer'"):
        answers(loaded, Promises())


@dataclass(frozen=True)
class _Spoilt(Method):
    """Breaks a rule in the middle layer, while decoding."""

    stacked = True
    how: str = ""

    def selector(self):
        return _Keeps(self.how)

    def score(self, view):
        score = view.positions.float()
        if self.how == "nan" and isinstance(view, StackView):
            score[view.layers == 1] = float("nan")
        return score


@dataclass(frozen=True)
class _Keeps(TopK):
    how: str

    def choose(self, keys, count, *, distinct):
        keep = TopK().choose(keys, count, distinct=distinct)
        if len(keys) > 4 and self.how in ("more", "none"):  # a stack of layers
            keep[5] = self.how == "more"
        if len(keys) > 4 and self.how == "fewer":
            keep[5, 0, keep[5, 0].nonzero()[0]] = False
        return keep


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", "the method returned NaN scores, so no entry can be chosen."),
        ("more", "budget exceeded: .* entries kept in a layer."),
        ("none", "a head was left with fewer than 1 entries."),
        ("fewer", "a head kept 23 entries; the dense layout needs 24."),
    ],
)
def test_what_is_wrong_in_one_layer_of_a_stack_stops_the_run(loaded, how, message):
    with pytest.raises(BudgetViolation, match=message):
        answers(loaded, _Spoilt(how=how))


def test_moves_against_a_list_of_lists():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 9, 30):
        keep = torch.rand(3, 4, n, generator=generator) < torch.rand(3, 4, 1, generator=generator)
        counts = keep.sum(dim=-1)
        front = torch.arange(n) < counts[..., None]
        source, target = stack.moves(front & ~keep, keep & ~front, n)
        for i in range(3):
            for h in range(4):
                row, count = keep[i, h].tolist(), int(counts[i, h])
                movers = [r for r in range(count, n) if row[r]]
                holes = [r for r in range(count) if not row[r]]
                assert [r for r in source[i, h].tolist() if r >= 0] == movers
                assert [r for r in target[i, h].tolist() if r >= 0] == holes
