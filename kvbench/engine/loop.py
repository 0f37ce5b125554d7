"""The generation loop: slots with continuous refill, decode steps, and evictions at each sequence's own intervals.

The engine reads a prompt once and copies its evicted cache to the slots of its samples. It refills the slot of a
finished sequence before the next block of steps. Every step runs all slots, so shapes never change: with the slot count
fixed, a sequence's tokens are bit-equal whatever the other slots hold. The device runs a block of steps (`DecodeSteps`)
before the host looks at their tokens (`Engine._look`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain

import torch

from kvbench.console import faults
from kvbench.engine.blocks import LOOK
from kvbench.engine.cache.layout import Layout, Lengths, check_prefill, sums_attention
from kvbench.engine.evict import Evictor, one_thread
from kvbench.engine.kernels.backends import Backend
from kvbench.engine.memory import OutOfMemory
from kvbench.engine.model.experts import filled_experts
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.norms import fused_norms
from kvbench.engine.model.packing import packed_linears
from kvbench.engine.prefill import NotFinite, Prefill, PromptReader, PromptState
from kvbench.engine.probes import ProbeTooLong
from kvbench.engine.rules import KeptLog
from kvbench.engine.sequence import Meter, Sequence, Slots, Token
from kvbench.engine.setup import set_up
from kvbench.engine.state import Drawing
from kvbench.engine.steps import DecodeSteps
from kvbench.engine.timer import Timer
from kvbench.errors import quote
from kvbench.eviction.api import Method
from kvbench.records import Generation, Request

Snapshot = Callable[[int, int, int], None]  # see `on_step` in `Engine`
Live = list[tuple[int, Sequence]]  # (slot, its sequence) of each live sequence
Admission = tuple[PromptState, deque[Sequence]]  # a prompt that was read, and those of its samples that wait for a slot


class Engine:
    """Generates answers under one method at one budget.

    Args:
        loaded: model, tokenizer and geometry.
        method: the eviction method.
        budget: entries per layer and KV head, or a float: the share of each prompt's entries. None exactly when the
            method takes no budget.
        interval: number of tokens that a sequence generates between two of its ticks.
        slots: number of sequences decoded at once.
        max_tokens: most tokens of a prompt and its output together; `max_output`: most tokens of an output; `tail`:
            most tokens of a prompt that are read after its compression. These three decide the size of a slot.
        prefill_chunk: `chunk` of `prefill.PromptReader`; prefill: "full" or "chunked", see the module `prefill`.
        layout: see `layout.make_cache`.
        log: see `rules.KeptLog`. The noise key is the `Request.noise_key` of the sample. Evictions of the prompt, which
            hold for all its samples, have the noise key of sample -1.
        on_step: called after every block of steps with three numbers: how many tokens its steps read (one per step and
            live sequence), the live bytes at the block's last step, and the number of sequences live in that step.
        look: the largest number of steps in a block; the host looks at the tokens after each block.
        backend: name of the code that computes the attention of decode steps on a GPU, see `kernels.backends`. With
            "torch", draws and evictions run no Triton kernel either.
        compiled: on a GPU, let torch compile the model's layers for decode steps; graph: replay decode steps from a
            CUDA graph. If the model cannot be compiled, the engine decodes without compiled layers; if a step cannot be
            captured, it decodes without a graph. A model divided among GPUs runs with neither.
        program: on a CPU, compile the decode step as one program, see the module `program`. The engine decodes without
            it if compiling fails, or if the number of entries that a step reads depends on the sequences. The number
            depends on them in the paged layout, and in dense caches that no budget bounds and that have more rows per
            head than `step_writers.FIXED_ROWS`.
        notice: called with a line of text if the engine cannot compile or capture; see also `decoding`.

    Raises:
        UserError: the method does not support this model, `prefill` or `layout`; the backend does not support the
            cache; or the method needs trained weights and neither its options nor the model's folder give them.
        SetupError: the method's weights are missing or belong to another model, or the backend is not installed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        *,
        budget: float | None,
        interval: int,
        slots: int,
        max_tokens: int,
        max_output: int | None = None,
        tail: int = 0,
        prefill_chunk: int = 512,
        prefill: Prefill = "full",
        layout: Layout = "auto",
        log: KeptLog | None = None,
        on_step: Snapshot | None = None,
        look: int = LOOK,
        backend: Backend = "triton",
        compiled: bool = True,
        graph: bool = True,
        program: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        check_prefill(method, prefill)
        lengths = Lengths.of(max_tokens, max_output, tail)
        self.setup = setup = set_up(
            *(loaded, method),
            budget=budget,
            interval=interval,
            lengths=lengths,
            kernels=loaded.device.type == "cuda" and backend != "torch",
            sums=sums_attention(method, layout, backend),
        )
        self.loaded, self.method, self.budget, self.on_step = loaded, method, budget, on_step
        self.trigger, self.max_tokens = setup.trigger, max_tokens
        self.cache = setup.cache(slots, layout)
        self.evictor = Evictor(setup.rules, self.cache, log) if method.evicts else None
        self.reader = PromptReader(setup, chunk=prefill_chunk, prefill=prefill, log=log)
        self.slots = Slots(slots)
        self.steps = DecodeSteps(
            *(setup, self.reader.model, self.cache),
            look=look,
            backend=backend,
            compiled=compiled,
            graph=graph,
            program=program,
            notice=notice,
        )
        self._copies = setup.copies
        self._under_way: list[Sequence] = []
        self._done: deque[Generation] = deque()
        self._queue: deque[tuple[Request, list[Sequence]]] = deque()

    @property
    def decoding(self) -> str:
        """How decode steps run, see `DecodeSteps.decoding`."""
        return self.steps.decoding

    def generate(self, requests: Iterable[Request]) -> Generator[Generation, None, None]:
        """Yield the result of every sample of every request as it finishes.

        All samples of a request fail (`Generation.failed`) in four cases: its prompt is empty; the request is longer
        than the model's context; a probe or a draft after the prompt needs more positions than a model has
        (`ProbeTooLong`); reading the prompt yields activations that are NaN or infinite.

        Raises ValueError when a request that fits the context exceeds `max_tokens`, or when the requests do not share
        one `Sampling`. Raises UserError for a token without an embedding: before the first sample, or at the start of
        the turn that holds it. Raises OutOfMemory when memory runs out; the engine cannot be used after that.
        """
        try:
            yield from self._generate(requests)
        except Exception as error:
            if not faults.out_of_memory(error):
                raise
            raise OutOfMemory(error, self._under_way) from error

    @torch.inference_mode()
    def _generate(self, requests: Iterable[Request]) -> Iterator[Generation]:
        queue = self._queue = deque((r, [Sequence.of(r, s, self.loaded) for s in r.samples]) for r in requests)
        for request, _ in queue:
            self.loaded.check_ids(f"a text of task {quote(request.task)}", chain(request.prompt_ids, request.forced))
        self.steps.draw_as(Drawing.of([request for request, _ in queue], self.loaded.stop_ids))
        admission: Admission | None = None
        model = self.loaded.model
        rows = 0 if self.steps.programs else self.cache.slots  # a program packs weights itself
        with (
            self.reader.model.routed(),
            packed_linears(model, rows),
            fused_norms(model),
            filled_experts(model, self.cache.slots),
        ):
            while queue or admission or self.slots.live():
                if (queue or admission) and self.slots.free():
                    admission = self._admit(*admission) if admission else self._read(*queue.popleft())
                else:
                    self._block()
                while self._done:
                    yield self._done.popleft()

    def _read(self, request: Request, sequences: list[Sequence]) -> Admission | None:
        """Read a request's prompt. If it is empty, too long for the model or for the method's probes, or makes
        activations that are NaN or infinite, mark its samples as failed and return None."""
        longest = request.max_tokens or len(request.prompt_ids) + request.max_new_tokens
        if self.max_tokens < longest <= self.loaded.context:
            raise ValueError(
                f"a request needs {longest} tokens, but the engine was made for max_tokens={self.max_tokens}"
            )
        if not request.prompt_ids or longest > self.loaded.context:
            length = len(request.prompt_ids)
            note = f"{length} prompt tokens + {longest - length} new tokens in a context of {self.loaded.context}"
            self._fail(sequences, "prompt_too_long" if request.prompt_ids else "prompt_empty", note)
            return None
        self._under_way = sequences
        timer = Timer(self.loaded.device)
        rules = self.setup.rules_for_prompt(len(request.prompt_ids))
        try:
            with timer.running():
                prompt = self.reader.read(request, rules)
        except NotFinite:
            self._fail(sequences, "nan_logits", "activations were NaN or infinite at step 0")
            return None
        except ProbeTooLong as error:
            self._fail(sequences, "prompt_too_long", error.note)
            return None
        prompt.seconds = timer.seconds() - prompt.evict_seconds
        return prompt, deque(sequences)

    def _fail(self, sequences: list[Sequence], status: str, note: str) -> None:
        """Mark the samples of a prompt that the engine cannot read as failed."""
        self._done.extend(Generation.failed(s.request, s.sample, status, note) for s in sequences)

    def _admit(self, prompt: PromptState, waiting: deque[Sequence]) -> Admission | None:
        """Draw the first token of as many waiting samples as slots are free, and give each of these samples a slot.

        Returns the prompt and the samples that still wait, or None when no sample waits.
        """
        free = self.slots.free()[: len(waiting)]
        started = self._under_way = [waiting.popleft() for _ in free]
        tokens = self.steps.first_tokens(prompt.logits, started, prompt.tokens)
        for slot, sequence, token in zip(free, started, tokens):
            sequence.meter.note_prompt(prompt, len(sequence.request.samples), self._copies)
            sequence.accept(token)
            self.slots.sequences[slot] = sequence
        self._install(prompt, free)
        for slot, sequence in zip(free, started):
            self._go_on(slot, sequence)
        return (prompt, waiting) if waiting else None

    def _install(self, prompt: PromptState, slots: list[int]) -> None:
        """Copy a prompt's entries and states to the slots of its samples."""
        self.cache.install(prompt.layers, slots, prompt.tokens)
        self.cache.install_states(prompt.recurrent, 0, slots)
        for slot, sequence in self.slots.of(slots):
            sequence.delta = prompt.delta
            self._hold(sequence, slot)
            if self.evictor is not None:
                self.evictor.start(slot, prompt.budget, prompt.tokens, sequence.key, prompt.decisions)

    def _block(self) -> None:
        """Decode a block of steps; then look at its tokens, evict, and end or continue turns."""
        live = self.slots.live()
        self._under_way = [sequence for _, sequence in live]
        steps = self.steps.load(self.slots)
        step = self.steps.ready(self.slots)
        began = time.perf_counter()
        tokens = self.steps.run(step, steps)
        self._evict(self._look(live, tokens, time.perf_counter() - began))
        for slot, sequence in live:
            self._go_on(slot, sequence)

    def _look(self, live: Live, tokens: list[list[Token]], seconds: float) -> Live:
        """Give each sequence in `live` its tokens of a block of steps, and count the steps in which it was live.

        tokens: [step][slot]; seconds: the block's time. Returns the sequences that were live in the block's last step.
        """
        going, steps, held = live, list[list[tuple[Meter, bool]]](), 0
        for drawn in tokens:
            going = [(slot, sequence) for slot, sequence in live if not sequence.finished]
            if not going:
                break
            self.cache.advance([slot for slot, _ in going])
            held = sum(self._hold(sequence, slot) for slot, sequence in going)
            steps.append([(sequence.meter, sequence.count_step(drawn[slot])) for slot, sequence in going])
        for step in steps:
            for meter, drew in step:
                meter.note_step(seconds / len(steps) / len(step), drew)
        if self.on_step is not None:
            self.on_step(sum(map(len, steps)), held, len(steps[-1]))
        return going

    def _evict(self, live: Live) -> None:
        """Run the ticks that are due after this block; in other sequences begin new sums at marks (`Evictor.mark`).
        A sequence that has failed with NaN has no tick: the method could not score its entries."""
        ticked = [slot for slot, sequence in live if sequence.status == "ok" and self.trigger.due(sequence.clock)]
        if self.evictor is None or not (ticked or self.cache.shape.marks):
            return
        began = time.perf_counter()
        self.evictor.mark({slot: sequence.clock for slot, sequence in live if slot not in ticked})
        with one_thread(self.loaded.device):
            evicted = self.evictor.tick(ticked) if ticked else []  # waits for the device, to read its checks
        for slot, sequence in self.slots.of(evicted):
            sequence.meter.note_eviction(self.cache.held(slot) * self._copies, self.cache.seen[slot])
        seconds = time.perf_counter() - began
        for _, sequence in live:
            sequence.meter.evict_seconds += seconds / len(live)

    def _go_on(self, slot: int, sequence: Sequence) -> None:
        """Begin the next turn of a sequence, if its current turn is finished. Free its slot if it has no next turn, or
        if the next turn waits in the queue as a new prompt."""
        if sequence.finished and not self._follow(sequence, self.cache.seen[slot]):
            if self.evictor is not None and sequence.request.images is not None:
                sequence.meter.kept = self.evictor.kept(slot, sequence.request.images.spans)
            self._finish(sequence)
        elif sequence.tokens or sequence.pending:
            return
        if sequence.status == "nan_logits":
            self.cache.wipe(slot)
        self.slots.sequences[slot] = None
        self.cache.clear(slot)

    def _follow(self, sequence: Sequence, seen: int) -> bool:
        """Begin the next turn of a sequence, in its slot or as a new prompt at the head of the queue. seen: tokens of
        the sequence read so far. Returns False when the sequence has no next turn."""
        follow = sequence.follow(seen)
        if follow is not None and follow.fresh:
            self._queue.appendleft((sequence.request, [sequence]))
        return follow is not None

    def _hold(self, sequence: Sequence, slot: int) -> int:
        """Record in the sequence's meter the entries and bytes that its slot holds; return the slot's live bytes."""
        cache, size = self.cache, self.cache.live_bytes(slot)
        sequence.meter.note_held(cache.held(slot) * self._copies, size, cache.extra_bytes(slot))
        return size

    def _finish(self, sequence: Sequence) -> None:
        self._done.append(sequence.generation(self.cache, self.decoding))
