"""Random decode steps by the Triton kernel and by PyTorch: `decode_cases.py 200 cpu` prints one line of JSON per step.

`decode_cases.py 60 cuda 8` has steps of 8 shapes only, because a GPU compiles the kernel for each. Every fourth step
is also computed with other neighbours and in other slots: `same` says whether the bits are equal.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from kvbench.engine.cache.paged import PAGE
from kvbench.engine.kernels import decode, masked, varlen
from kvbench.errors import KVBenchError

Step = dict[str, Any]


def random_step(seed: int, shapes: int) -> Step:
    """The arguments of a decode step of any shape."""
    r, g = random.Random(seed % shapes), torch.Generator().manual_seed(seed)
    dtype = r.choice([torch.float32, torch.bfloat16])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    slots, heads, group = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([1, 2, 4, 7, 17, 40])
    dim = r.choice([8, 16, 24, 64, 80, 128, 288])
    value_dim = r.choice([dim, dim, 16, 40])
    layout = r.choice(["dense", "paged", "ring"])
    rows = r.choice([32, 64, 128, 256] if layout == "paged" else [17, 64, 100, 130, 300])
    latent = r.choice([0, 0, dim // 2])  # of latent attention: the value is a part of the key
    stored = 0 if latent else value_dim
    lengths = torch.randint(0, 3 * rows if layout == "ring" else rows, (slots, heads), generator=g)
    lengths[0, 0] = r.choice([0, 1, rows - 2, rows - 1])
    step: Step = dict(
        query=normal(slots, heads * group, dim),
        key=normal(slots, heads, dim),
        value=normal(slots, heads, 2 * stored)[..., :stored],  # strided, as behind one matrix for q, k and v
        lengths=lengths[:, :1] if layout == "ring" else lengths.int(),
        live=torch.tensor([1] * (slots - 1) + [int(slots == 1 or r.random() < 0.7)]).repeat_interleave(2)[::2],
        scaling=dim**-0.5,
        splits=r.choice([1, 1, 2, 5]),
        softcap=r.choice([None, 3.0]),
        sinks=r.choice([None, normal(heads * group)]),
        latent=latent,
    )
    shape: tuple[int, ...] = (slots, heads, rows)
    if layout == "paged":
        pages = slots * heads * rows // PAGE
        step["table"] = (1 + torch.randperm(pages, generator=g)).int().view(slots, heads, -1)
        shape = ((1 + pages) * PAGE,)
    elif r.random() < 0.6:
        step["sums"] = torch.rand(slots, heads, group, rows, generator=g)
    return step | dict(keys=normal(*shape, dim), values=normal(*shape, stored))


def mapped(step: Step, change: Any) -> Step:
    """The step with every tensor replaced by `change(name, tensor)`."""
    return {k: change(k, x) if isinstance(x, torch.Tensor) else x for k, x in step.items()}


def on(device: str, step: Step) -> Step:
    return mapped(step, lambda _, x: x.clone().to(device))


def rearranged(step: Step) -> Step:
    """The same slots in reverse, behind a new one: other places, other neighbours."""
    shared = ("sinks",) if step.get("table") is None else ("sinks", "keys", "values")

    def change(name: str, x: torch.Tensor) -> torch.Tensor:
        if name in shared:
            return x.clone()
        first = x[:1] // 2 if name == "lengths" else x[:1]
        return torch.cat([first, x.flip(0)])

    other = mapped(step, change)
    if "table" in step:  # the new slot's pages lie in a pool of its own, so that no two slots share a page
        own, count = step["table"][:1], len(step["keys"]) // PAGE
        other["table"][:1] = own + count
        other |= {name: torch.cat([step[name], step[name]]) for name in ("keys", "values")}
    return other


def by_varlen(step: Step, want: torch.Tensor) -> float | None:
    """The largest difference of torch's own kernel; None where it does not serve the step."""
    try:
        varlen.check_torch()
        got = varlen.decode(**{k: x for k, x in step.items() if k != "sums"})
    except KVBenchError:
        return None
    return float((got.cpu().double() - want).abs().max() / want.abs().max().clamp(min=1))


def check(seed: int, device: str, shapes: int) -> dict[str, Any]:
    step = random_step(seed, shapes)
    mine = on(device, step)
    exact = mapped(step, lambda _, x: x.double() if x.is_floating_point() else x)
    got, want = decode.decode(**mine), masked.decode(**exact)
    error = (got.cpu().double() - want).abs() / want.abs().clamp(min=1)
    summed = (mine["sums"].cpu().double() - exact["sums"]).abs().max() if "sums" in step else 0.0
    other = on(device, rearranged(step)) if seed % 4 == 0 else None
    again = got if other is None else decode.decode(**other)[1:].flip(0)
    received = other is None or "sums" not in step or torch.equal(other["sums"][1:].flip(0), mine["sums"])
    return {
        "seed": seed,
        "dtype": str(step["query"].dtype).removeprefix("torch."),
        "error": float(error.max()),
        "written": all(torch.equal(mine[k].cpu().double(), exact[k]) for k in ("keys", "values")),
        "summed": float(summed) if "sums" in step else None,
        "same": torch.equal(again, got) and received,
        "varlen": by_varlen(on(device, step), want),
        "idle": bool((got[mine["live"] == 0] == 0).all()),
    }


for seed in range(int(sys.argv[1])):
    print(json.dumps(check(seed, sys.argv[2], int((sys.argv[3:] or sys.argv[1:])[0]))))
