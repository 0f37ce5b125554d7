"""`State` holds the tokens and counters that a decode step reads and updates, in tensors that are never reallocated.

The host writes the tensors before a block of steps (`load`), every step updates them on the device (`advance`), and the
host reads the tokens of the whole block at once (`read`). Between `load` and `read` a step needs nothing from the host,
so a GPU can replay a step that was captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch

from kvbench.engine import sequence as sequences
from kvbench.engine.sequence import Token
from kvbench.engine.upload import upload
from kvbench.records import Request, Sampling

FIELDS = 9  # numbers per slot, without end tokens and fixed tokens


@dataclass(frozen=True, slots=True)
class Drawing:
    """How tokens are drawn in one call of `Engine.generate`.

    A decode step that is captured once and then replayed always draws tokens in the same way. For another `Drawing` the
    step must be captured again.
    """

    sampling: Sampling = field(default_factory=Sampling)
    ends: int = 0  # most end tokens that a request has
    bans: bool = False  # whether any request bans its end tokens at first (`min_new_tokens`)
    forced: bool = False  # whether any request has forced tokens, whose log-probabilities are then computed
    turns: bool = False  # whether any request may have further turns, whose tokens are read one per step

    @property
    def fixes(self) -> bool:
        """Whether tokens may be fixed in advance (`State.fixed`)."""
        return self.forced or self.turns

    @classmethod
    def of(cls, requests: Sequence[Request], stop_ids: frozenset[int]) -> Drawing:
        """Return how tokens are drawn for these requests. stop_ids: end tokens of the model. Raises ValueError when the
        requests do not share their sampling parameters."""
        samplings = {request.sampling for request in requests}
        if len(samplings) > 1:
            raise ValueError("the requests of one call must share their sampling parameters")
        return cls(
            sampling=samplings.pop() if samplings else Sampling(),
            ends=max((len(stop_ids.union(r.stop_ids)) for r in requests), default=0),
            bans=any(r.min_new_tokens for r in requests),
            forced=any(r.forced for r in requests),
            turns=any(r.conversation is not None for r in requests),
        )


@dataclass(slots=True)
class Choice:
    """The next token of each of R sequences; all tensors are [R].

    tokens: the drawn token, or the fixed token that replaces it (`State.fixed`). bad: whether the logit of the drawn
    token is NaN or infinite. log_probs: log-probability of the token in `tokens`; likeliest: whether this token is the
    greedy one; both None when no request has forced tokens.
    """

    tokens: torch.Tensor
    bad: torch.Tensor
    log_probs: torch.Tensor | None = None
    likeliest: torch.Tensor | None = None


class State:
    """Tokens and counters of R slots, int64; axis 0 runs over slots.

    An idle slot has zeros: it reads token 0 at position 0.

    Attributes:
        tokens: [R] the token that the slot reads next; seen: [R] that token's position.
        live: [R] 1 while the slot's sequence goes on; when it is 0, steps no longer change the slot's numbers.
        keys, drawn: [R] noise key of the sample, and the number of tokens that it has drawn.
        left: [R] tokens that the turn may still draw; early: [R] tokens to draw before an end token is allowed.
        deltas: [R] the rotary position of a token minus its index, see `images`.
        unread: [R] how many tokens of a new turn the slot must read after the token in `tokens`. While this number is
            not 0, drawn tokens do not count.
        ends: [R, drawing.ends] end tokens, -1: none.
        fixed: [R, steps] tokens that replace those drawn in the next steps, -1: none; [R, 0] unless `drawing.fixes`.
        step: [1] number of steps of this block so far.
    """

    def __init__(self, rows: int, steps: int, drawing: Drawing, device: torch.device) -> None:
        """Allocate the tensors. rows: number of slots; steps: most steps of a block."""
        self.drawing, self.device = drawing, device
        self._fixable = steps if drawing.fixes else 0
        self._numbers = torch.zeros(FIELDS + drawing.ends + self._fixable, rows, dtype=torch.int64, device=device)
        fields = self._numbers[:FIELDS].unbind(0)
        self.tokens, self.seen, self.live, self.keys, self.drawn, *rest = fields
        self.left, self.early, self.unread, self.deltas = rest
        self.ends = self._numbers[FIELDS : FIELDS + drawing.ends].T
        self.fixed = self._numbers[FIELDS + drawing.ends :].T
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._loaded = 0  # sequences that were live at the last `load`
        self._out = torch.zeros(steps, 2, rows, dtype=torch.int64, device=device)  # tokens, bad
        self._scores = torch.zeros(steps, 2, rows if drawing.forced else 0, device=device)  # log_probs, likeliest

    def load(self, held: Iterable[sequences.Sequence | None], seen: Iterable[int]) -> None:
        """Copy the numbers of every slot to the device, before a block of steps. held: the sequence of each slot, None
        for an idle slot; seen: for each slot, how many tokens were read."""
        held, idle = list(held), [0] * len(self._numbers)
        rows = [idle if s is None else self._row(s, n) for s, n in zip(held, seen)]
        self._numbers.copy_(upload(np.array(rows).T, self.device))
        self.step.zero_()
        self._loaded = len(held) - held.count(None)

    def _row(self, sequence: sequences.Sequence, seen: int) -> list[int]:
        request, drawn = sequence.request, len(sequence.tokens)
        ends = [] if request.forced else [*sequence.loaded.stop_ids.union(request.stop_ids)]
        fixed = [*islice(sequence.pending, 1, 1 + self._fixable), *request.forced[drawn : drawn + self._fixable]]
        early, unread = max(0, request.min_new_tokens - drawn), max(0, len(sequence.pending) - 1)
        return [
            *(sequence.next_token, seen, 1, sequence.key, sequence.drawn, sequence.left, early, unread),
            sequence.delta,
            *ends,
            *[-1] * (self.ends.shape[1] - len(ends)),
            *fixed[: self._fixable],
            *[-1] * (self._fixable - len(fixed)),
        ]

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a step: the token that each slot reads and its rotary position, [R, 1] each."""
        return {"input_ids": self.tokens[:, None], "position_ids": (self.seen + self.deltas)[:, None]}

    def advance(self, choice: Choice) -> None:
        """Store and count the tokens of a step; set `live` to 0 for each sequence whose turn ends.

        A turn ends by an end token, at its limit of tokens, or by a bad logit. This function ends no turn in a step
        whose tokens do not count (`unread`), and it ignores stop strings. The host checks the tokens again later
        (`Sequence.count_step`): it sees bad logits in such steps, and stop strings.
        """
        self._out.index_copy_(0, self.step, torch.stack([choice.tokens, choice.bad.long()])[None])
        if choice.log_probs is not None and choice.likeliest is not None:
            self._scores.index_copy_(0, self.step, torch.stack([choice.log_probs, choice.likeliest.float()])[None])
        drawing, counts = self.drawing, self.live
        if drawing.turns:
            counts = self.live * (self.unread == 0)
            self.unread -= self.live - counts
        ended = choice.bad | (self.left == 1)
        if drawing.ends:
            ended |= (choice.tokens[:, None] == self.ends).any(dim=1)
        self.tokens.copy_(torch.where(self.live > 0, choice.tokens, self.tokens))
        self.seen += self.live
        self.drawn += counts
        self.left -= counts
        if drawing.bans:
            self.early -= counts
        self.live -= counts * ended
        self.step += 1

    def ended(self) -> bool:
        """Return whether `advance` has ended a sequence's turn since the last `load`. The host waits for the GPU."""
        return int(self.live.sum()) < self._loaded

    def read(self, steps: int) -> list[list[Token]]:
        """Wait for the device; return the tokens of the block's first `steps` steps, as [step][slot]."""
        tokens, bad = self._out[:steps].cpu().unbind(1)
        if not self.drawing.forced:
            return [list(map(Token, *pair)) for pair in zip(tokens.tolist(), bad.tolist())]
        log_probs, likeliest = self._scores[:steps].cpu().unbind(1)
        columns = (tokens.tolist(), bad.tolist(), log_probs.tolist(), likeliest.tolist())
        return [list(map(Token, *row)) for row in zip(*columns)]
