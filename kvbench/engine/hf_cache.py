"""`EvictionCache`: any method in a plain `model.generate`.

    cache = EvictionCache(model, "gkv", budget=512)
    model.generate(input_ids, past_key_values=cache)

It is a `transformers.Cache` whose memory is the engine's SlotCache, one slot a row of the batch, and it routes the
model's attention through the engine's writers while it exists; `close` (or leaving a with-block) gives the model its
own attention back. Greedy tokens equal the engine's. One cache serves one `generate` call; rows must be equally long
(no padding). It is a bridge for use in other code: the benchmark itself runs on `loop.Engine`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from transformers import Cache

from kvbench import registry
from kvbench.engine.attention import AttentionCall, route
from kvbench.engine.cache import SlotCache
from kvbench.engine.evict import Evictor, one_thread
from kvbench.engine.forward import BlockWriter, StepWriter
from kvbench.engine.geometry import check_evicts, for_lengths, read_geometry
from kvbench.engine.loop import capacity
from kvbench.engine.prefill import stored_queries
from kvbench.errors import UserError
from kvbench.eviction.api import Method
from kvbench.records import Request


class EvictionCache(Cache):
    """A bounded KV cache for `generate`.

    Args:
        model: a transformers causal LM.
        method: a registered name, or a Method with its options.
        budget: entries per layer and KV head after an eviction; None only for a method that does not evict.
        interval: generated tokens between evictions.
        max_tokens: longest prompt plus output; default the model's context. Sizes sliding-window rings, and the rows of
            methods that bound nothing.
        seed: of methods that draw random numbers.

    Raises:
        UserError: unknown method, budget missing or too small, architecture not supported.
    """

    is_compileable = False

    def __init__(
        self,
        model: Any,
        method: str | Method,
        *,
        budget: int | None = None,
        interval: int = 128,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self.method: Method = registry.methods.get(method)() if isinstance(method, str) else method
        if self.method.evicts and (budget is None or budget < self.method.min_budget()):
            raise UserError(f"the method needs a budget of at least {self.method.min_budget()}; got {budget}.")
        self.budget = budget if self.method.evicts else None
        self.interval, self.trigger, self.seed = interval, self.method.trigger(interval), seed
        self.max_tokens = max_tokens or int(model.config.get_text_config().max_position_embeddings)
        self.geometry = for_lengths(read_geometry(model), self.max_tokens)
        if self.budget is not None:
            check_evicts(self.geometry, self.max_tokens)
        self.slots: SlotCache | None = None
        self._evictor: Evictor | None = None
        self._writer: BlockWriter | StepWriter | None = None
        self._seen = self._clock = 0
        self._last = self.geometry[-1].index
        # The routing knows this cache weakly: when nobody holds the cache any more, the model gets its attention back.
        myself = weakref.WeakMethod(self._attend)
        stack = contextlib.ExitStack()
        stack.enter_context(route(model, lambda call: _alive(myself)(call)))
        stack.callback(model.register_forward_pre_hook(_refuse_padding, with_kwargs=True).remove)
        self._close = weakref.finalize(self, stack.close)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The new keys and values as they are: `_attend` stores them, because a method also needs the queries."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, evicted ones included: positions follow from it."""
        return self._seen

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._seen + 1, 0

    def get_max_cache_shape(self, layer_idx: int | None = 0) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise UserError("EvictionCache does not serve beam search.")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("EvictionCache cannot take tokens back (assisted decoding).")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UserError("EvictionCache does not repeat rows of its batch; repeat the prompt instead.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UserError("EvictionCache does not select rows of its batch.")

    def entries(self) -> list[int]:
        """Live entries per layer and KV head of each row of the batch."""
        return list(self.slots.lengths) if self.slots else []

    def close(self) -> None:
        """Give the model its own attention back."""
        self._close()

    def __enter__(self) -> EvictionCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        tokens = call.query.shape[2]
        if call.layer == self.geometry[0].index:
            self._begin(call, tokens)
        assert self._writer is not None
        out = self._writer(call)
        if call.layer == self._last:
            self._end(tokens)
        return out

    def _begin(self, call: AttentionCall, tokens: int) -> None:
        if self._seen + tokens > self.max_tokens:
            raise UserError(f"the sequence outgrows this cache's max_tokens={self.max_tokens}; give a larger one.")
        if tokens > 1 and self._seen:
            raise UserError("EvictionCache reads the prompt in one forward pass; later passes bring one token a row.")
        if tokens > 1 or not self._seen:
            self._start(call, tokens)
            return
        assert self.slots is not None
        assert isinstance(self._writer, StepWriter)
        self._writer.begin(keep_queries=True)

    def _start(self, call: AttentionCall, tokens: int) -> None:
        """The prompt of every row goes to a scratch cache of its full length."""
        rows, method = call.query.shape[0], self.method
        self._scratch = self._make(rows, tokens, None, call)
        observer = None
        if self.budget is not None:
            self._evictor = Evictor(method, self.budget, self.trigger, self._scratch)
            self._enter_rows(self._evictor, range(rows), tokens, 0, sample=-1)
            observer = self._evictor.observe_block if method.needs().queries == "since_last" else None
        self._writer = BlockWriter(self._scratch, observer)
        self._writer.begin(0, tokens)

    def _make(self, rows: int, size: int, longest: int | None, call: AttentionCall) -> SlotCache:
        return SlotCache(
            self.geometry,
            slots=rows,
            capacity=size,
            columns=self.method.columns() if self.budget is not None else (),
            queries=stored_queries(self.method.needs(), self.interval, self.max_tokens),
            longest=longest,
            bounded=self.budget is not None,
            device=call.query.device,
            dtype=call.key.dtype,
        )

    def _enter_rows(self, evictor: Evictor, rows: range, tokens: int, evictions: int, sample: int) -> None:
        for row in rows:
            request = Request(task="generate", doc_id=str(row), prompt_ids=(), max_new_tokens=0, seed=self.seed)
            evictor.start(row, tokens, request.noise_key(sample), evictions)

    def _end(self, tokens: int) -> None:
        """After the last layer: advance, evict what is due, and after the prompt move to the bounded slots."""
        self._seen += tokens
        if self.slots is None:
            self._settle(tokens)
            return
        self._clock += 1
        for row in range(self.slots.slots):
            self.slots.lengths[row] += 1
            self.slots.seen[row] += 1
        if self._evictor is not None and self.trigger.due(self._clock):
            with one_thread(self.slots.device):
                self._evictor.tick(range(self.slots.slots))

    def _settle(self, tokens: int) -> None:
        scratch = self._scratch
        rows = range(scratch.slots)
        scratch.lengths = [tokens] * scratch.slots
        scratch.seen = [tokens] * scratch.slots
        evicted = 0
        if self._evictor is not None:
            self._enter_rows(self._evictor, rows, tokens, 0, sample=-1)
            with one_thread(scratch.device):
                evicted = int(bool(self._evictor.evict(rows)))
        size = capacity(self.method, self.budget, self.interval, self.max_tokens)
        first = scratch.layers[0]
        self.slots = SlotCache(
            self.geometry,
            slots=scratch.slots,
            capacity=size,
            columns=scratch.column_specs,
            queries=scratch.query_rows,
            longest=self.max_tokens,
            bounded=self.budget is not None,
            device=scratch.device,
            dtype=first.keys.dtype,
        )
        for row in rows:
            self.slots.copy_from(scratch, row, [row])
        if self.budget is not None:
            self._evictor = Evictor(self.method, self.budget, self.trigger, self.slots)
            self._enter_rows(self._evictor, rows, tokens, evicted, sample=0)
        self._writer = StepWriter(self.slots)
        del self._scratch


def _alive(method: Any) -> Callable[[AttentionCall], torch.Tensor]:
    found: Callable[[AttentionCall], torch.Tensor] | None = method()
    assert found is not None  # a dead cache's routing is closed by its finaliser
    return found


def _refuse_padding(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise UserError(
            "EvictionCache does not take padded batches: pads would be cached. Generate equally long prompts together."
        )
