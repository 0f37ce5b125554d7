"""Random numbers are a published hash, uniform, and depend on their counters alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.eviction import noise
from kvbench.eviction.view import make_view

MASK = (1 << 64) - 1


def splitmix64(state: int, part: int) -> int:
    """The published generator on Python's integers."""
    z = (state + part + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=4))
def test_mix_is_splitmix64(parts):
    tensors = [torch.tensor([noise.signed64(p)]) for p in parts]
    state = 0
    for part in parts:
        state = splitmix64(state, part)
    assert int(noise.mix(*tensors)) == noise.signed64(state)


@given(st.integers(-(1 << 70), 1 << 70))
def test_signed64_keeps_the_bits(value):
    signed = noise.signed64(value)
    assert -(1 << 63) <= signed < 1 << 63
    assert signed & MASK == value & MASK


def test_uniform():
    x = noise.uniform(noise.mix(torch.arange(200_000)))
    assert 0 < float(x.min()) < float(x.max()) < 1
    counts = torch.histc(x, bins=64, min=0, max=1)
    expected = len(x) / 64
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1])) < 0.01


def test_extremes_stay_inside_the_open_interval():
    bits = torch.tensor([0, -1, (1 << 63) - 1, -(1 << 63)])
    x = noise.uniform(bits)
    assert bool(((x > 0) & (x < 1)).all())


def test_view_noise_ignores_storage_and_batch():
    positions = torch.stack([torch.randperm(30) for _ in range(6)]).view(3, 2, 30)
    view = make_view(torch.zeros(3, 2, 30, 1), positions=positions, budget=8)
    together = view.noise()
    shuffle = torch.randperm(30)
    moved = make_view(torch.zeros(3, 2, 30, 1), positions=positions[..., shuffle], budget=8).noise()
    assert torch.equal(moved, together[..., shuffle])
    alone = make_view(torch.zeros(1, 2, 30, 1), positions=positions[2:], budget=8)
    alone.noise_key = view.noise_key[2:]
    assert torch.equal(alone.noise()[0], together[2])
    assert not torch.equal(together[0, 0].sort().values, together[0, 1].sort().values)  # heads differ
