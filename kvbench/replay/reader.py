"""Reads finished answers with one method at one budget: first the prompt as in a run, then the answer block by block.

A forward pass over an answer reads at most CHUNK tokens. It ends at the latest where generation would evict, so no
eviction falls inside a pass. Between two evictions a cache only grows, so each token attends to the same entries as if
it were read alone. Evictions and predictions therefore equal those of `Engine.generate` with `Request.forced`, up to
rounding (`tests/replay/test_reader.py`).

Sizes of tensors: b sequences, t answer tokens of a forward pass, Hq query heads, Dv size of a value, V tokens in the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.layout import Lengths
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.evict import one_thread
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.prefill import PromptReader
from kvbench.engine.rules import KeptLog
from kvbench.engine.setup import set_up
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.replay.choices import Chosen
from kvbench.replay.traces import ForcedTrace

CHUNK = 512  # tokens per forward pass
# Called with method and budget as one text, the number of traces read, and the number of tokens of their answers.
OnRead = Callable[[str, int, int], None]


class Listener:
    """The base class of objects whose methods a `TraceReader` calls while it reads traces. Subclasses override the
    methods that they need.

    The tokens of an answer are numbered from 0. A block is `interval` successive tokens; the last block may be shorter.
    cache: the cache of the traces that are read; `opened` sets it.
    """

    cache: PromptCache

    def opened(self, cache: PromptCache) -> None:
        """Called after the prompts were read and evicted, before the answers. cache: the cache of the prompts."""
        self.cache = cache

    def block(self, index: int) -> None:
        """Called when block `index` of the answers begins, after any eviction at this point. The block's first token
        has the number `index` * interval."""

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        """Called for each layer that stores entries, in a forward pass over t answer tokens, of which the first has the
        number `first`. call: the layer's attention call. out: the call's output [b, t, Hq, Dv]."""

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        """Called after the prompts were read (then t = 1), and after each forward pass over t answer tokens. logits:
        [b, t, V], predictions of the answer tokens with the numbers `first` to `first` + t - 1."""


class TraceReader:
    """Reads traces with one method at one budget.

    max_tokens: the most tokens that a prompt and its answer have together. chunk: the most answer tokens per forward
    pass. log: called at every eviction with the positions that each head keeps. Raises UserError or SetupError if the
    method cannot be used with this model, or if its weights are missing.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        *,
        budget: float | None,
        interval: int,
        max_tokens: int,
        chunk: int = CHUNK,
        log: KeptLog | None = None,
    ) -> None:
        self.setup = set_up(loaded, method, budget=budget, interval=interval, lengths=Lengths.of(max_tokens))
        self.loaded, self.method, self.interval, self.chunk = loaded, method, interval, chunk
        self.trigger = self.setup.trigger
        self.reader = PromptReader(self.setup, chunk=chunk, log=log)

    @classmethod
    def of(cls, loaded: LoadedModel, chosen: Chosen, *, interval: int, max_tokens: int) -> TraceReader:
        method = choose.make(chosen.method.name, dict(chosen.method.options))
        return cls(loaded, method, budget=chosen.budget, interval=interval, max_tokens=max_tokens)

    @property
    def within(self) -> str | None:
        """The oracle's option `within`, if the method is `golden` or a pair that contains it, such as "a+golden". None
        for other methods."""
        parts = (self.method.during("prefill"), self.method.during("decode"))
        return next((str(part.options()["within"]) for part in parts if part.oracle), None)

    @property
    def together(self) -> bool:
        """Whether several traces can be read in one batch: only with a method that has no probes for the prompt."""
        return not self.method.during("prefill").needs().probes

    @torch.inference_mode()
    def read(
        self, traces: Sequence[ForcedTrace], listener: Listener, future: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Read traces with prompts of one length and answers of one length, and call the listener's methods on the way.

        A trace with images must be the only one. future: the attention of later queries, which an oracle reads as its
        weights (`Reference.future`).
        """
        rules = self.setup.rules_for_prompt(len(traces[0].prompt))
        rules = replace(rules, weights={**rules.weights, **(future or {})})
        with self.reader.model.routed():
            prompts = [t.prompt for t in traces]
            cache, logits = self.reader.open(prompts, rules, _keys(traces, prompt=True), traces[0].request)
            cache.begin_decoding(_keys(traces))
            listener.opened(cache)
            listener.predicted(0, logits[:, None])
            self._read_answers(cache, [t.answer for t in traces], listener)

    def _read_answers(self, cache: PromptCache, answers: Sequence[Sequence[int]], listener: Listener) -> None:
        clock, end = 0, len(answers[0]) - 1  # the last token is not read: it predicts no token of the answer
        while clock < end:
            if clock % self.interval == 0:
                listener.block(clock // self.interval)
            count = self._until_next(clock, end)
            tokens = [answer[clock : clock + count] for answer in answers]
            logits = self.reader.go_on(cache, tokens, partial(_attended, listener, clock))
            clock += count
            listener.predicted(clock - count + 1, logits)
            if self.method.evicts and self.trigger.due(clock):
                with one_thread(self.loaded.device):
                    cache.tick(self.trigger.growth)

    def _until_next(self, clock: int, end: int) -> int:
        """Return how many tokens the next forward pass reads.

        The pass reads at most `chunk` tokens. It ends at the latest at the next eviction, at the end of the block or at
        the end of the answers.

        clock: number of answer tokens read so far. end: number of answer tokens to read in all.
        """
        most = min(self.interval - clock % self.interval, self.chunk, end - clock)
        return next((ahead for ahead in range(1, most) if self.trigger.due(clock + ahead)), most)


def _attended(listener: Listener, first: int, call: AttentionCall, out: torch.Tensor) -> None:
    listener.attended(call, first, out)


def _keys(traces: Sequence[ForcedTrace], *, prompt: bool = False) -> list[int]:
    return [t.request.noise_key(-1 if prompt else t.sample) for t in traces]
