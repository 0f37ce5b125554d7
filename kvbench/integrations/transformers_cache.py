"""`EvictionCache`: an eviction method in a plain `model.generate`.

    cache = EvictionCache(model, "gkv", budget=512)
    model.generate(input_ids, past_key_values=cache)

It is a `transformers.Cache` whose memory is the engine's SlotCache, one slot per prompt of the batch. During a forward
pass with the cache, the engine's writers compute the model's attention; at all other times the model's own code does,
so several caches may exist for one model. Greedy tokens equal the engine's, also for left-padded prompts and later
turns. Passes with the cache compute no gradients. The class is for use in other code; the benchmark runs on
`loop.Engine`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from kvbench.config import parsers
from kvbench.config.parsers import parse
from kvbench.engine.attention.geometry import homes, largest_group
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.layout import Lengths
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.recurrent import RecurrentStates
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.evict import Evictor, one_thread
from kvbench.engine.model.load import prepare
from kvbench.engine.prefill import PromptReader
from kvbench.engine.setup import set_up
from kvbench.engine.step_writers import StepWriter, step_writer
from kvbench.errors import UserError
from kvbench.eviction.api import Method
from kvbench.eviction.budget import Budget, label
from kvbench.eviction.choose import from_label
from kvbench.eviction.options import check_budget
from kvbench.integrations.batch_images import BatchImages, refuse_new_images
from kvbench.integrations.fixed_batch import FixedBatch
from kvbench.integrations.forward_hooks import hook
from kvbench.integrations.prompt_groups import (
    PromptGroup,
    attend,
    check_mask,
    check_positions,
    check_tokens,
    pads_before,
    store_logits,
    under_autocast,
)
from kvbench.records import Request

BLOCK = 512  # prompt queries per attention call; on a GPU attention without a mask reads all queries at once


class EvictionCache(FixedBatch):
    """A bounded KV cache for `generate`.

    Args:
        model: a transformers causal LM.
        method: a registered name, with or without options (``"gkv(alpha=0.9)"``); two such names joined by "+"
            (``"snapkv+gkv"``); or a Method.
        budget: entries per layer and KV head after an eviction, or a share of the prompt, as a float or as text
            (``"25%"``); None only for a method that takes no budget.
        interval: generated tokens between two ticks.
        max_tokens: most tokens of a prompt and its output together; default: the model's context. Caches that the
            method does not bound get this size; sliding windows of at least this size count as full attention.
        seed: seed of the random numbers that some methods draw.
        tokenizer: the model's, for methods that let the model read additional text (kvzip).

    Raises:
        UserError: an argument is invalid, the budget is missing or too small, or the method does not support the model.
        SetupError: a file of weights is missing, damaged or made for another model.
    """

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
            raise UserError("EvictionCache(model, method) takes a transformers model, and a method's name or a Method.")
        check_tokens("interval", interval)
        self.method = from_label(method) if isinstance(method, str) else method
        self.name = method if isinstance(method, str) else type(method).__name__
        self.interval, self.seed = interval, seed
        loaded = prepare(model, tokenizer)
        self.max_tokens = loaded.context if max_tokens is None else check_tokens("max_tokens", max_tokens)
        self._group = largest_group(loaded.geometry)
        self.budget = self._checked(budget) if self.method.takes_budget else None
        lengths = Lengths.of(self.max_tokens)
        self._setup = set_up(loaded, self.method, budget=self.budget, interval=interval, lengths=lengths)
        attending = homes(self._setup.geometry)
        self._first, self._last = min(attending), max(attending)
        self.trigger = self._setup.trigger
        self._reader = PromptReader(self._setup, chunk=BLOCK)
        self.slots: SlotCache | None = None
        self._pads: list[int] = []  # number of pads before each prompt
        self._states: RecurrentStates | None = None  # of recurrent layers
        self._images: BatchImages | None = None
        self._prompts: list[PromptGroup] = []  # empty before the prompts are read and after their eviction
        self._evictor: Evictor | None = None
        self._writer: StepWriter | None = None
        self._seen, self._clock, self._ids = 0, 0, torch.empty(0)
        self._routed = False  # whether a forward pass with this cache is running
        self._routing = contextlib.ExitStack()
        self._close = hook(loaded.model, self)

    def _checked(self, budget: Any) -> Budget | None:
        """Parse and check the budget. Raises UserError when it is missing, invalid or too small."""
        size = None
        if budget is not None:
            size = parse("budget", parsers.budget, budget if isinstance(budget, str) else label(budget))
        check_budget(self.name, self.method, size, group=self._group, word="budget")
        return size

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return the new keys and values unchanged: `_attend` stores them, because a method also needs the queries.

        Raises UserError outside a forward pass that uses the cache, where no code would store them.
        """
        if not self._routed:
            raise UserError(
                "this EvictionCache is closed or belongs to another model; make a new cache for this model."
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens of each sequence the model has read, pads and evicted tokens included."""
        return self._seen

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._seen + 1, 0

    def entries(self) -> list[float]:
        """Return how many entries each sequence of the batch holds now, a mean over the KV heads of evicted layers.

        [] until the second forward pass begins.
        """
        return [self.slots.held(row) * self._setup.copies for row in range(self.slots.slots)] if self.slots else []

    def bytes(self) -> int:
        """Return the bytes that the batch uses now: all entries, and all that method and model store beside them.

        0 until the second forward pass begins.
        """
        return sum(self.slots.live_bytes(row) for row in range(self.slots.slots)) if self.slots else 0

    def __repr__(self) -> str:
        budget = "none" if self.budget is None else label(self.budget)
        entries = ", ".join(f"{held:g}" for held in self.entries()) or "none yet"
        return (
            f"EvictionCache({self.name}, budget={budget}, interval={self.interval}, "
            f"tokens={self._seen}, entries per layer and head={entries}, bytes={self.bytes():,})"
        )

    def close(self) -> None:
        """Remove the cache's hooks from the model; the cache cannot be used afterwards."""
        self._close()

    def __enter__(self) -> EvictionCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enter(self, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Route the model's attention to the cache before a forward pass; return the inputs for that pass.

        The first pass reads the prompts, each later pass one token per sequence. The prompts are evicted just before
        the second pass.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if ids is None:
            raise UserError("EvictionCache needs input_ids; it does not support inputs_embeds.")
        check_mask(mask)
        if self._seen:
            refuse_new_images(inputs)
            ids = self._turn(ids, mask)
        else:
            self._ids, self._pads = ids, pads_before(mask, *ids.shape)
            self._continue(RecurrentStates.like(self._setup.loaded.states))
            model = self._reader.model.model
            self._images = BatchImages.of(model, self.name, self.method, inputs, self._pads)
            check_positions(inputs.get("position_ids"), self._positions(ids), mask)
        self._routing.enter_context(self._reader.model.routed())
        self._routing.enter_context(self._reader.model.attend(self._attend))
        # The pass changes the cache's tensors in place, also tensors of earlier passes.
        self._routing.enter_context(torch.inference_mode(False))
        self._routing.enter_context(torch.no_grad())
        try:
            if self._prompts:
                self._settle()
        except BaseException:
            self._routing.close()
            raise
        self._routed = True
        own = {"input_ids": ids, "position_ids": self._positions(ids), "attention_mask": None}
        return (), {**inputs, **own}

    def _continue(self, states: RecurrentStates | None) -> None:
        """Let the next passes read and replace these recurrent states. Raises UserError if pads would change them."""
        if states is not None and any(self._pads):
            raise UserError(
                "pads would change the states that recurrent layers of this model keep; give prompts of equal length."
            )
        self._states, self.layers = states, [] if states is None else states.layers

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the states of a recurrent layer were written (see `RecurrentStates.has_previous_state`)."""
        return self._states is not None and self._states.has_previous_state(layer_idx, state_idx)

    def _turn(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Read the tokens [b, t] of a later pass one by one, as the engine does, except the last of each sequence.

        Returns these last tokens [b, 1], which the pass itself reads. Raises UserError for another number of sequences,
        for a mask of another length, for pads after the prompt, and for several tokens right after the prompt.
        """
        rows, tokens = ids.shape
        whole = tokens and (mask is None or mask.shape[1] == self._seen + tokens)
        if rows != len(self._pads) or not whole:
            raise UserError(
                f"EvictionCache has read {len(self._pads)} sequences of {self._seen} tokens; a later turn must "
                "bring all these tokens and some new ones per sequence. Make a new cache for another prompt."
            )
        if tokens > 1 and self._prompts:
            raise UserError(
                "EvictionCache reads the prompt in one forward pass; leave out prefill_chunk_size. A later turn may "
                "begin only after the model has read at least one generated token."
            )
        if mask is not None and not bool(mask[:, self._ids.shape[1] :].bool().all()):
            raise UserError(
                "EvictionCache takes pads before the prompt only; give all sequences of a later turn equally many "
                "tokens."
            )
        for t in range(tokens - 1):
            self._reader.model.model(input_ids=ids[:, t : t + 1], past_key_values=self, use_cache=True)
        return ids[:, -1:]

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the input's rotary positions, [sequences, tokens]; [3, sequences, tokens] for prompts with 3 axes."""
        pads = torch.tensor(self._pads, device=ids.device)[:, None]
        index = (self._seen + torch.arange(ids.shape[1], device=ids.device) - pads).clamp(min=0)  # 0 for pads
        return index if self._images is None else self._images.positions(index, self._seen)

    def leave(self, out: Any) -> None:
        """Restore the model's attention after a forward pass. out: its result; None if the pass failed."""
        self._routed = False
        self._routing.close()
        store_logits(self._prompts, out)

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        call, tokens = under_autocast(call), call.query.shape[2]
        if call.layer == self._first:
            self._begin(call, tokens)
        out = attend(self._prompts, call) if self._writer is None else self._writer(call)
        if call.layer == self._last:
            self._end(tokens)
        return out

    def _begin(self, call: AttentionCall, tokens: int) -> None:
        if self._seen + tokens > self.max_tokens:
            raise UserError(f"prompt and output exceed max_tokens={self.max_tokens}; raise it or generate less.")
        if self._writer is None:
            self._start(call, tokens)
        else:
            assert self.slots is not None
            self._writer.load([1] * self.slots.slots, keep_newest=True)
            positions = torch.tensor(self.slots.seen, device=self.slots.device)
            self._writer.begin(positions, torch.ones_like(positions))

    def _start(self, call: AttentionCall, tokens: int) -> None:
        """Create one cache per `PromptGroup`, which holds the group's prompts, without pads, until `_settle`. tokens:
        length of the padded prompts."""
        # The dtype under autocast is known only now, and the model may have moved to another device.
        loaded = replace(self._setup.loaded, device=call.query.device, dtype=call.key.dtype)
        self._setup = self._reader.setup = replace(self._setup, loaded=loaded)
        alone = bool(self.method.during("prefill").needs().probes)  # probes read one prompt
        groups: dict[tuple[int, int], list[int]] = {}
        for row, pads in enumerate(self._pads):
            groups.setdefault((pads, row if alone else 0), []).append(row)
        self._prompts = [self._open(rows, pads, tokens - pads) for (pads, _), rows in groups.items()]

    def _open(self, rows: list[int], pads: int, length: int) -> PromptGroup:
        keys = [self._noise_key(row, -1) for row in rows]
        cache = self._reader.cache(self._setup.rules_for_prompt(length), keys, length, length)
        cache.recurrent = None  # the pass writes all rows' states into one object; `_settle` copies them
        writer = self._reader.writer(cache)
        if (images := self._images) is not None:
            cache.images = images.rows[rows[0]]  # for probes, which read one row
        writer.begin(0, length, None if images is None else images.modality(rows))
        return PromptGroup(rows, pads, cache, writer)

    def _noise_key(self, row: int, sample: int) -> int:
        request = Request(task="generate", doc_id=str(row), prompt_ids=(), max_new_tokens=0, seed=self.seed)
        return request.noise_key(sample)

    def _end(self, tokens: int) -> None:
        """After the last layer of a pass, count the tokens that it read, and evict if a tick is due."""
        self._seen += tokens
        if self.slots is None:
            for prompt in self._prompts:
                prompt.cache.seen = prompt.cache.prompt_len
            return
        self._clock += 1
        rows = range(self.slots.slots)
        self.slots.advance(rows)
        if self._evictor is not None and self.trigger.due(self._clock):
            with one_thread(self.slots.device):
                self._evictor.tick(rows)

    def _settle(self) -> None:
        """Evict the prompts and copy the remaining entries to the slots."""
        prompts, setup = self._prompts, self._setup
        with one_thread(self._ids.device):
            for prompt in prompts:
                prompt.cache.recurrent = None if self._states is None else self._states.copy(prompt.rows)
                if prompt.cache.acting.needs().probes and prompt.cache.full():
                    [row] = prompt.rows
                    self._reader.probe(prompt.cache, self._ids[row, prompt.pads :].tolist(), prompt.next_token)
                prompt.cache.reduce()
        self.slots = setup.cache(len(self._pads))
        self._evictor = Evictor(setup.rules, self.slots) if self.method.evicts else None
        for prompt in prompts:
            for place, row in enumerate(prompt.rows):
                self._seat(prompt.cache, place, row)
        self._writer, self._prompts = step_writer(self.slots, setup.rules), []
        self._continue(self.slots.recurrent)

    def _seat(self, prompt: PromptCache, place: int, row: int) -> None:
        """Copy a prompt's entries to its slot. place: its index in the cache `prompt`; row: its index in the batch."""
        assert self.slots is not None
        packed = {index: layer.pack(place) for index, layer in prompt.layers.items()}
        self.slots.install(packed, [row], prompt.prompt_len)
        self.slots.install_states(prompt.recurrent, place, [row])
        if self._evictor is not None:
            self._evictor.start(row, prompt.rules.budget, prompt.prompt_len, self._noise_key(row, 0), prompt.evictions)
