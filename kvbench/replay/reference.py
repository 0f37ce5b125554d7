"""A batch of traces read with the full cache: the reference for readings under eviction, and the oracle's knowledge.

    kept per trace                numbers
    logits of its answer          n V
    outputs of attention heads    n Hq D per layer
    attention of later blocks     blocks T Hk per layer, four times: mean and maximum, of one and of all later blocks

with n tokens of the answer and T of the whole sequence. So long traces are read one by one (`batches`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.model.load import LoadedModel
from kvbench.eviction.terms.golden import upcoming
from kvbench.eviction.terms.window_attention import window_attention
from kvbench.replay.reader import TraceReader
from kvbench.replay.traces import Trace

MOST_BYTES = 1 << 30  # kept for a batch
MOST_TRACES = 64


class Reference:
    """A listener that records one batch under the full cache: b traces with P prompt tokens and n answer tokens.

    Attributes (the dicts are by layer, for layers that are evicted):
        targets: [b, n] the answers; logits: [b, n, V] that predict their tokens.
        outputs: [b, n - 1, Hq, Dv] of the attention heads, for every token of the answer but the last.
        attention: [b, Hk, blocks, T] float32, T = P + n - 1: mean attention that the queries of each block of the
            answer pay to every token, as in `kvbench.eviction.terms.golden`.
        most: the same, with the maximum over the block's queries instead of the mean; only if `extreme`.
    """

    def __init__(self, traces: Sequence[Trace], interval: int, device: torch.device, *, extreme: bool = False) -> None:
        self.traces, self.interval, self.extreme = traces, interval, extreme
        self.prompt, self.length = len(traces[0].prompt), len(traces[0].answer)
        self.blocks = -(-(self.length - 1) // interval)
        self.targets = torch.tensor([t.answer for t in traces], device=device)
        self.outputs: dict[int, torch.Tensor] = {}
        self.attention: dict[int, torch.Tensor] = {}
        self.most: dict[int, torch.Tensor] = {}
        self._logits: list[torch.Tensor] = []

    def opened(self, cache: PromptCache) -> None:
        self._cache = cache
        total = self.prompt + self.length - 1
        for g in cache.evicting:
            shape = (len(self.traces), g.kv_heads, self.blocks, total)
            self.attention[g.index] = torch.zeros(shape, device=cache.device)
            outputs = (len(self.traces), self.length - 1, g.query_heads, g.value_dim)
            self.outputs[g.index] = cache.layers[g.index].values.new_empty(outputs)
            if self.extreme:
                self.most[g.index] = torch.zeros(shape, device=cache.device)

    def block(self, index: int) -> None:
        self._block = index

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        layer = self._cache.layers[call.layer]
        if not layer.geometry.evicts:
            return
        count = out.shape[1]
        self.outputs[call.layer][:, first : first + count] = out
        at = torch.arange(self.prompt + first, self.prompt + first + count, device=out.device)
        paid = self._paid(call, layer, at, "sum") / self.interval
        self.attention[call.layer][:, :, self._block, : layer.rows] += paid
        if self.extreme:
            known = self.most[call.layer][:, :, self._block, : layer.rows]
            torch.maximum(known, self._paid(call, layer, at, "max"), out=known)

    @staticmethod
    def _paid(call: AttentionCall, layer: PromptLayer, at: torch.Tensor, how: Literal["sum", "max"]) -> torch.Tensor:
        """Return [b, Hk, N]: attention of queries at positions `at`, mean over the group, sum or max over queries."""
        return window_attention(
            call.query,
            layer.keys[:, :, : layer.rows],
            at.expand(len(call.query), -1),
            layer.positions[:, :, : layer.rows],
            None,
            scaling=call.scaling,
            softcap=call.softcap,
            reduce_g="mean",
            reduce_q=how,
        )

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        self._logits.append(logits)

    def close(self) -> None:
        """Join the logits once the traces were read, and release the cache."""
        self.logits = torch.cat(self._logits, dim=1)
        self._logits.clear()
        del self._cache

    def pick(self, index: int) -> Reference:
        """Return the reference of one trace of the batch."""
        one = Reference([self.traces[index]], self.interval, self.targets.device)
        part = slice(index, index + 1)
        one.logits = self.logits[part]
        one.outputs = {layer: out[part] for layer, out in self.outputs.items()}
        one.attention = {layer: paid[part] for layer, paid in self.attention.items()}
        return one

    def future(self) -> dict[str, torch.Tensor]:
        """Return the tables that `golden` reads as its weights; zero after the last block."""
        tables = {"interval": torch.tensor(self.interval, device=self.targets.device)}
        for name, table in (("mean", self.attention), ("max", self.most)):
            for layer, paid in table.items():
                coming = upcoming(paid.flatten(0, 1)).view(paid.shape) if self.blocks else paid
                tables[f"{name}.{layer}"] = torch.nn.functional.pad(coming, (0, 0, 0, 1))
        return tables


def read_full(reader: TraceReader, traces: Sequence[Trace], *, extreme: bool = False) -> Reference:
    """Read a batch with the full cache; return its reference. reader: of method `full`."""
    reference = Reference(traces, reader.interval, reader.loaded.device, extreme=extreme)
    reader.read(traces, reference)
    reference.close()
    return reference


def batches(traces: Sequence[Trace], loaded: LoadedModel, interval: int) -> Iterator[list[Trace]]:
    """Yield batches of traces with equal prompt and answer lengths, each as large as MOST_BYTES allows."""
    alike: dict[tuple[int, int], list[Trace]] = {}
    for trace in traces:
        alike.setdefault((len(trace.prompt), len(trace.answer)), []).append(trace)
    vocabulary = int(loaded.model.get_input_embeddings().weight.shape[0])
    for (prompt, answer), group in alike.items():
        size = sum(_layer_bytes(g, prompt, answer, interval, loaded.dtype.itemsize) for g in loaded.geometry)
        size += answer * vocabulary * (loaded.dtype.itemsize + 8)
        count = max(1, min(MOST_TRACES, MOST_BYTES // size))
        for first in range(0, len(group), count):
            yield group[first : first + count]


def _layer_bytes(g: LayerGeometry, prompt: int, answer: int, interval: int, element: int) -> int:
    blocks, total = -(-answer // interval), prompt + answer
    return (
        element * answer * g.query_heads * g.value_dim
        + 16 * g.kv_heads * blocks * total
        + total * g.entry_bytes(element)
    )
