"""Reads the traces of a task for analyses: with the full cache and, if an analysis needs it, with every chosen method.

Analyses of attention get the full cache's attention for 16 successive queries at a time. Memory holds the sums of the
analyses and, beside them, one of two things: the attention of the 16 queries, or the record (`Reference`) of one batch
that was read with the full cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.load import LoadedModel
from kvbench.replay.analyses.api import (
    WINDOW,
    Analysis,
    AttentionAnalysis,
    Look,
    Losses,
    MethodAnalysis,
    Moment,
    Study,
    Window,
)
from kvbench.replay.choices import FULL, Chosen
from kvbench.replay.comparison import held_tokens
from kvbench.replay.reader import CHUNK, Listener, OnRead, TraceReader
from kvbench.replay.reference import Reference, attention_to, batches, readings
from kvbench.replay.traces import ForcedTrace

SCRATCH_FLOATS = 1 << 24  # most attention weights that a window of a batch has


def read(
    loaded: LoadedModel,
    study: Study,
    analyses: Sequence[Analysis],
    chosen: Sequence[Chosen],
    *,
    max_tokens: int,
    on_read: OnRead = lambda text, traces, tokens: None,
) -> None:
    """Read every trace for the analyses.

    For analyses of attention, each trace is read with the full cache. For analyses of methods, it is read with the full
    cache and then with every chosen method. max_tokens: the most tokens that a prompt and its answer have together.
    on_read: called after each batch is read, except after the readings with the full cache that serve analyses of
    methods.
    """
    looking = [a for a in analyses if isinstance(a, AttentionAnalysis)]
    watching = [a for a in analyses if isinstance(a, MethodAnalysis)]
    places = {id(trace): i for i, trace in enumerate(study.traces)}
    if looking:
        reader = TraceReader.of(loaded, FULL, interval=CHUNK, max_tokens=max_tokens)
        for batch in _narrow(study.traces, loaded):
            reader.read(batch, _Windows(batch, [places[id(t)] for t in batch], looking))
            on_read("full", len(batch), sum(len(t.answer) for t in batch))
    lengths = {"interval": study.interval, "max_tokens": max_tokens}
    for _, batch_readings in readings(loaded, study.traces, chosen if watching else (), **lengths):
        for c, evicting, part, future in batch_readings:
            holdings = _Holdings(part, c, evicting, [places[id(t)] for t in part.traces], watching)
            evicting.read(part.traces, holdings, future)
            holdings.tell(None)
            on_read(c.label, len(part.traces), sum(len(t.answer) for t in part.traces))


def _narrow(traces: Sequence[ForcedTrace], loaded: LoadedModel) -> Iterator[list[ForcedTrace]]:
    """Yield batches in which the attention of WINDOW queries per trace takes at most SCRATCH_FLOATS numbers in all. A
    trace that needs more forms a batch alone."""
    heads = max((g.query_heads for g in loaded.geometry if g.evicts), default=1)
    for batch in batches(traces, loaded, CHUNK):
        total = len(batch[0].prompt) + len(batch[0].answer)
        most = max(1, SCRATCH_FLOATS // (heads * WINDOW * total))
        for first in range(0, len(batch), most):
            yield batch[first : first + most]


class _Windows(Listener):
    """A listener that passes the full cache's attention to analyses, for WINDOW successive queries at a time."""

    def __init__(self, batch: Sequence[ForcedTrace], places: list[int], analyses: Sequence[AttentionAnalysis]) -> None:
        self.places, self.analyses = places, analyses
        self.prompt, self.count = len(batch[0].prompt), -(-(len(batch[0].answer) - 1) // WINDOW)

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        """Pass the attention of the new queries to the analyses, in the layers in which methods evict. first: a
        multiple of WINDOW, because a pass starts at a multiple of CHUNK."""
        layer = self.cache.layers[call.layer]
        if not layer.geometry.evicts:
            return
        for start in range(0, out.shape[1], WINDOW):
            begin = self.prompt + first + start
            query = call.query[:, :, start : start + WINDOW]
            weights = attention_to(layer, call, query, begin)  # [b, Hk, g, w, N]
            window = Window(
                layer=call.layer,
                traces=self.places,
                index=(first + start) // WINDOW,
                count=self.count,
                first=begin,
                weights=weights.flatten(1, 2),
                kv_heads=weights.shape[1],
            )
            for analysis in self.analyses:
                analysis.window(window)


class _Holdings(Listener):
    """A listener that passes to analyses what they need to know of a method.

    At the beginning of each block of the answer, the listener tells the analyses which entries the method holds. For
    each query, it tells them how much attention the query pays to each entry held at that time. It also tells them the
    losses of the answer's tokens. `tell(None)` tells them which entries the method holds at the end of the answer.
    """

    def __init__(
        self,
        reference: Reference,
        chosen: Chosen,
        reader: TraceReader,
        places: list[int],
        analyses: Sequence[MethodAnalysis],
    ) -> None:
        self.reference, self.chosen, self.places, self.analyses = reference, chosen, places, analyses
        self.bounded = reader.method.decode_bounded
        self.looking = [a for a in analyses if type(a).attended is not MethodAnalysis.attended]
        self.losing = [a for a in analyses if type(a).predicted is not MethodAnalysis.predicted]

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        layer = self.cache.layers[call.layer]
        if not self.looking or not layer.geometry.evicts:
            return
        begin = self.reference.prompt + first
        positions = layer.positions[:, :, : layer.rows]
        held = torch.ones_like(positions, dtype=torch.bool) if layer.valid is None else layer.valid
        for start in range(0, out.shape[1], WINDOW):
            query = call.query[:, :, start : start + WINDOW]
            at = torch.arange(begin + start, begin + start + query.shape[2], device=query.device)
            weights = attention_to(layer, call, query, begin + start, held=True)  # [b, Hk, g, w, n]
            visible = held[:, :, None] & (positions[:, :, None] <= at[:, None])  # [b, Hk, w, n]
            look = Look(
                chosen=self.chosen,
                traces=self.places,
                layer=call.layer,
                weights=weights.flatten(1, 2),
                visible=visible[:, :, None].expand_as(weights).flatten(1, 2),
            )
            for analysis in self.looking:
                analysis.attended(look)

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        if not self.losing:
            return
        part = slice(first, first + logits.shape[1])
        target = self.reference.targets[:, part, None]
        evicted, full = (
            -of.double().log_softmax(dim=-1).gather(-1, target)[..., 0]
            for of in (logits, self.reference.logits[:, part])
        )
        losses = Losses(chosen=self.chosen, traces=self.places, first=first, evicted=evicted, full=full)
        for analysis in self.losing:
            analysis.predicted(losses)

    def block(self, index: int) -> None:
        self.tell(index)

    def tell(self, index: int | None) -> None:
        attention, seen = self.reference.attention, self.cache.seen
        paid = None if index is None else torch.stack([a[:, :, index, :seen] for a in attention.values()])
        moment = Moment(
            chosen=self.chosen,
            bounded=self.bounded,
            traces=self.places,
            layers=list(attention),
            index=index,
            count=self.reference.blocks,
            prompt=self.reference.prompt,
            seen=seen,
            held=held_tokens(self.cache, self.reference, seen),
            copies=max(self.cache.layers[i].positions.shape[1] // a.shape[1] for i, a in attention.items()),
            paid=paid,
        )
        for analysis in self.analyses:
            analysis.moment(moment)
