"""Reads a batch of traces with the full cache, and keeps a record of this reading. Readings under eviction are compared
with the record. The oracle takes its scores, the attention of later queries, from the record.

A block is a part of an answer: `interval` successive tokens, fewer in the last block.

For a trace of n answer tokens and T tokens in all, the record has n V numbers for logits (V: vocabulary). Per layer it
also has n Hq D numbers for the outputs of attention (Hq query heads of dimension D). Per layer and block it has at most
4 T Hk numbers for attention (Hk KV heads). Therefore `batches` puts fewer traces into a batch if they are long.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.model.load import LoadedModel
from kvbench.eviction.budget import Budget
from kvbench.eviction.terms.golden import upcoming
from kvbench.eviction.terms.window_attention import Reduce, window_attention
from kvbench.replay.choices import FULL, Chosen
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.traces import ForcedTrace

# One tensor [L, b, Hk, T] per block: 1 for tokens whose entry is held when the block begins, 0 for others; shares if
# entries are held per query head (`held_tokens`).
Held = list[torch.Tensor]
MOST_BYTES = 1 << 30  # largest record of a batch
MOST_TRACES = 64  # most traces of a batch


class FutureAttention(Listener):
    """Records the attention of a batch read with the full cache: b traces with P prompt and n answer tokens each.

    Attributes (both by layer, for the layers in which methods evict):
        attention: [b, Hk, blocks, T] float32, T = P + n - 1: for each block of the answer, the attention that the
            block's queries pay to each token. It is summed over the queries and divided by the interval, as in
            `kvbench.eviction.terms.golden`.
        most: as `attention`, but the largest attention that any query of the block pays; empty unless `extreme`.
    """

    def __init__(
        self, traces: Sequence[ForcedTrace], interval: int, device: torch.device, *, extreme: bool = False
    ) -> None:
        self.traces, self.interval, self.device, self.extreme = traces, interval, device, extreme
        self.prompt, self.length = len(traces[0].prompt), len(traces[0].answer)
        self.blocks = -(-(self.length - 1) // interval)
        self.attention: dict[int, torch.Tensor] = {}
        self.most: dict[int, torch.Tensor] = {}

    @property
    def total(self) -> int:
        """How many tokens of prompt and answer the model reads: all but the last, which predicts no token."""
        return self.prompt + self.length - 1

    def opened(self, cache: PromptCache) -> None:
        super().opened(cache)
        for g in cache.evicting:
            shape = (len(self.traces), g.kv_heads, self.blocks, self.total)
            self.attention[g.index] = torch.zeros(shape, device=cache.device)
            if self.extreme:
                self.most[g.index] = torch.zeros(shape, device=cache.device)

    def block(self, index: int) -> None:
        self._block = index

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        layer = self.cache.layers[call.layer]
        if not layer.geometry.evicts:
            return
        paid = attention_to(layer, call, call.query, self.prompt + first, reduce_g="mean", reduce_q="sum")
        self.attention[call.layer][:, :, self._block, : layer.rows] += paid / self.interval
        if self.extreme:
            known = self.most[call.layer][:, :, self._block, : layer.rows]
            paid = attention_to(layer, call, call.query, self.prompt + first, reduce_g="mean", reduce_q="max")
            torch.maximum(known, paid, out=known)

    def future(self) -> dict[str, torch.Tensor]:
        """Return, by name, the weights that the oracle `golden` reads: tables of future attention, and the interval.

        Each table has one block (`interval` tokens) more than the answer. The values of this last block are 0, because
        no query follows it.
        """
        tables = {"interval": torch.tensor(self.interval, device=self.device)}
        for name, table in (("mean", self.attention), ("max", self.most)):
            for layer, paid in table.items():
                coming = upcoming(paid.flatten(0, 1)).view(paid.shape) if self.blocks else paid
                tables[f"{name}.{layer}"] = torch.nn.functional.pad(coming, (0, 0, 0, 1))
        return tables


class Reference(FutureAttention):
    """The record of a batch read with the full cache, with which readings under eviction are compared.

    Attributes beside those of `FutureAttention`:
        targets: [b, n], the tokens of the answers.
        logits: [b, n, V], the logits that predict these tokens.
        outputs: by layer, for the layers in which methods evict, [b, n - 1, Hq, Dv], the outputs of the attention heads
            for all answer tokens but the last.
        oracle: by budget, the entries that the oracle holds; filled while the batch is read with the oracle.
    """

    def opened(self, cache: PromptCache) -> None:
        super().opened(cache)
        self.targets = torch.tensor([t.answer for t in self.traces], device=self.device)
        self.outputs: dict[int, torch.Tensor] = {}
        self.oracle: dict[Budget | None, Held] = {}
        self._logits: list[torch.Tensor] = []
        for g in cache.evicting:
            outputs = (len(self.traces), self.length - 1, g.query_heads, g.read_dim)
            self.outputs[g.index] = cache.layers[g.index].values.new_empty(outputs)

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        super().attended(call, first, out)
        if call.layer in self.outputs:
            self.outputs[call.layer][:, first : first + out.shape[1]] = out

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        self._logits.append(logits)

    def close(self) -> None:
        """Concatenate the recorded logits, and release the cache. Call this after the traces were read."""
        self.logits = torch.cat(self._logits, dim=1)
        self._logits.clear()
        del self.cache

    def pick(self, index: int) -> Reference:
        """Return the part of this record that belongs to one trace of the batch."""
        one, part = copy.copy(self), slice(index, index + 1)
        one.traces, one.targets = self.traces[part], self.targets[part]
        one.logits = self.logits[part]
        one.outputs = {layer: out[part] for layer, out in self.outputs.items()}
        one.attention = {layer: paid[part] for layer, paid in self.attention.items()}
        one.most = {layer: paid[part] for layer, paid in self.most.items()}
        one.oracle = {budget: [held[:, part] for held in blocks] for budget, blocks in self.oracle.items()}
        return one


def attention_to(
    layer: PromptLayer,
    call: AttentionCall,
    query: torch.Tensor,
    first: int,
    *,
    held: bool = False,
    reduce_g: Reduce | None = None,
    reduce_q: Reduce | None = None,
) -> torch.Tensor:
    """Return the attention [b, Hk, g, t, N] that queries pay to all N tokens read so far. A token later than a query
    gets 0.

    query: [b, Hq, t, D]; the first of the t queries is at position `first`. held: if true, N counts the layer's places
    for entries instead of tokens; a place without an entry gets 0. reduce_g, reduce_q: how to reduce the attention over
    the g query heads of a group, and over the t queries; the result lacks a reduced axis. None keeps the axis.
    """
    end = first + query.shape[2]
    rows = layer.rows if held else end
    return window_attention(
        query,
        layer.keys[:, :, :rows],
        torch.arange(first, end, device=query.device).expand(len(query), -1),
        layer.positions[:, :, :rows],
        layer.valid if held else None,
        scaling=call.scaling,
        softcap=call.softcap,
        reduce_g=reduce_g,
        reduce_q=reduce_q,
    )


def read_full(reader: TraceReader, traces: Sequence[ForcedTrace], *, extreme: bool = False) -> Reference:
    """Read a batch with the full cache, and return the record of this reading. reader: a reader whose method is `full`,
    the full cache. extreme: whether to record `Reference.most`."""
    reference = Reference(traces, reader.interval, reader.loaded.device, extreme=extreme)
    reader.read(traces, reference)
    reference.close()
    return reference


def read_future(
    reader: TraceReader, traces: Sequence[ForcedTrace], *, extreme: bool = False
) -> dict[str, torch.Tensor]:
    """Read a batch as `read_full` does, but return only the oracle's tables of future attention."""
    record = FutureAttention(traces, reader.interval, reader.loaded.device, extreme=extreme)
    reader.read(traces, record)
    return record.future()


Reading = tuple[Chosen, TraceReader, Reference, dict[str, torch.Tensor]]


def readings(
    loaded: LoadedModel, traces: Sequence[ForcedTrace], chosen: Sequence[Chosen], *, interval: int, max_tokens: int
) -> Iterator[tuple[list[ForcedTrace], Iterator[Reading]]]:
    """Yield each batch of traces with what the caller needs to read it under eviction. The batch is read with the full
    cache when the caller begins to iterate over these readings.

    There is one reading for each method and budget. It has the method and budget, a reader for them, the record of the
    batch with the full cache, and the weights that an oracle needs ({} for other methods). A method with probes gets
    one reading for each trace of the batch, with the record of this trace.
    """
    full = TraceReader.of(loaded, FULL, interval=interval, max_tokens=max_tokens)
    readers = {c: TraceReader.of(loaded, c, interval=interval, max_tokens=max_tokens) for c in chosen}
    for batch in batches(traces, loaded, interval) if chosen else ():
        yield batch, _readings_of(batch, full, readers)


def _readings_of(
    batch: Sequence[ForcedTrace], full: TraceReader, readers: Mapping[Chosen, TraceReader]
) -> Iterator[Reading]:
    extreme = any(reader.within == "max" for reader in readers.values())
    with torch.inference_mode():
        reference = read_full(full, batch, extreme=extreme)
        future = reference.future()
    for c, reader in readers.items():
        if reader.together:
            yield c, reader, reference, future if reader.within else {}
        else:
            for one in map(reference.pick, range(len(batch))):
                yield c, reader, one, one.future() if reader.within else {}


def batches(traces: Sequence[ForcedTrace], loaded: LoadedModel, interval: int) -> Iterator[list[ForcedTrace]]:
    """Yield batches of traces. All prompts of a batch have the same length, and all answers of a batch have the same
    length.

    A batch is as large as MOST_BYTES and MOST_TRACES allow, and has at least one trace. A trace with images forms a
    batch alone.
    """
    yield from ([trace] for trace in traces if trace.request.images)
    alike: dict[tuple[int, int], list[ForcedTrace]] = {}
    for trace in (trace for trace in traces if not trace.request.images):
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
        element * answer * g.query_heads * g.read_dim
        + 16 * g.kv_heads * blocks * total
        + total * g.entry_bytes(element)
    )
