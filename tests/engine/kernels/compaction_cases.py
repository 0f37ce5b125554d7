"""Compaction of random caches by the Triton kernels and by PyTorch: `compaction_cases.py 60 cpu` prints JSON objects.

`compaction_cases.py 60 cuda 8` has caches of 8 shapes only, because a GPU compiles the kernels for each. `different`
names the tensors of the cache whose bits differ afterwards, in any row; `error` says what each of the two refused.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.dense import DenseStack
from kvbench.engine.cache.paged import PagedStack
from kvbench.engine.cache.pool import Pool, pages
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.cache.stack import RowBatch
from kvbench.errors import BudgetViolation
from kvbench.eviction.api import Column


def random_stack(seed: int, shapes: int, device: torch.device, paged: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A stack with random bits everywhere, and its tensors by name; `device` has no effect on the bits."""
    r, g = random.Random(seed % shapes), torch.Generator().manual_seed(seed)
    dim, value = r.choice([(8, 8), (24, 16), (144, 0), (96, 64), (576, 0), (1, 1)])
    heads, layers, slots = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([1, 3])
    n = r.choice([2, 17, 150, 1024, 2500])
    one = dict(query_heads=heads, kv_heads=heads, head_dim=dim, value_dim=value, scaling=1.0)
    members = [LayerGeometry(index=i, **one) for i in range(layers)]
    columns = tuple(Column(name=f"column {i}") for i in range(r.choice([0, 1, 2, 6])))
    shape = Shape(slots=slots, rows=n + r.choice([0, 3]), bounded=True, longest=n, columns=columns)
    dtype = r.choice([torch.float32, torch.bfloat16, torch.float16])
    stack: Any
    if paged:
        store: Any = Pool(members[0], shape, 1 + pages(members, shape), device, dtype)
        random.Random(seed).shuffle(store.free)
        stack = PagedStack(members, shape, store, device, dtype)
        lengths = torch.randint(1, n + 1, (layers * slots, heads), generator=g)
        stack.blocks.resize(np.arange(layers * slots), lengths.numpy().astype(np.int32))
    else:
        store = stack = DenseStack(members, shape, device, dtype, [n] * slots)
    tensors = {"keys": store.keys, "values": store.values, "positions": store.positions, **store.columns}
    for tensor in tensors.values():
        if tensor.numel():
            bits = tensor.view(torch.uint8)
            bits.copy_(torch.randint(256, bits.shape, generator=g, dtype=torch.uint8))
    return stack, tensors


def random_batch(seed: int, stack: Any, paged: bool, kernels: bool) -> tuple[RowBatch, torch.Tensor]:
    """Some rows of a stack and their entries that stay; now and then a head of a dense row keeps too few."""
    r, g = random.Random(~seed), torch.Generator().manual_seed(~seed)
    every = len(stack.members) * stack.slots
    rows = np.array(sorted(r.sample(range(every), r.randint(1, every))))
    index, none = torch.from_numpy(rows).to(stack.device), torch.zeros(len(rows), dtype=torch.int64)
    n = int(stack.shown(rows)[0].max())
    score, allowed = torch.rand(len(rows), stack.geometry.kv_heads, n, generator=g), r.randint(1, max(1, n - 1))
    if paged:
        held = torch.arange(n) < torch.from_numpy(stack.blocks.lengths[rows])[..., None]
        keep = (score < r.random()) & held
        keep[..., 0] = True
        keep |= held & (r.random() < 0.2)  # nothing moves
    else:
        keep = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, score.topk(allowed).indices, True)
        if r.random() < 0.2:
            keep[-1, -1, score[-1, -1].argmax()] = False
    if r.random() < 0.3:  # not contiguous
        keep = keep.transpose(0, 1).contiguous().transpose(0, 1)
    facts = dict(seen=none, longest=n, prompt_len=none, evictions=none, noise_key=none, allowed=allowed)
    return RowBatch(rows=rows, index=index, at=index, kernels=kernels, **facts), keep.to(stack.device)


def evict(seed: int, shapes: int, device: str, kernels: bool) -> tuple[dict[str, torch.Tensor], str]:
    paged = random.Random(seed % shapes).random() < 0.5
    stack, tensors = random_stack(seed, shapes, torch.device(device), paged)
    batch, keep = random_batch(seed, stack, paged, kernels)
    error = ""
    try:
        stack.compact(batch, keep)
    except BudgetViolation as refused:
        error = str(refused)
    if paged:
        [cut] = stack.cuts()
        stack.carry_out(cut, cut.counts.cpu().numpy(), int(cut.movers))
        tensors["lengths"] = torch.from_numpy(stack.blocks.lengths)
        tensors["movers"] = cut.movers
    return {name: tensor.cpu() for name, tensor in tensors.items() if tensor.numel()}, error


def check(seed: int, device: str, shapes: int) -> dict[str, Any]:
    (got, error), (want, wanted) = evict(seed, shapes, device, True), evict(seed, shapes, "cpu", False)
    different = [n for n in want if not torch.equal(got[n].view(torch.uint8), want[n].view(torch.uint8))]
    if wanted:  # the engine stops
        different = []
    layout = "paged" if "movers" in want else "dense"
    return {"seed": seed, "layout": layout, "different": different, "error": [error, wanted]}


for seed in range(int(sys.argv[1])):
    print(json.dumps(check(seed, sys.argv[2], int((sys.argv[3:] or sys.argv[1:])[0]))))
