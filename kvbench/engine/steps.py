"""Runs the decode steps of all slots.

On a GPU, layers are compiled and a step is one CUDA graph; on a CPU, --compile-cpu makes a step one compiled program.
In all other cases, and where the step cannot be captured or compiled, Python calls each operation of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial

import torch

from kvbench.engine.attention.geometry import asks_indexers
from kvbench.engine.attention.interface import RoutedModel
from kvbench.engine.blocks import block_length, stores_newest
from kvbench.engine.cache.dense import DenseCache
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.graph import CaptureError, StepGraph
from kvbench.engine.kernels.backends import Backend, decode_with, draw_with
from kvbench.engine.kernels.compiled import CompiledLayers
from kvbench.engine.program import StepProgram, forget
from kvbench.engine.sampler import next_tokens
from kvbench.engine.sequence import Sequence, Slots, Token
from kvbench.engine.setup import Setup
from kvbench.engine.state import Drawing, State
from kvbench.engine.step_writers import step_writer


class DecodeSteps:
    """Runs blocks of steps; each step gives every slot its next token.

    Args:
        model: the setup's model; prompts and steps use different attention handlers with it.
        look: most steps of a block.
        backend, compiled, graph, program, notice: see `loop.Engine`.

    Attributes:
        state: tokens and counters of every slot, on the device.
        writer: the attention handler of a step.
        programs: whether steps are to run as a compiled program on a CPU. It stays true if torch cannot compile one.
    """

    def __init__(
        self,
        setup: Setup,
        model: RoutedModel,
        cache: SlotCache,
        *,
        look: int,
        backend: Backend,
        compiled: bool,
        graph: bool,
        program: bool,
        notice: Callable[[str], None],
    ) -> None:
        loaded = setup.loaded
        self.cache, self.look = cache, look
        self._model, self._trigger = model, setup.trigger
        self._device, self._on_gpu = loaded.device, loaded.device.type == "cuda"
        most = cache.shape.rows if isinstance(cache, DenseCache) else cache.shape.longest
        asks = self._on_gpu and asks_indexers(setup.geometry, most)
        if asks and backend != "torch":
            notice(f"decode steps attend without {backend}, which cannot ask the model's indexers about long sequences")
        self._backend, self._notice = "torch" if asks else backend, notice
        compiles = self._on_gpu and compiled and not loaded.divided
        self._compiled = CompiledLayers(loaded.model, notice) if compiles else None
        self._draws_on_gpu = draw_with(backend) if self._on_gpu else None
        decode = decode_with(backend, cache) if self._on_gpu else None
        self.writer = step_writer(cache, setup.rules, None if asks else decode)
        self._captures = (graph if self._on_gpu else program) and not loaded.divided
        if self._captures and not self.writer.capturable:
            self._captures = False
            notice("decode steps run uncompiled: how many entries they read depends on the sequences")
        self.programs = self._captures and not self._on_gpu
        if not self.programs:
            forget(loaded.model)
        self.state = State(cache.slots, look, Drawing(), self._device)
        self._prepared: tuple[State, int] | None = None  # what `_graph` or `_program` was captured for
        self._graph: StepGraph | None = None
        self._program: StepProgram | None = None

    @property
    def decoding(self) -> str:
        """How steps run. On a GPU: the backend's name, then "graph" and "compiled" if used. On a CPU: "torch", then
        "compiled" if steps run as a compiled program."""
        if not self._on_gpu:
            return "torch compiled" if self._captures else "torch"
        compiled = self._compiled is not None and not self._compiled.failed
        return " ".join([self._backend, *["graph"] * self._captures, *["compiled"] * compiled])

    def draw_as(self, drawing: Drawing) -> None:
        """From now on, draw tokens as `drawing` says."""
        if drawing != self.state.drawing:
            self.state = State(self.cache.slots, self.look, drawing, self._device)

    def first_tokens(self, logits: torch.Tensor, samples: Many[Sequence], seen: int) -> list[Token]:
        """Draw, for each sample of a prompt, the token after the prompt. logits: [V], those of the prompt's last token;
        seen: number of tokens of the prompt."""
        state = State(len(samples), 1, self.state.drawing, self._device)
        state.load(samples, [seen] * len(samples))
        self._draw(logits.expand(len(samples), -1), state)
        return state.read(1)[0]

    def load(self, slots: Slots) -> int:
        """Copy to the device all that the next block needs from the host; return the block's largest number of steps.
        On a CPU the block has one step if a stop string may end a sequence, because only the host sees stop strings."""
        sequences = [sequence for _, sequence in slots.live()]
        seen_by_host = not self._on_gpu and any(sequence.request.stop_strings for sequence in sequences)
        look, states = 1 if seen_by_host else self.look, self.cache.recurrent is not None
        steps = block_length(sequences, self._trigger, look, states=states, marks=self.cache.shape.marks)
        width = self.cache.shape.newest
        newest = width > 0 if self._captures else stores_newest(sequences, self._trigger, width, steps)
        self.state.load(slots.sequences, self.cache.seen)
        self.writer.load(slots.ahead(steps), newest)
        return steps

    def ready(self, slots: Slots) -> Callable[[], None]:
        """Return the function that runs a step. Prepare it first if a tensor that it depends on was replaced.

        To prepare a step means to capture it in a graph or a program. On a GPU without graphs it means to run the step
        once, so that libraries and compilers are ready. The time does not count as decoding time.
        """
        depends = self.state, self.writer.version
        if (self._on_gpu or self._captures) and self._prepared != depends:
            self._prepared, self._graph, self._program = depends, None, None  # frees the old graph's memory
            restore = partial(self._restore, slots, self.cache.saved_states())
            if self._captures:
                self._capture(restore)
            else:
                self._step()
            restore()
        return self._graph.replay if self._graph else self._step

    def run(self, step: Callable[[], None], steps: int) -> list[list[Token]]:
        """Run a block of at most `steps` steps; return its tokens as [step][slot]. On a CPU the block ends as soon as a
        sequence ends. On a GPU the host would have to wait to see this."""
        done = 0
        while done < steps and (self._on_gpu or not self.state.ended()):
            step()
            done += 1
        return self.state.read(done)

    def _capture(self, restore: Callable[[], None]) -> None:
        try:
            if self._on_gpu:
                self._graph = StepGraph(self._step, self._device, restore)
            else:
                self._program = StepProgram(self._forward, self._model.model, self.cache.slots, restore)
        except CaptureError as error:
            self._captures = False
            how = "without a CUDA graph" if self._on_gpu else "uncompiled"
            self._notice(f"decode steps run {how}: {error}")

    def _restore(self, slots: Slots, states: list[torch.Tensor]) -> None:
        """Undo the changes of a step. states: what `SlotCache.saved_states` returned before the step."""
        self.load(slots)
        self.cache.restore_states(states)

    def _step(self) -> None:
        """Give every slot its next token. A CUDA graph may have captured this function. After a tensor that the
        function reads was replaced, `ready` captures it anew."""
        self._draw(self._program() if self._program else self._forward(), self.state)

    def _forward(self) -> torch.Tensor:
        """Read every slot's newest token; return the logits [S, V]."""
        state = self.state
        self.writer.begin(state.seen, state.live)
        with self._compiled.active() if self._compiled else contextlib.nullcontext():
            out = self._model.run(self.writer, self.cache.recurrent, **state.inputs())
        self.writer.advance()
        return out.logits[:, -1]

    def _draw(self, logits: torch.Tensor, state: State) -> None:
        """Draw the next token for every row of logits [R, V] (a row per sequence of `state`), and count it."""
        state.advance(next_tokens(logits, state, self._draws_on_gpu))
