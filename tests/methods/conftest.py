"""A dozen lines of engine for methods: tokens arrive, queries are observed, entries leave, storage is shuffled."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view


def run(method, queries, keys, *, budget, interval, prompt, shuffle=None):
    """Positions kept at every eviction, each [b, Hk, budget] ascending.

    queries [b, Hq, T, d] and keys [b, Hk, T, d] are the whole stream; `shuffle` seeds a storage order at every step.
    """
    b, hk, total, d = keys.shape
    needs, generator = method.needs(), torch.Generator().manual_seed(shuffle or 0)
    positions = torch.empty(b, hk, 0, dtype=torch.int64)
    columns = {c.name: torch.empty(b, hk, 0) for c in method.columns()}
    kept, before = [], 0
    for seen in range(prompt, total + 1, interval):
        new = torch.arange(before, seen).expand(b, hk, -1)
        positions = torch.cat([positions, new], dim=-1)
        columns = {c.name: torch.cat([columns[c.name], torch.full(new.shape, c.init)], -1) for c in method.columns()}
        if shuffle is not None:
            order = torch.rand(positions.shape, generator=generator).argsort(dim=-1)
            positions, columns = positions.gather(-1, order), {n: c.gather(-1, order) for n, c in columns.items()}
        cached = keys.gather(2, positions[..., None].expand(-1, -1, -1, d))
        if needs.queries == "since_last":
            block = make_view(cached, queries[:, :, before:seen], positions=positions, columns=columns, budget=budget)
            columns |= method.observe(block)
        width = {"none": 0, "last": 1, "window": needs.window, "since_last": 0}[needs.queries]
        view = make_view(
            cached, queries[:, :, seen - width : seen], positions=positions, columns=columns, budget=budget
        )
        if positions.shape[-1] > budget:
            [verdict] = decide(method, [view])
            keep, new_columns = verdict.keep, verdict.columns
            columns = {n: c[keep].view(b, hk, -1) for n, c in (columns | new_columns).items()}
            positions = positions[keep].view(b, hk, -1)
            kept.append(positions.sort(dim=-1).values)
        before = seen
    return kept


@pytest.fixture
def evictions():
    return run


@pytest.fixture
def stream():
    """Queries and keys of a stream in which keys repeat, so that redundancy has something to find."""

    def make(b=3, hk=2, g=2, total=90, d=8, seed=0):
        generator = torch.Generator().manual_seed(seed)
        topics = torch.randn(b, hk, 6, d, generator=generator)
        pick = torch.randint(6, (b, hk, total, 1), generator=generator).expand(-1, -1, -1, d)
        keys = topics.gather(2, pick) + 0.4 * torch.randn(b, hk, total, d, generator=generator)
        queries = 2 * torch.randn(b, hk * g, total, d, generator=generator)
        return queries, keys

    return make
