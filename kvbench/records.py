"""Frozen records that the runner and the engine exchange: requests, and the results of finished samples. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvbench.task import GenSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. `temperature` 0 takes the most probable token; `top_k` 0, `top_p` 1 and `min_p` 0
    switch these filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, spec: GenSpec) -> Sampling:
        return cls(temperature=spec.temperature, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of one prompt.

    spans: for each image the prompt's tokens that stand for it, as (first, last + 1). read: returns per image the
    model's inputs besides token ids, as a mapping from names of arguments to tensors: `pixel_values` and, in some
    families, `image_grid_thw`. The model gets the tensors of several images joined along dimension 0.
    """

    spans: tuple[tuple[int, int], ...]
    read: Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The model's next input after an answer: tokens that continue the cached sequence or, if `fresh`, a whole new
    prompt."""

    ids: tuple[int, ...]
    fresh: bool
    images: Images | None = None  # of a whole new prompt


class Conversation(Protocol):
    """Gives the inputs of a request's later turns, one by one: the input of a turn may depend on the model's answers
    before it."""

    def follow(self, answers: tuple[str, ...]) -> FollowUp | None:
        """Return the next input after these answers, or None at the end of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and which samples to generate from it. The engine prefills the prompt once for all samples.

    `max_new_tokens` bounds the output of each turn; `max_tokens` bounds all tokens that a sample reads and generates
    (None: as many as the prompt and the output of one turn have). `samples`: the numbers of the samples. `forced`: a
    continuation that the engine reads instead of drawing tokens, and whose log-probabilities it returns.
    """

    task: str
    doc_id: str
    prompt_ids: Sequence[int]
    samples: tuple[int, ...] = (0,)
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # end tokens in addition to the model's own
    min_new_tokens: int = 0  # no end token is drawn before this many tokens
    forced: tuple[int, ...] = ()
    conversation: Conversation | None = None
    max_tokens: int | None = None
    seed: int = 0
    compress_at: int | None = None  # how many prompt tokens are read before the prompt is evicted; None: all
    images: Images | None = None

    def noise_key(self, sample: int) -> int:
        """Return the 64-bit key of a sample's random numbers: a hash of run seed, task, question and sample only."""
        text = f"{self.seed}\x1f{self.task}\x1f{self.doc_id}\x1f{sample}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The entries, bytes and seconds that one sample took, as measured. Numbers of entries are means over the evicting
    layers and their KV heads."""

    prompt_tokens: int
    output_tokens: int
    budget_entries: int | None  # the budget that applied to this sample; None when the method takes none
    entries_after_evict: float | None  # largest count right after an eviction; None when nothing was ever evicted
    entries_peak: float  # largest count while decoding
    entries_mean: float  # mean over decode steps
    entries_prefill_peak: float  # largest count while the prompt was read; shared by all samples of a prompt
    kv_bytes_prefill_peak: int  # all layers of one prompt while it was read
    kv_bytes_peak: int  # live bytes at the peak: K, V, positions, method columns, stored queries, sliding-window rings
    kv_bytes_extra: int  # part of the peak beside keys and values: positions, columns, queries, hidden states, states
    kv_bytes_mean: int
    kv_bytes_slot: int  # bytes allocated for the slot
    state_bytes: int  # part of all these: states of recurrent layers, the same for any number of tokens
    evictions: int
    first_eviction: int | None  # tokens of the sequence that were read when entries were first dropped
    prefill_seconds: float  # reading the prompt without evictions, divided equally among its samples
    decode_seconds: float  # sum over decode steps of step time / live sequences
    evict_seconds: float  # this sample's share of the evictions' time
    decoding: str  # what computed the decode steps, see `Engine.decoding`
    # Shares of the tokens read of which an entry is still held at the end of the last turn; None without images.
    kept_text: float | None = None
    kept_images: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The finished result of one sample. `status`: "ok", or why it gets no score (nan_logits, oom, prompt_too_long)."""

    request: Request
    sample: int
    token_ids: tuple[int, ...]
    text: str
    stop_reason: str  # "stop" (an end token), "stop_string", "length" (truncated)
    usage: Usage | None
    status: str = "ok"
    note: str = ""
    turns: tuple[str, ...] = ()  # the answers of all turns; `text` is the last
    log_probs: tuple[float, ...] = ()  # natural logarithms, of the tokens of `Request.forced`
    greedy: bool | None = None  # whether each of these tokens was the likeliest

    @classmethod
    def failed(cls, request: Request, sample: int, status: str, note: str) -> Generation:
        """Return the result of a sample that could not be generated. status, note: why the engine could not generate
        the sample."""
        return cls(
            request=request, sample=sample, token_ids=(), text="", stop_reason="", usage=None, status=status, note=note
        )
