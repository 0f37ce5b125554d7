"""Reads the traces of a task for analyses: with the full cache in windows of queries, and with every chosen method.

study = Study(task="walk", traces=traces, interval=128)
found = [kind(study) for kind in choose(["overlap", "survival"])]
read(loaded, study, found, chosen, max_tokens=400)
found[0].rows()

Memory holds the attention of one window or the `Reference` of one batch, and the sums of the analyses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.model.load import LoadedModel
from kvbench.eviction.terms.window_attention import window_attention
from kvbench.replay.analyses.api import WINDOW, Analysis, AttentionAnalysis, MethodAnalysis, Moment, Study, Window
from kvbench.replay.choices import FULL, Chosen
from kvbench.replay.comparison import held_tokens
from kvbench.replay.reader import CHUNK, Listener, Tick, TraceReader
from kvbench.replay.reference import Reference, batches, read_full
from kvbench.replay.traces import Trace

SCRATCH_FLOATS = 1 << 24  # most attention weights of a window, over the batch


def read(
    loaded: LoadedModel,
    study: Study,
    analyses: Sequence[Analysis],
    chosen: Sequence[Chosen],
    *,
    max_tokens: int,
    tick: Tick = lambda text, traces, tokens: None,
) -> None:
    """Read every trace with the full cache for attention analyses, and with every chosen method for the others."""
    looking = [a for a in analyses if isinstance(a, AttentionAnalysis)]
    watching = [a for a in analyses if isinstance(a, MethodAnalysis)]
    places = {id(trace): i for i, trace in enumerate(study.traces)}
    if looking:
        reader = TraceReader.of(loaded, FULL, interval=CHUNK, max_tokens=max_tokens)
        for batch in _narrow(study.traces, loaded):
            reader.read(batch, _Windows(batch, [places[id(t)] for t in batch], looking))
            tick("full", len(batch), sum(len(t.answer) for t in batch))
    if not watching:
        return
    full = TraceReader.of(loaded, FULL, interval=study.interval, max_tokens=max_tokens)
    readers = {c: TraceReader.of(loaded, c, interval=study.interval, max_tokens=max_tokens) for c in chosen}
    extreme = any(reader.within == "max" for reader in readers.values())
    for batch in batches(study.traces, loaded, study.interval):
        with torch.inference_mode():
            reference = read_full(full, batch, extreme=extreme)
            future = reference.future()
        for c, evicting in readers.items():
            known = future if evicting.within else {}
            for part in [reference] if evicting.together else [reference.pick(i) for i in range(len(batch))]:
                holdings = _Holdings(part, c, evicting, [places[id(t)] for t in part.traces], watching)
                evicting.read(part.traces, holdings, known)
                holdings.tell(None)
            tick(c.label, len(batch), sum(len(t.answer) for t in batch))


def _narrow(traces: Sequence[Trace], loaded: LoadedModel) -> Iterator[list[Trace]]:
    """Yield batches for which the attention weights of a window are at most SCRATCH_FLOATS."""
    heads = max((g.query_heads for g in loaded.geometry if g.evicts), default=1)
    for batch in batches(traces, loaded, CHUNK):
        total = len(batch[0].prompt) + len(batch[0].answer)
        most = max(1, SCRATCH_FLOATS // (heads * WINDOW * total))
        for first in range(0, len(batch), most):
            yield batch[first : first + most]


class _Windows(Listener):
    """A listener that hands the full cache's attention to analyses, in windows of queries."""

    def __init__(self, batch: Sequence[Trace], places: list[int], analyses: Sequence[AttentionAnalysis]) -> None:
        self.places, self.analyses = places, analyses
        self.prompt, self.count = len(batch[0].prompt), -(-(len(batch[0].answer) - 1) // WINDOW)

    def opened(self, cache: PromptCache) -> None:
        self._cache = cache

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        """Compute the attention of the new queries, window by window. first: a multiple of WINDOW, as CHUNK is."""
        layer = self._cache.layers[call.layer]
        if not layer.geometry.evicts:
            return
        for start in range(0, out.shape[1], WINDOW):
            query = call.query[:, :, start : start + WINDOW]
            begin = self.prompt + first + start
            end = begin + query.shape[2]
            weights = window_attention(
                query,
                layer.keys[:, :, :end],
                torch.arange(begin, end, device=query.device).expand(len(query), -1),
                layer.positions[:, :, :end],
                None,
                scaling=call.scaling,
                softcap=call.softcap,
                reduce_g=None,
                reduce_q=None,
            )  # [b, Hk, g, w, N]
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
    """A listener that tells analyses which entries a method holds as each block begins.

    Call `tell(None)` once the answer was read.
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

    def opened(self, cache: PromptCache) -> None:
        self._cache = cache

    def block(self, index: int) -> None:
        self.tell(index)

    def tell(self, index: int | None) -> None:
        attention, seen = self.reference.attention, self._cache.seen
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
            held=held_tokens(self._cache, self.reference, seen),
            copies=max(self._cache.layers[i].positions.shape[1] // a.shape[1] for i, a in attention.items()),
            paid=paid,
        )
        for analysis in self.analyses:
            analysis.moment(moment)
