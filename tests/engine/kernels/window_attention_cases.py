"""Attention of random windows by the Triton kernels and by PyTorch: `window_attention_cases.py 80 cpu` prints JSON.

`window_attention_cases.py 60 cuda 8` has windows of 8 shapes only, because a GPU compiles the kernels for each. `same`
says whether the bits of a sequence are equal without the other sequences.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from kvbench.eviction.terms.window_attention import window_attention

Case = dict[str, Any]


def random_case(seed: int, shapes: int) -> Case:
    """Arguments of `window_attention`: keys in any order, hidden ones hold NaN, some queries see no key."""
    r, g = random.Random(seed % shapes), torch.Generator().manual_seed(seed)
    b, heads, group = r.choice([1, 3]), r.choice([1, 2]), r.choice([1, 2, 4, 7, 20])
    w, n, d = r.choice([1, 2, 8, 16, 33]), r.choice([1, 17, 64, 150, 300]), r.choice([8, 24, 64, 80])
    dtype = r.choice([torch.float32, torch.bfloat16])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    positions = torch.stack([torch.randperm(2 * n, generator=g)[:n] for _ in range(b * heads)]).view(b, heads, n)
    last = r.choice([2 * n, n, w])
    valid = None
    keys = normal(b, heads, n + 5, d)[:, :, :n]  # a cache with more places than entries
    if r.random() < 0.5:
        valid = torch.rand(b, heads, n, generator=g) < 0.7
        keys = torch.where(valid[..., None], keys, torch.nan)
    case: Case = dict(
        queries=normal(b, heads * group, 2 * w, d)[:, :, ::2],
        keys=keys,
        query_positions=(torch.arange(last - w, last) - 1).expand(b, -1),
        key_positions=positions,
        valid=valid,
        scaling=d**-0.5,
        softcap=r.choice([None, 3.0]),
        domain=r.choice(["all", "all", "outside_window"]),
        order=r.choice(["softmax_then_group", "softmax_then_group", "group_then_softmax"]),
        reduce_g=r.choice(["mean", "sum", "max"]),
        reduce_q=r.choice(["mean", "sum", "max", None]),
    )
    if case["order"] == "softmax_then_group" and r.random() < 0.4:
        case["reduce_g"] = None
    if r.random() < 0.15:
        case["queries"][0, 0, -1] = torch.nan  # as after a failed step: the result must be NaN, too
    if r.random() < 0.25:
        case |= {"reduce_q": "sum", "newest": (1, max(1, w // 2), w)}
    return case


def on(device: str, case: Case, sequences: slice = slice(None)) -> Case:
    return {k: x[sequences].to(device) if isinstance(x, torch.Tensor) else x for k, x in case.items()}


def check(seed: int, device: str, shapes: int) -> dict[str, Any]:
    case = random_case(seed, shapes)
    got, want = window_attention(**on(device, case), kernels=True).cpu(), window_attention(**case)
    alone = window_attention(**on(device, case, slice(-1, None)), kernels=True).cpu()
    same = torch.equal(alone.nan_to_num(9.0), got[-1:].nan_to_num(9.0))
    facts = {"same": same, "shape": got.shape == want.shape, "nan": torch.equal(got.isnan(), want.isnan())}
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    return {"seed": seed, "error": float((got - want).abs().max() / want.abs().max().clamp(min=1e-6)), **facts}


for seed in range(int(sys.argv[1])):
    print(json.dumps(check(seed, sys.argv[2], int((sys.argv[3:] or sys.argv[1:])[0]))))
