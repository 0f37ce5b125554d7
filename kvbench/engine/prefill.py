"""Reading a prompt: in chunks, against its own full keys, then one eviction down to the budget.

The whole prompt's K and V are held while it is read (memory of one prompt), every chunk attends to all of it, and
what is left after the eviction is copied to the slots of all its samples. So the prompt's own hidden states and the
first token's logits are those of the full cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.attention import AttentionCall
from kvbench.engine.cache import SlotCache
from kvbench.engine.evict import Evictor, KeptLog, one_thread
from kvbench.engine.forward import BlockWriter
from kvbench.engine.geometry import LayerGeometry
from kvbench.eviction.api import Method, Needs


def stored_queries(needs: Needs, interval: int, longest: int) -> int:
    """How many of the newest queries a method makes the cache keep; never more than a sequence has."""
    wanted = {"none": 0, "last": 1, "window": needs.window, "since_last": interval}[needs.queries]
    return min(wanted, longest)


@dataclass(slots=True)
class PromptState:
    """A prompt that was read: its (evicted) cache in slot 0 of `cache`, and the logits [V] that follow it."""

    cache: SlotCache
    logits: torch.Tensor
    tokens: int
    evicted: bool
    seconds: float = 0.0  # reading
    evict_seconds: float = 0.0


class PromptReader:
    """Reads one prompt after the other.

    Args:
        model: a transformers causal LM whose attention is routed to `handle`.
        chunk: tokens a forward pass.
        budget: entries left after the prompt's eviction; None for the full cache.
    """

    def __init__(
        self,
        model: Any,
        geometry: Sequence[LayerGeometry],
        method: Method,
        *,
        budget: int | None,
        interval: int,
        longest: int,
        chunk: int,
        device: torch.device,
        dtype: torch.dtype,
        log: KeptLog | None = None,
    ) -> None:
        self.model, self.geometry, self.method = model, geometry, method
        self.budget, self.chunk, self.device, self.dtype, self.log = budget, chunk, device, dtype, log
        self.needs = method.needs()
        self.trigger = method.trigger(interval)
        self.queries = stored_queries(self.needs, interval, longest)
        self._writer: BlockWriter | None = None

    def handle(self, call: AttentionCall) -> torch.Tensor:
        assert self._writer is not None
        return self._writer(call)

    def read(self, ids: Sequence[int], noise_key: int) -> PromptState:
        """Read a prompt of at least one token."""
        n = len(ids)
        cache = SlotCache(
            self.geometry,
            slots=1,
            capacity=n,
            columns=self.method.columns(),
            queries=self.queries,
            device=self.device,
            dtype=self.dtype,
        )
        evictor = Evictor(self.method, self.budget, self.trigger, cache, self.log) if self.budget is not None else None
        observer = None
        if evictor is not None:
            evictor.start(0, n, noise_key)
            observer = evictor.observe_block if self.needs.queries == "since_last" else None
        self._writer = BlockWriter(cache, observer)
        tokens = torch.tensor([ids], device=self.device)
        for start in range(0, n, self.chunk):
            block = tokens[:, start : start + self.chunk]
            positions = self._writer.begin(start, block.shape[1])
            out = self.model(
                input_ids=block,
                position_ids=positions[None],
                attention_mask=None,
                past_key_values=None,
                use_cache=False,
                logits_to_keep=1,
            )
        self._writer = None
        cache.lengths[0] = cache.seen[0] = n
        evicted, began = False, time.perf_counter()
        if evictor is not None:
            evictor.start(0, n, noise_key)  # every row now has its position and columns
            with one_thread(self.device):
                evicted = bool(evictor.evict([0]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return PromptState(cache, out.logits[0, -1], n, evicted, evict_seconds=time.perf_counter() - began)
