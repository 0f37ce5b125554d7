"""A sequence while the engine decodes it: tokens, turns, clock, measured time and memory.

`Slots` says which sequence is in which slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.prefill import PromptState
from kvbench.errors import quote
from kvbench.eviction import noise
from kvbench.records import FollowUp, Generation, Request, Usage


class Token(NamedTuple):
    """The token that a step chose for one sequence.

    `log_prob` and `likeliest` are set only if a request of the same `Engine.generate` call has a given continuation
    (`Request.forced`).
    """

    id: int
    bad: int  # 1: the logit of the drawn token is NaN or infinite
    log_prob: float = 0.0
    likeliest: float = 0.0  # 1: it is the greedy token


@dataclass(slots=True)
class Meter:
    """Time, entries and bytes that one sequence used, filled by the engine step by step.

    Seconds are shares. The time of a step or of an eviction is divided by the number of sequences that were being
    decoded. The time of reading a prompt is divided by the number of the prompt's samples. The time of decode steps
    that read a later turn's prompt counts as reading a prompt.
    """

    budget: int | None = None
    entries_after_evict: float | None = None
    entries_peak: float = 0
    entries_sum: float = 0
    bytes_peak: int = 0
    extra_peak: int = 0
    bytes_sum: int = 0
    steps: int = 0
    evictions: int = 0
    first_eviction: int | None = None
    prefill_peak: float = 0
    prefill_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    evict_seconds: float = 0.0
    kept: tuple[float, float] | None = None  # shares of text and of image tokens, see `images.kept_shares`

    def note_prompt(self, prompt: PromptState, samples: int, copies: int) -> None:
        """Record the time and memory of reading a prompt; its samples share the time equally. copies: see
        `Setup.copies`."""
        self.budget = None if prompt.budget is None else prompt.budget * copies
        self.prefill_seconds += prompt.seconds / samples
        self.evict_seconds += prompt.evict_seconds / samples
        self.prefill_peak = max(self.prefill_peak, prompt.entries_peak * copies)
        self.prefill_bytes = max(self.prefill_bytes, prompt.bytes_peak)
        self.evictions += prompt.evictions
        self.kept = prompt.kept
        if self.first_eviction is None:
            self.first_eviction = prompt.first_eviction
        if prompt.after_evict is not None:
            self.entries_after_evict = max(self.entries_after_evict or 0, prompt.after_evict * copies)

    def note_held(self, entries: float, live_bytes: int, extra_bytes: int) -> None:
        """Record what the sequence holds after its prompt was read, or after a decode step.

        entries: per head; live_bytes: all bytes that the sequence uses (`SlotCache.live_bytes`); extra_bytes: the part
        of `live_bytes` that holds neither keys nor values.
        """
        self.steps += 1
        self.entries_sum += entries
        self.bytes_sum += live_bytes
        self.entries_peak = max(self.entries_peak, entries)
        if live_bytes > self.bytes_peak:
            self.bytes_peak, self.extra_peak = live_bytes, extra_bytes

    def note_step(self, seconds: float, drew: bool) -> None:
        """Record the sequence's share of a step's time. drew: whether the step drew a token of the answer; if it did
        not, it read a token of a later turn's prompt."""
        if drew:
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds

    def note_eviction(self, entries: float, seen: int) -> None:
        """Record an eviction that left `entries` per head after `seen` tokens of the sequence."""
        self.evictions += 1
        self.entries_after_evict = max(self.entries_after_evict or 0, entries)
        if self.first_eviction is None:
            self.first_eviction = seen

    def usage(self, prompt_tokens: int, output_tokens: int, cache: SlotCache, decoding: str) -> Usage:
        steps, (text, images) = max(1, self.steps), self.kept or (None, None)
        return Usage(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            entries_after_evict=self.entries_after_evict,
            entries_peak=self.entries_peak,
            entries_mean=self.entries_sum / steps,
            entries_prefill_peak=self.prefill_peak,
            kv_bytes_prefill_peak=self.prefill_bytes,
            budget_entries=self.budget,
            kv_bytes_peak=self.bytes_peak,
            kv_bytes_extra=self.extra_peak,
            kv_bytes_mean=self.bytes_sum // steps,
            kv_bytes_slot=cache.slot_bytes(),
            state_bytes=cache.state_bytes,
            evictions=self.evictions,
            first_eviction=self.first_eviction,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            evict_seconds=self.evict_seconds,
            decoding=decoding,
            kept_text=text,
            kept_images=images,
        )


@dataclass(slots=True)
class Sequence:
    """A sample while the engine decodes it."""

    request: Request  # replaced by a request with other `prompt_ids` when a turn starts from a new prompt
    sample: int
    key: int  # noise key, as int64
    loaded: LoadedModel
    tokens: list[int] = field(default_factory=list)  # generated in this turn
    pending: deque[int] = field(default_factory=deque)  # tokens to read, one per step, before the next token is drawn
    delta: int = 0  # the rotary position of a generated token minus its index, see `images`
    clock: int = 0  # decode steps since the prompt, from which the trigger tells when ticks are due
    meter: Meter = field(default_factory=Meter)
    answers: tuple[str, ...] = ()  # texts of earlier turns
    cut: bool = False  # whether an earlier turn ended at its limit of tokens
    drawn: int = 0  # tokens drawn in all turns
    room: int = 0  # most tokens that this turn may generate
    log_probs: list[float] = field(default_factory=list)  # one per token of `request.forced` so far
    likeliest: bool = True  # whether all forced tokens so far were the greedy tokens
    stop_reason: str = ""
    status: str = "ok"
    note: str = ""

    def __post_init__(self) -> None:
        self.room = self.request.max_new_tokens

    @classmethod
    def of(cls, request: Request, sample: int, loaded: LoadedModel) -> Sequence:
        return cls(request, sample, noise.signed64(request.noise_key(sample)), loaded)

    @property
    def finished(self) -> bool:
        return bool(self.stop_reason)

    @property
    def next_token(self) -> int:
        """The token that the sequence reads next.

        If the sequence must still read tokens of a new turn (`pending`), this is the first of them. Otherwise it is the
        newest token of the answer, or 0 if the answer has no token yet.
        """
        return self.pending[0] if self.pending else self.tokens[-1] if self.tokens else 0

    @property
    def left(self) -> int:
        """The number of tokens that this turn may still generate."""
        return (len(self.request.forced) or self.room) - len(self.tokens)

    @property
    def ahead(self) -> int:
        """The most steps that this turn may still take."""
        return max(0, len(self.pending) - 1) + self.left

    def count_step(self, token: Token) -> bool:
        """Count a decode step, which has read one token and drawn another.

        The drawn token is dropped if the sequence must still read further tokens of a new turn (`pending`) and the
        token's logit is finite. Returns False if it was dropped. A token whose logit is NaN or infinite always goes to
        `accept`, which ends the sequence with an error.
        """
        self.clock += 1
        if self.pending:
            self.pending.popleft()
        kept = bool(token.bad) or not self.pending
        if kept:
            self.accept(token)
        return kept

    def accept(self, drawn: Token) -> None:
        """Append a token and decide whether it ends the turn. A token whose logit is NaN or infinite is not appended:
        the sequence ends with an error."""
        token, request = drawn.id, self.request
        if request.forced:
            self.log_probs.append(drawn.log_prob)
            self.likeliest &= drawn.likeliest > 0
        if drawn.bad:
            self.status, self.stop_reason = "nan_logits", "error"
            self.note = f"logits were NaN or infinite at step {len(self.tokens)}"
            return
        self.tokens.append(token)
        self.drawn += 1
        if request.forced:
            self.stop_reason = "length" if len(self.tokens) >= len(request.forced) else ""
        elif token in self.loaded.stop_ids or token in request.stop_ids:
            self.stop_reason = "stop"
        elif request.stop_strings and self._hits_stop_string():
            self.stop_reason = "stop_string"
        elif len(self.tokens) >= self.room:
            self.stop_reason = "length"

    def _hits_stop_string(self) -> bool:
        longest = max(len(s) for s in self.request.stop_strings)
        # A token may be a single byte of a character, so the longest stop string has at most 4 tokens per character.
        tail = self.loaded.decode(self.tokens[-4 * longest - 8 :])
        return any(s in tail for s in self.request.stop_strings)

    def text(self) -> str:
        """Return this turn's answer; if a stop string ended it, the text before that string."""
        text = self.loaded.decode(self.tokens)
        for stop in self.request.stop_strings:
            text = text.split(stop, 1)[0] if self.stop_reason == "stop_string" else text
        return text

    def follow(self, seen: int) -> FollowUp | None:
        """Begin the next turn and return its follow-up. seen: how many tokens of the sequence were read so far.

        Returns None if the conversation has no further turn, or if the sequence has failed. If the next turn would
        leave no room for an answer, the sequence fails and the result is None too.

        A fresh follow-up is a whole new prompt: it replaces the request's prompt. Any other follow-up continues the
        cached sequence. The sequence then reads (`pending`) the answer's last token, which is not in the cache yet, and
        after it the follow-up's tokens. If the answer's last token is an end token, the sequence does not read it,
        because the follow-up begins with the template's end of turn.

        Raises UserError if the follow-up has a token without an embedding.
        """
        if self.request.conversation is None or self.status != "ok":
            return None
        answers = (*self.answers, self.text())
        follow = self.request.conversation.follow(answers)
        if follow is None:
            return None
        unread = [] if self.stop_reason == "stop" else self.tokens[-1:]
        read = len(follow.ids) if follow.fresh else seen + len(unread) + len(follow.ids)
        limit = self.request.max_tokens or 0
        if read >= limit:
            self.status = "prompt_too_long"
            self.note = (
                f"turn {len(answers) + 1} needs {read} tokens before its answer; the limit with answer is {limit}"
            )
            return None
        self.loaded.check_ids(f"turn {len(answers) + 1} of question {quote(self.request.doc_id)}", follow.ids)
        self.cut |= self.stop_reason == "length"
        self.answers, self.tokens, self.stop_reason = answers, [], ""
        self.room = min(self.request.max_new_tokens, limit - read)
        if follow.fresh:
            self.clock = 0
            self.request = replace(
                self.request, prompt_ids=follow.ids, images=follow.images, samples=(self.sample,), compress_at=None
            )
        else:
            self.pending.extend([*unread, *follow.ids])
        return follow

    def generation(self, cache: SlotCache, decoding: str) -> Generation:
        """Return the sample's result. cache: the cache in which the sample was decoded. decoding: words for how the
        decode steps ran, for `Usage.decoding`."""
        text = self.text()
        return Generation(
            request=self.request,
            sample=self.sample,
            token_ids=tuple(self.tokens),
            text=text,
            stop_reason="length" if self.cut and self.status == "ok" else self.stop_reason,
            usage=self.meter.usage(len(self.request.prompt_ids), self.drawn, cache, decoding),
            status=self.status,
            note=self.note,
            turns=(*self.answers, text),
            log_probs=tuple(self.log_probs),
            greedy=self.likeliest if self.request.forced else None,
        )


class Slots:
    """Which sequence is in which slot of a cache."""

    def __init__(self, count: int) -> None:
        self.sequences: list[Sequence | None] = [None] * count

    def live(self) -> list[tuple[int, Sequence]]:
        """Return the slots in use, with their sequences."""
        return [(slot, sequence) for slot, sequence in enumerate(self.sequences) if sequence is not None]

    def free(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None]

    def of(self, slots: Iterable[int]) -> list[tuple[int, Sequence]]:
        """Return the slots among `slots` that are in use, with their sequences."""
        return [(slot, sequence) for slot in slots if (sequence := self.sequences[slot]) is not None]

    def ahead(self, steps: int) -> list[int]:
        """Return for each slot the most tokens that `steps` steps can add to it."""
        return [min(steps, sequence.ahead) if sequence else 0 for sequence in self.sequences]
