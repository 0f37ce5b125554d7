"""Redundancy of random heads by the Triton kernels and by PyTorch: `redundancy_cases.py 60 cpu` prints JSON objects.

`redundancy_cases.py 60 cuda 8` has heads of 8 shapes only, because a GPU compiles the kernels for each. `same` says
whether the bits of a sequence are equal without the other sequences.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from typing import Any

import torch

from kvbench.eviction.terms.redundancy import redundancy
from kvbench.eviction.view import LayerView, make_view


def random_view(seed: int, shapes: int) -> LayerView:
    """Heads with near copies of keys; some entries are invalid and hold NaN."""
    r, g = random.Random(seed % shapes), torch.Generator().manual_seed(seed)
    b, heads, n, d = r.choice([1, 3]), r.choice([1, 2]), r.choice([1, 2, 17, 64, 150, 300]), r.choice([8, 24, 64, 144])
    base = torch.randn(b, heads, max(1, n // 3), d, generator=g)
    pick = torch.randint(base.shape[2], (b, heads, n), generator=g)
    keys = base.gather(2, pick[..., None].expand(-1, -1, -1, d)) + 0.3 * torch.randn(b, heads, n, d, generator=g)
    keys = (4 * keys).to(r.choice([torch.float32, torch.bfloat16]))
    positions = torch.stack([torch.randperm(n, generator=g) for _ in range(b * heads)]).view(b, heads, n)
    valid = None
    if n > 2 and r.random() < 0.5:
        valid = torch.arange(n).expand_as(positions) < torch.randint(1, n, (b, heads, 1), generator=g)
        keys = torch.where(valid[..., None], keys, torch.nan)
    stored = torch.full((b, heads, n + 5, d), torch.nan, dtype=keys.dtype)  # a cache with more places than entries
    stored[:, :, :n] = keys
    return make_view(stored[:, :, :n], positions=positions, valid=valid, budget=1, whole=valid is None)


def on(device: str, view: LayerView, sequences: slice = slice(None)) -> LayerView:
    moved = {name: getattr(view, name)[sequences].to(device) for name in ("keys", "positions", "valid")}
    return replace(view, **moved, kernels=True)


def check(seed: int, device: str, shapes: int) -> dict[str, Any]:
    r, view = random.Random(~seed), random_view(seed, shapes)
    options: dict[str, Any] = {"spare": r.choice(["last", "first"]), "column_zero": r.choice([True, False])}
    threshold = r.choice([0.0, 0.5, 0.9])

    def found(some: LayerView) -> torch.Tensor:
        return redundancy(some, threshold, some.text_order(), **options)

    got, want = found(on(device, view)).cpu(), found(view)
    error = (got - want).abs() / want.clamp(min=1e-6)
    alone = found(on(device, view, slice(-1, None))).cpu()
    return {"seed": seed, "error": float(error.max()), "same": torch.equal(alone, got[-1:])}


for seed in range(int(sys.argv[1])):
    print(json.dumps(check(seed, sys.argv[2], int((sys.argv[3:] or sys.argv[1:])[0]))))
