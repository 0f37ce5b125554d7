"""The plan that a run prints first: slots, entries, bytes, and the hardware limit. Rows store slots, bytes and limit.

    t_step = max(W / BW, 2 N b / F) + sum over layers of max(b (n + 1) kv / BW, 4 b n Hq D / F);  tokens/s = b / t_step

Letters: b slots; n live entries of a head, on average; kv bytes of one token's entries in all heads of a layer; Hq
query heads of dimension D; W bytes of weights that a step reads; N parameters that one token uses. BW (bytes/s) and F
(FLOP/s) are measured on this machine, not looked up. Matrix products and attention do not overlap within a step, so
their times add. In a layer with a sliding window, n is the sequence's mean length, but at most the window, whatever the
budget. The states of recurrent layers, S bytes per sequence, are read and written in each step, which adds 2 b S / BW
to t_step.

In a mixture of experts, a token uses the share a of the routed experts. So N counts the share a of their parameters,
and W the share 1 - (1 - a)^b of their bytes. Weights that stay quantised in memory count with their stored bytes. The
number of slots is computed from the device's total memory, not from the memory that is free at the moment. So a
resumed run gets the same number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.console import faults
from kvbench.engine import memory
from kvbench.engine.attention.geometry import LayerGeometry, largest_group
from kvbench.engine.cache.layout import Lengths, entry_budget, fit, growth, shape_of, sums_attention, ticks_every
from kvbench.engine.cache.recurrent import StateShape
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.cache.stack import scratch_bytes
from kvbench.engine.footprint import Footprint, footprint
from kvbench.engine.kernels.backends import Backend
from kvbench.engine.model.shape import ModelShape, Part
from kvbench.engine.slot_plan import SlotPlan
from kvbench.errors import SetupError
from kvbench.eviction.api import Method
from kvbench.records import Sampling

MOST_SLOTS = {"cuda": 512, "cpu": 128}  # with more slots, matrix products are compute bound and only latency grows
PROBES = {"cuda": (1 << 30, 4096), "cpu": (1 << 23, 384)}  # bytes that `measure` copies; side of its matrices
AT_ONCE = {"cuda": 4, "cpu": 1}  # how many copies or products are started before the host waits
USABLE = {"cuda": 0.92, "cpu": 0.5}  # share of the device's total memory that a run may plan with


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured limits of a device."""

    bandwidth: float  # bytes/s of a copy, which counts each byte twice: read and written
    flops: float  # FLOP/s attained in matrix products
    memory: int  # bytes in total


def plan_cell(
    shape: ModelShape,
    machine: Machine,
    method: Method,
    *,
    budget: float | None,
    interval: int,
    sequences: int,
    max_tokens: int,
    slots: int | str,
    device: torch.device,
    dtype: torch.dtype,
    max_output: int | None = None,
    max_prompt: int | None = None,
    tail: int = 0,
    prefill_chunk: int = 512,
    prefill: str = "full",
    backend: Backend = "triton",
    samplings: Collection[Sampling] = (),
    images: tuple[int, int] = (0, 0),
) -> SlotPlan:
    """Plan one cell of a run.

    Args:
        sequences: number of samples of the whole cell, including those whose rows are stored already.
        slots: the number of slots, or "auto": as many as fit into memory, but no more than `sequences` or `MOST_SLOTS`.
        budget, interval, max_tokens, max_output, tail, prefill_chunk, prefill, backend: see `Engine`.
        max_prompt: most tokens that are read as one prompt; None: `max_tokens`.
        samplings: the sampling settings of the requests; (): all requests are greedy.
        images: see `footprint.footprint`.

    Raises SetupError when one slot, or the requested number of slots, does not fit into memory. Raises UserError when
    the method does not support the model at this length (see `layout.fit`).
    """
    geometry, group = fit(shape.geometry, method, max_tokens), largest_group(shape.geometry)
    lengths = Lengths.of(max_tokens, max_output, tail, max_prompt)
    needs, fits = list[Footprint](), list[int]()
    for part in shape.parts or (None,):
        total = machine.memory if part is None else part.memory
        need, held, entries = cell_footprint(
            shape,
            method,
            budget=budget,
            interval=interval,
            lengths=lengths,
            device=device,
            dtype=dtype,
            total=total,
            prefill_chunk=prefill_chunk,
            prefill=prefill,
            backend=backend,
            samplings=samplings,
            images=images,
            part=part,
        )
        needs.append(need)
        fits.append(need.fitting(int(total * USABLE[device.type])))
    fitting = min(fits)
    if fitting < 1:
        raise SetupError(
            f"the model and one sequence of {max_tokens} tokens need more memory than a run may use "
            f"({USABLE[device.type]:.0%} of {machine.memory / 2**30:.3g} GiB). Lower --max-new-tokens, --budget or "
            "--prefill-chunk, or use a smaller dtype."
        )
    if slots != "auto" and int(slots) > fitting:
        raise SetupError(f"--slots {slots} do not fit into memory. Use --slots auto, or at most {fitting}.")
    chosen = max(1, min(fitting, MOST_SLOTS[device.type], sequences)) if slots == "auto" else int(slots)
    seen = lengths.total - lengths.output / 2  # mean over an answer's steps
    own = entry_budget(method, budget, lengths.total, group)  # entries per head of the cache
    grown = growth(method, ticks_every(method, interval, group), lengths)
    mean = seen if own is None else min(own + grown / 2, seen)
    return SlotPlan(
        slots=chosen,
        fitting=fitting,
        entries_after=entries,
        entries_peak=held.rows * (group if method.per_query_head else 1),
        slot_bytes=sum(need.slot for need in needs),
        peak_bytes=max(need.at(chosen) for need in needs),
        devices=len(needs),
        evictable=evictable_share(geometry, shape.states, max_tokens, dtype),
        limit=roofline(shape, machine, geometry, chosen, mean, seen, dtype),
    )


def cell_footprint(
    shape: ModelShape,
    method: Method,
    *,
    budget: float | None,
    interval: int,
    lengths: Lengths,
    device: torch.device,
    dtype: torch.dtype,
    total: int,
    prefill_chunk: int = 512,
    prefill: str = "full",
    backend: Backend = "triton",
    samplings: Collection[Sampling] = (),
    images: tuple[int, int] = (0, 0),
    part: Part | None = None,
) -> tuple[Footprint, Shape, int | None]:
    """Return the planned bytes of a cell on one device, the size of its cache with one slot, and its budget in entries.

    The returned budget counts entries per KV head of the model for the longest sequence; None if the method takes no
    budget. budget: see `Engine`. total: bytes of the device's memory. backend, samplings: see `plan_cell`.
    part: see `footprint.footprint`. Raises UserError when the method does not support the model at this length.
    """
    sums, group = sums_attention(method, backend=backend), largest_group(shape.geometry)
    interval = ticks_every(method, interval, group)
    held = shape_of(shape.geometry, method, budget, interval, lengths, 1, shape.states, sums=sums)
    entries = entry_budget(method, budget, lengths.total, 1)
    prompt = lengths.prompt
    if prefill == "chunked" and entries is not None:
        prompt = min(entries + prefill_chunk + lengths.tail, prompt)
    need = footprint(
        *(shape, fit(shape.geometry, method, lengths.total), method, held, dtype),
        prompt_rows=prompt,
        tail=lengths.tail,
        budget=entry_budget(method, budget, lengths.prompt, group),
        interval=interval,
        block=prefill_chunk,
        prefill=prefill,
        at_once=scratch_bytes(device, total),
        gpu=device.type == "cuda",
        backend=backend,
        samplings=samplings,
        images=images,
        part=part,
    )
    return need, held, entries


def evictable_share(
    geometry: Sequence[LayerGeometry], states: Sequence[StateShape], tokens: int, dtype: torch.dtype
) -> float:
    """Return the share of bytes that methods may evict in a full cache of `tokens` tokens. Methods evict neither the
    entries of sliding-window layers nor the states of recurrent layers."""
    entry = {g.index: g.entry_bytes(dtype.itemsize) for g in geometry}
    evictable = tokens * sum(entry[g.index] for g in geometry if g.evicts)
    windows = sum(min(tokens, g.window) * entry[g.index] for g in geometry if g.window is not None)
    return evictable / (evictable + windows + sum(s.bytes for s in states))


def roofline(
    shape: ModelShape,
    machine: Machine,
    geometry: Sequence[LayerGeometry],
    slots: int,
    entries: float,
    seen: float,
    dtype: torch.dtype,
) -> float:
    """Return the most tokens/s that memory traffic and arithmetic allow.

    geometry: the cache's geometry, see `layout.fit`. entries: mean number of entries in a head of the cache, without
    layers that have a sliding window. seen: mean number of tokens of a sequence.
    """
    element = dtype.itemsize
    used = shape.streamed + shape.routed * shape.active
    weights = max(shape.bytes_read(element, slots) / machine.bandwidth, 2 * used * slots / machine.flops)
    attention = 2 * slots * sum(s.bytes for s in shape.states) / machine.bandwidth  # read and written
    for g in geometry:
        held = entries if g.window is None else min(seen, g.window)
        read, beside = held, held
        if g.topk:  # an indexer reads index keys, which lie in the place of values, only if it has a choice
            read, beside = min(held, g.topk), held if held > g.topk else 0
        numbers = g.kv_heads * ((read + 1) * g.head_dim + (beside + 1) * g.value_dim)
        products = 4 * read * g.query_heads * g.head_dim + 2 * beside * g.indexer_heads * g.value_dim
        traffic, arithmetic = slots * numbers * element / machine.bandwidth, slots * products / machine.flops
        attention += len(g.attending) * max(traffic, arithmetic)  # every layer that attends reads the entries
    return slots / (weights + attention)


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Return a device's copy bandwidth and matrix-product rate, measured in a fraction of a second, and its memory.

    The copy has the size in `PROBES`, halved until it fits into free memory. Small copies are slower: on an H200,
    copies of 256 MiB move 4% fewer bytes/s than copies of 2 GiB.
    """
    elements, side = PROBES[device.type]
    product = _best(device, _product(torch.ones(side, side, device=device, dtype=dtype)))
    while (pair := _pair(elements, device)) is None:
        elements //= 2
    source, target = pair
    copy = _best(device, lambda: target.copy_(source))
    return Machine(bandwidth=2 * elements / copy, flops=2 * side**3 / product, memory=memory.total(device))


def _product(a: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: a @ a


def _pair(elements: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return two tensors of `elements` bytes each; None if memory does not suffice."""
    try:
        source = torch.ones(elements, device=device, dtype=torch.uint8)
        return source, torch.empty_like(source)
    except Exception as error:
        if elements <= 1 or not faults.out_of_memory(error):
            raise
        return None


def _best(device: torch.device, work: Callable[[], Any], repeats: int = 8) -> float:
    """Return the seconds that `work` takes on the device: the least of several means."""
    times, at_once = [], AT_ONCE[device.type]
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(at_once):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) / at_once)
    return min(times)
