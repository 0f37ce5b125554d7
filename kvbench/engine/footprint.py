"""The memory in bytes that a cell takes (weights, slots, prompt, scratch), estimated before it runs."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.engine.attention.geometry import LayerGeometry, asks_indexers, largest_group
from kvbench.engine.attention.indexer import scores_bytes
from kvbench.engine.cache.layout import layer_by_layer, pass_tokens, plan_slot_bytes, stored_queries
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.kernels.backends import Backend
from kvbench.engine.meta import META, Answers, MetaBytes
from kvbench.engine.meta_views import MetaViews
from kvbench.engine.model.packing import packed_from
from kvbench.engine.model.shape import ModelShape, Part
from kvbench.engine.prompt_bytes import PromptBytes
from kvbench.engine.sampler import next_tokens
from kvbench.engine.scratch import Scratch, Ticks
from kvbench.engine.state import Drawing, State
from kvbench.eviction.api import Method
from kvbench.eviction.columns import expanded
from kvbench.eviction.planned_device import planned_for
from kvbench.records import Sampling

FLOAT = 4  # bytes; logits and scores are computed in float32
MOST = 1 << 20  # `fitting` returns fewer slots than this
LONGEST_HEAD = 4  # the longest head keeps this many times the budget at an eviction; assumed for uneven heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Planned bytes of one cell on one device.

    Attributes:
        weights: bytes of the model's and the method's weights. packed: bytes of a second, packed copy of the model's
            large linear layers, which exists on a CPU with at least `packed_from` slots (see `packing`).
        slot: bytes of the cache per slot. step: bytes of a decode step per slot, without the cache. graph: whether a
            CUDA graph keeps the step's memory between steps.
        prompt: most bytes that one prompt takes, from its first pass until its packed entries are copied to the slots.
        read: bytes that a prompt holds while the first token of each of its samples is drawn. drawing: bytes per draw.
        ticks: scratch bytes of evictions while decoding.
    """

    weights: int
    slot: int
    step: int
    prompt: int
    read: int
    drawing: int
    ticks: Ticks
    graph: bool = True
    packed: int = 0
    packed_from: int = 0

    def at(self, slots: int) -> int:
        """Return the planned peak of bytes with this many slots, for a prompt with as many samples as slots."""
        steps = slots * self.step
        between = max(self.prompt, self.read + slots * self.drawing, self.ticks.at(slots))
        held = self.weights + slots * self.slot + self.packed * (slots >= self.packed_from)
        return held + (steps + between if self.graph else max(steps, between))

    def fitting(self, usable: int) -> int:
        """Return how many slots fit into `usable` bytes; 0 if not even one slot fits."""
        return bisect.bisect_right(range(1, MOST), usable, key=self.at)


def footprint(
    shape: ModelShape,
    geometry: Sequence[LayerGeometry],
    method: Method,
    held: Shape,
    dtype: torch.dtype,
    *,
    prompt_rows: int,
    tail: int,
    budget: int | None,
    interval: int,
    block: int,
    prefill: str,
    at_once: int,
    gpu: bool,
    backend: Backend = "triton",
    samplings: Collection[Sampling] = (),
    images: tuple[int, int] = (0, 0),
    part: Part | None = None,
) -> Footprint:
    """Estimate a cell's bytes on one device.

    Args:
        geometry: all layers that store entries, as `layout.fit` returns them.
        held: the size of a cache with one slot.
        prompt_rows: most entries per head while a prompt is read.
        tail: see `layout.Lengths`.
        budget: entries per head of the cache; None: the method takes no budget.
        interval: generated tokens between two ticks of a sequence (`layout.ticks_every`).
        block, prefill: `chunk` and `prefill` of `prefill.PromptReader`.
        at_once: bytes of scratch that one view of an eviction may take (`stack.scratch_bytes`).
        gpu: whether the device is a GPU; else it is a CPU.
        backend, samplings: see `plan.plan_cell`.
        images: the most bytes that the model's vision part holds while it reads a prompt's images, and the bytes that
            remain afterwards (`tower.tower_bytes`).
        part: this device's part of a model that is divided among devices; None: the whole model.
    """
    whole = layer_by_layer(method, prefill, states=bool(shape.states))
    stored, weights = geometry, shape.weight_bytes(dtype.itemsize)
    if part is not None:  # this device's entries and weights only; activations, logits and scratch count on each device
        stored, weights = [g for g in geometry if g.index in part.layers], part.parameters * dtype.itemsize
        held = replace(held, recurrent=tuple(s for s in held.recurrent if s.layer in part.layers))
    packs = None if gpu or part or shape.stored else packed_from(weights, dtype)
    budget = _kept(method, prompt_rows) if budget is None else min(budget, held.rows)
    evicting = sorted((g for g in geometry if g.evicts), key=lambda g: -g.kv_heads * g.head_dim)  # largest first
    views = MetaViews(
        method=_copied(method),
        geometry=tuple(evicting),
        model=shape.weightless,
        dtype=dtype,
        interval=interval,
        budget=budget,
        kernels=gpu and backend != "torch",
    )
    scratch = Scratch(meta=views, gpu=gpu, counted=shape.counted)
    states = max(held.hidden, min(method.during("prefill").needs().prompt_hidden, prompt_rows))
    kept = held.hidden if whole else states  # stored in each layer; with `whole`, the layer being read stores `states`
    queries = stored_queries(method, interval, prompt_rows, held.sums)[0] if method.evicts else 0
    read = replace(  # by the first method of "a+b", too
        held,
        columns=expanded(method.columns(), largest_group(geometry)) if method.evicts else (),
        states=method.states() if method.evicts else (),
        queries=2 * queries,  # a slice of a tensor up to twice as long
        hidden=kept,
        sums=False,
    )
    prompt = PromptBytes(
        shape=shape,
        geometry=_wide(geometry, block, prompt_rows, prefill),
        stored=_wide(stored, block, prompt_rows, prefill),
        method=method,
        held=read,
        hidden_left=held.hidden,
        dtype=dtype,
        rows=prompt_rows,
        left=min(budget + tail, prompt_rows),
        tail=tail,
        block=block,
        chunked=prefill == "chunked",
        unevicted=pass_tokens(block, gpu=gpu, states=bool(shape.states)),
        scratch=scratch,
    )
    late = max(1, sum(g.evicts and bool(g.shared_by) for g in geometry))  # layers that keep hidden states at a time
    reading = prompt.reading(whole) + late * (states - kept) * max(g.hidden for g in geometry) * dtype.itemsize
    drawing = max((drawing_bytes(shape.vocabulary, dtype, s, backend, gpu=gpu) for s in samplings), default=0)
    asks = asks_indexers(geometry, held.rows if method.uniform else held.longest)
    gathered = not method.uniform and (asks or not (gpu and backend != "torch"))
    longest = held.rows + (LONGEST_HEAD - 1) * budget if gathered else held.rows  # other heads are padded to this one
    return Footprint(
        weights=weights + scratch.weights(),
        slot=plan_slot_bytes(stored, method, held, dtype),
        step=_step(shape, geometry, longest, dtype, drawing, gathered),
        prompt=prompt.peak(whole, max(reading + images[1], images[0])),
        read=prompt.read() + shape.vocabulary * dtype.itemsize,
        drawing=drawing,
        ticks=scratch.of_ticks(held, at_once),
        graph=gpu,
        packed=shape.packable * dtype.itemsize if packs else 0,
        packed_from=packs or 0,
    )


def _copied(method: Method) -> Method:
    """Return a copy of the method, because its code may store meta tensors in the object. If copying fails, return the
    method itself."""
    try:
        return copy.deepcopy(method)
    except Exception:  # a plug-in may hold anything
        return method


def _kept(method: Method, rows: int) -> int:
    """Return how many of a prompt's `rows` entries per head a method without a budget keeps."""
    try:
        return min(rows, method.during("prefill").allowed(None, rows, rows, 0)) if method.evicts else rows
    except Exception:  # a plug-in that does not define `allowed`
        return rows


def _wide(geometry: Sequence[LayerGeometry], block: int, rows: int, prefill: str) -> list[LayerGeometry]:
    """Return all layers, with every sliding window widened.

    The new window is the number of entries that a head holds while a prompt is read. With chunked prefill, it is the
    old window plus one block, but at most `rows`. Otherwise it is the whole prompt (`rows`).
    """
    more = block if prefill == "chunked" else rows
    return [g if g.window is None else replace(g, window=min(g.window + more, rows)) for g in geometry]


def _step(
    shape: ModelShape, geometry: Sequence[LayerGeometry], rows: int, dtype: torch.dtype, drawing: int, gathered: bool
) -> int:
    """Return the bytes of a decode step per slot: for activations, one layer's attention, logits and the next token.

    The next token is drawn, or is forced and gets a log-probability; the larger of the two counts is used. rows:
    entries per head. drawing: bytes of a draw. gathered: whether a layer's entries are copied into one tensor before
    attention reads them.
    """
    vocabulary = shape.vocabulary * dtype.itemsize + max(drawing, 2 * FLOAT * shape.vocabulary)
    weights = max(g.query_heads for g in geometry) * rows * (dtype.itemsize + 2 * FLOAT)
    scores = max(scores_bytes(g.indexer_heads, g.value_dim, 1, rows) if 0 < g.topk < rows else 0 for g in geometry)
    copied = max(g.kv_heads * (g.head_dim + g.value_dim) for g in geometry) * rows * dtype.itemsize if gathered else 0
    return shape.activations(1, dtype) + vocabulary + max(weights, scores) + copied


def drawing_bytes(vocabulary: int, dtype: torch.dtype, sampling: Sampling, backend: Backend, *, gpu: bool) -> int:
    """Return the most bytes that `sampler.next_tokens` takes per row, in addition to the logits.

    vocabulary, dtype: number and dtype of the logits in a row. gpu: whether a GPU draws. On a GPU, the result is 0 for
    every backend but "torch": their kernels hold only a few numbers per row.

    The count assumes the most costly case: end tokens are banned, because the answer may not end yet; and on a CPU, a
    first draw among the largest logits does not suffice, so that a second draw reads the whole vocabulary.
    """
    if not vocabulary or (gpu and backend != "torch"):
        return 0
    drawing = Drawing(sampling=sampling, ends=1, bans=True)
    with torch.inference_mode(), planned_for(gpu=gpu), MetaBytes(Answers()) as live:
        logits, state = torch.empty(1, vocabulary, dtype=dtype, device=META), State(1, 1, drawing, META)
        given = live.now
        next_tokens(logits, state)
    return live.peak - given
