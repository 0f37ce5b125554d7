"""`PromptLayer` against lists: entries that are added, kept, dropped and packed, in heads of unequal lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build, requests

from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.loop import Engine
from kvbench.errors import BudgetViolation, PluginError
from kvbench.eviction import select
from kvbench.eviction.api import Method
from kvbench.eviction.choose import make
from kvbench.records import Sampling

B, HEADS = 2, 2


@pytest.fixture
def layer():
    geometry = build("qwen3").geometry[0]
    return PromptLayer(geometry, B, 4, make("h2o", {}), queries=0, hidden=0, like=torch.empty(0))


def add(layer: PromptLayer, held: list[list[list[int]]], start: int, count: int) -> None:
    """Append tokens to the layer and to lists: keys, values and the column say which token and head they belong to."""
    g = layer.geometry
    marks = torch.arange(start, start + count).float() + 1000 * torch.arange(B * HEADS).view(B, HEADS, 1)
    key = marks[..., None].expand(-1, -1, -1, g.head_dim)
    query = torch.zeros(B, g.query_heads, count, g.head_dim)
    layer.append(key, -key, query, start)
    layer.columns["acc"][:, :, layer.rows - count : layer.rows] = marks
    for row in held:
        for head in row:
            head.extend(range(start, start + count))


def evict(layer: PromptLayer, held: list[list[list[int]]], generator: torch.Generator, even: bool) -> None:
    valid = torch.ones(B, HEADS, layer.rows, dtype=torch.bool) if layer.valid is None else layer.valid
    mask = valid & (torch.rand(valid.shape, generator=generator) < 0.6)
    if even:
        mask = valid & (layer.positions[:, :, : layer.rows] >= 10)
    for b in range(B):
        for h in range(HEADS):
            stays = set(layer.positions[b, h, : layer.rows][mask[b, h]].tolist())
            held[b][h] = [token for token in held[b][h] if token in stays]
    layer.keep(mask, mask.sum(dim=-1).numpy())


def check(layer: PromptLayer, held: list[list[list[int]]]) -> None:
    lengths = [[len(head) for head in row] for row in held]
    assert layer.held() == pytest.approx(np.mean(lengths))
    assert (layer.valid is None) == (len({n for row in lengths for n in row}) == 1)
    for b, row in enumerate(held):
        packed = layer.pack(b)
        tokens = [token for head in row for token in head]
        marks = [token + 1000.0 * (b * HEADS + h) for h, head in enumerate(row) for token in head]
        assert packed.lengths == lengths[b]
        assert packed.positions.tolist() == tokens
        assert packed.positions.dtype == torch.int32
        assert packed.columns["acc"].tolist() == marks
        assert packed.keys[:, 0].tolist() == marks
        assert packed.values[:, -1].tolist() == [-mark for mark in marks]
        assert [head.tolist() for head in packed.held()] == row


@pytest.mark.parametrize("even", [True, False])
def test_what_is_packed_is_what_lists_hold(layer, even):
    held: list[list[list[int]]] = [[[] for _ in range(HEADS)] for _ in range(B)]
    generator = torch.Generator().manual_seed(0)
    for start in (0, 12, 24):
        add(layer, held, start, 12)
        check(layer, held)
        evict(layer, held, generator, even)
        check(layer, held)
    before = layer.rows
    add(layer, [], 36, 3)  # a probe
    layer.truncate(before)
    check(layer, held)
    add(layer, held, 36, 2)
    check(layer, held)
    check(layer.copy(), held)


def test_entries_outside_the_sliding_window_are_dropped(layer):
    held: list[list[list[int]]] = [[[] for _ in range(HEADS)] for _ in range(B)]
    for start in range(0, 30, 6):
        add(layer, held, start, 6)
        layer.forget_before(start + 6 - 8, start + 6)
        held = [[head[-8:] for head in row] for row in held]
        check(layer, held)
    assert layer.keys.shape[2] == 8


@pytest.mark.parametrize("method", [*EVICTING, *VARIANTS])
def test_the_number_that_a_decision_states_is_that_of_its_mask(method, monkeypatch):
    """Without this number, the host waits for the device to know how much memory a layer needs."""
    stated, decide = [], select.decide

    def spy(acting, views):
        decisions = decide(acting, views)
        for decision, view in zip(decisions, views):
            if decision.count is not None:
                assert (decision.keep.sum(dim=-1) == decision.count).all()
            stated.append((acting.uniform, view.whole, decision.count))
        return decisions

    monkeypatch.setattr(select, "decide", spy)
    instance = small(method)
    budget = 24 if instance.takes_budget else None
    loaded = with_tables(build("qwen3"))
    engine = Engine(loaded, instance, budget=budget, interval=8, slots=1, max_tokens=80)
    list(engine.generate(requests(lengths=(40,), new_tokens=(12,), samples=1, sampling=Sampling())))
    assert stated
    assert all((count is not None) == (even and whole) for even, whole, count in stated)


@dataclass(frozen=True)
class Wrong(Method):
    """Gives NaN scores in layer 0 and, if `fails` is true, fails in layer 1 with this exception."""

    fails: type[Exception] | None = None

    def score(self, view):
        if view.layer == 0:
            return torch.full(view.positions.shape, float("nan"))
        if self.fails is ValueError and view.layer == 1:
            raise ValueError
        return None if self.fails and view.layer == 1 else view.positions.float()


@pytest.mark.parametrize("fails", [None, PluginError, ValueError])
def test_the_first_layer_that_is_wrong_is_reported(fails):
    engine = Engine(build("qwen3"), Wrong(fails=fails), budget=24, interval=8, slots=1, max_tokens=80)
    with pytest.raises(BudgetViolation, match="NaN scores") as caught:
        list(engine.generate(requests(lengths=(40,), new_tokens=(2,), samples=1, sampling=Sampling())))
    assert isinstance(caught.value.__context__, fails or type(None))
