"""`EvictionCache`: any method in a plain `model.generate`.

    cache = EvictionCache(model, "gkv", budget=512)
    model.generate(input_ids, past_key_values=cache)

It is a `transformers.Cache` whose memory is the engine's SlotCache, one slot per row of the batch. During a forward
pass with the cache, the engine's writers compute the model's attention; at all other times the model is unchanged, so
several caches may exist for one model. Greedy tokens equal the engine's. One cache serves one `generate` call; rows
must be equally long (no padding). The class is for use in other code; the benchmark runs on `loop.Engine`.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from transformers import Cache

from kvbench.config import parsers
from kvbench.config.parsers import parse
from kvbench.engine.attention.geometry import largest_group
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.layout import Lengths
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.evict import Evictor, one_thread
from kvbench.engine.model.load import prepare
from kvbench.engine.prefill import PromptReader
from kvbench.engine.setup import set_up
from kvbench.engine.writers import BlockWriter, StepWriter, step_writer
from kvbench.errors import UserError
from kvbench.eviction.api import Method
from kvbench.eviction.budget import Budget, label
from kvbench.eviction.choose import from_label
from kvbench.eviction.options import check_budget
from kvbench.records import Request

BLOCK = 512  # prompt queries per attention call


class EvictionCache(Cache):
    """A bounded KV cache for `generate`.

    Args:
        model: a transformers causal LM.
        method: a registered name, optionally with options (``"gkv(alpha=0.9)"``) or two names joined by "+"
            (``"snapkv+gkv"``), or a Method.
        budget: entries per layer and KV head after an eviction, or the share of the prompt as a float or as text
            (``"25%"``); None only for a method that takes no budget.
        interval: generated tokens between two ticks.
        max_tokens: longest prompt plus output; default: the model's context. Sizes the rings of sliding-window layers,
            and the cache of methods without a bound.
        seed: for methods that draw random numbers.
        tokenizer: for methods that read extra text (kvzip).

    Raises:
        UserError: unknown method, budget missing or too small, architecture not supported.
    """

    is_compileable = False

    def __init__(
        self,
        model: Any,
        method: str | Method,
        *,
        budget: float | str | None = None,
        interval: int = 128,
        max_tokens: int | None = None,
        seed: int = 0,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(layers=[])
        if not hasattr(model, "config") or not isinstance(method, (str, Method)):
            raise UserError("EvictionCache(model, method): a transformers model, and a method's name or a Method.")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise UserError(f"interval must be a whole number of tokens, 1 or more; got {interval!r}.")
        self.method = from_label(method) if isinstance(method, str) else method
        self.interval, self.seed = interval, seed
        loaded = prepare(model, tokenizer)
        self.max_tokens = max_tokens or loaded.context
        self._group = largest_group(loaded.geometry)
        self.budget = self._checked(budget) if self.method.takes_budget else None
        self._setup = set_up(
            loaded,
            self.method,
            budget=self.budget,
            interval=interval,
            lengths=Lengths.of(self.max_tokens),
        )
        self._first, self._last = self._setup.geometry[0].index, self._setup.geometry[-1].index
        self.trigger = self._setup.trigger
        self._reader = PromptReader(self._setup, chunk=BLOCK)
        self.slots: SlotCache | None = None
        self._prompt: PromptCache | None = None
        self._evictor: Evictor | None = None
        self._writer: BlockWriter | StepWriter | None = None
        self._seen = self._clock = 0
        self._ids = torch.empty(0)
        # The hooks act only in forward passes with this cache. They hold the cache by a weak reference, and are removed
        # when the cache is deleted.
        myself, self._routing = weakref.ref(self), contextlib.ExitStack()
        hooks = contextlib.ExitStack()
        before = model.register_forward_pre_hook(lambda _, a, k: _of(myself, k, "_enter", a), with_kwargs=True)
        after = model.register_forward_hook(
            lambda _, a, k, out: _of(myself, k, "_leave"), with_kwargs=True, always_call=True
        )
        hooks.callback(before.remove)
        hooks.callback(after.remove)
        self._close = weakref.finalize(self, hooks.close)

    def _checked(self, budget: Any) -> Budget | None:
        """Parse and check the budget. Raises UserError when it is missing, invalid or too small."""
        size = None
        if budget is not None:
            size = parse("budget", parsers.budget, budget if isinstance(budget, str) else label(budget))
        check_budget(type(self.method).__name__, self.method, size, group=self._group, word="budget")
        return size

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return the new keys and values unchanged: `_attend` stores them, because a method also needs the queries."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens read so far, evicted ones included: transformers derives positions from this number."""
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

    def entries(self) -> list[float]:
        """Return per row of the batch the mean number of live entries per layer and KV head."""
        return [self.slots.held(row) * self._setup.copies for row in range(self.slots.slots)] if self.slots else []

    def close(self) -> None:
        """Remove the cache's hooks from the model; the cache cannot be used afterwards."""
        self._close()

    def __enter__(self) -> EvictionCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, kwargs: dict[str, Any], args: tuple[Any, ...]) -> None:
        """Route the model's attention to the cache before a forward pass.

        The second pass brings the token after the prompt: before it runs, the prompt is evicted.
        """
        _refuse_padding(kwargs)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise UserError("EvictionCache needs input_ids; it does not serve inputs_embeds.")
        if self._seen and ids.shape[1] != 1:
            raise UserError(
                "EvictionCache serves one generate call: it reads the prompt in one forward pass, later ones bring one "
                "token a row. Make a new cache for another prompt."
            )
        self._routing.enter_context(self._reader.model.routed())
        self._routing.enter_context(self._reader.model.attend(self._attend))
        if self._prompt is None:
            self._ids = ids
            return
        try:
            with torch.no_grad():
                self._settle(ids[:, 0].tolist())
        except BaseException:
            self._routing.close()
            raise

    def _leave(self, kwargs: dict[str, Any]) -> None:
        """Restore the model's attention after a forward pass, also a failed one."""
        self._routing.close()

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        tokens = call.query.shape[2]
        if call.layer == self._first:
            self._begin(call, tokens)
        assert self._writer is not None
        out = self._writer(call)
        if call.layer == self._last:
            self._end(tokens)
        return out

    def _begin(self, call: AttentionCall, tokens: int) -> None:
        if self._seen + tokens > self.max_tokens:
            raise UserError(f"the sequence outgrows this cache's max_tokens={self.max_tokens}; give a larger one.")
        if self.slots is None:
            self._start(call, tokens)
            return
        assert isinstance(self._writer, StepWriter)
        self._writer.begin(keep_queries=True)

    def _start(self, call: AttentionCall, tokens: int) -> None:
        """Create a cache that holds the prompt of every row in full."""
        # The dtype under autocast is known only now, and the model may have moved to another device.
        loaded = replace(self._setup.loaded, device=call.query.device, dtype=call.key.dtype)
        self._setup = self._reader.setup = replace(self._setup, loaded=loaded)
        keys = [self._noise_key(row, -1) for row in range(call.query.shape[0])]
        self._prompt = self._reader.cache(self._setup.rules_for_prompt(tokens), keys, tokens, tokens)
        self._writer = self._reader.writer(self._prompt)
        self._writer.begin(0, tokens)

    def _noise_key(self, row: int, sample: int) -> int:
        request = Request(task="generate", doc_id=str(row), prompt_ids=(), max_new_tokens=0, seed=self.seed)
        return request.noise_key(sample)

    def _end(self, tokens: int) -> None:
        """Count the new tokens after the last layer, and evict if the interval has ended."""
        self._seen += tokens
        if self.slots is None:
            assert self._prompt is not None
            self._prompt.seen = tokens
            return
        self._clock += 1
        rows = range(self.slots.slots)
        self.slots.advance(rows)
        if self._evictor is not None and self.trigger.due(self._clock):
            with one_thread(self.slots.device):
                self._evictor.tick(rows)

    def _settle(self, first: list[int]) -> None:
        """Evict the prompt and copy its entries to the slots. first: per row, the token that follows the prompt."""
        prompt, setup = self._prompt, self._setup
        assert prompt is not None
        with one_thread(prompt.device):
            if prompt.acting.needs().probes and prompt.full():
                self._probe(prompt, first)
            prompt.reduce()
        rows = range(len(first))
        self.slots = setup.cache(len(rows))
        for row in rows:
            packed = {index: layer.pack(row) for index, layer in prompt.layers.items()}
            self.slots.install(packed, [row], self._seen)
        if self.method.evicts:
            self._evictor = Evictor(setup.rules, self.slots)
            for row in rows:
                self._evictor.start(
                    row, prompt.rules.budget, prompt.prompt_len, self._noise_key(row, 0), prompt.evictions
                )
        self._writer, self._prompt = step_writer(self.slots, setup.rules), None

    def _probe(self, prompt: PromptCache, first: list[int]) -> None:
        if len(first) > 1:
            raise UserError("the method probes its prompt (extra tokens) and serves one row; generate rows one by one.")
        self._reader.probe(prompt, self._ids[0].tolist(), first[0])


def _of(cache: weakref.ref[EvictionCache], kwargs: dict[str, Any], hook: str, *args: Any) -> None:
    """Call a method of the cache if this forward pass uses the cache."""
    mine = cache()
    if mine is not None and kwargs.get("past_key_values") is mine:
        getattr(mine, hook)(kwargs, *args)


def _refuse_padding(kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise UserError(
            "EvictionCache does not take padded batches: pads would be cached. Generate equally long prompts together."
        )
