"""Frozen records that the runner and the engine exchange: requests, and the results of finished samples.

This file imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvbench.task import GenSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine draws the next token. With `temperature` 0 it takes the most probable token; `top_k` 0, `top_p` 1
    and `min_p` 0 each switch a filter off."""

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

    spans: for each image, the range of the prompt's tokens that stand for it: (first, last + 1). read: a function that
    returns one dictionary per image, {name of a model's argument: tensor}. Each dictionary has `pixel_values` and, in
    some model families, `image_grid_thw`. The model gets the tensors of several images concatenated along dimension 0.
    """

    spans: tuple[tuple[int, int], ...]
    read: Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUp:
    """The model's next input after an answer: tokens that continue the cached sequence or, if `fresh`, a new prompt
    that replaces it."""

    ids: tuple[int, ...]
    fresh: bool
    images: Images | None = None  # the images of a new prompt


class Conversation(Protocol):
    """Gives the inputs of a request's later turns one by one, because a turn's input may depend on the model's earlier
    answers."""

    def follow(self, answers: tuple[str, ...]) -> FollowUp | None:
        """Return the next input after the answers given so far, or None at the end of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, and which samples to generate from it. The engine prefills the prompt once for all samples.

    `max_new_tokens`: most tokens that a sample generates per turn. `max_tokens`: most tokens that a sample reads and
    generates in all turns together; None: the prompt's tokens plus `max_new_tokens`. `samples`: the numbers of the
    question's samples to generate, counted from 0. `forced`: a given continuation of the prompt. The engine reads these
    tokens instead of drawing tokens, and returns their log-probabilities.
    """

    task: str
    doc_id: str
    prompt_ids: Sequence[int]
    samples: tuple[int, ...] = (0,)
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # end tokens in addition to the model's own
    min_new_tokens: int = 0  # the engine draws no end token before this many tokens
    forced: tuple[int, ...] = ()
    conversation: Conversation | None = None
    max_tokens: int | None = None
    seed: int = 0
    compress_at: int | None = None  # the prompt is evicted after this many of its tokens; None: after all of them
    images: Images | None = None
    # The tokens between the user's text and the reply, for methods that probe with such a turn; None: those of the
    # tokenizer's own chat template.
    reply_header: tuple[int, ...] | None = None

    def noise_key(self, sample: int) -> int:
        """Return the 64-bit key of a sample's random numbers.

        The key is a hash of the run's seed, the task, the question and the sample's number, and of nothing else.
        """
        text = f"{self.seed}\x1f{self.task}\x1f{self.doc_id}\x1f{sample}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The entries, bytes and seconds that one sample took, as measured. All numbers of entries (`entries_*`) are means
    over the evicted layers and their KV heads."""

    prompt_tokens: int
    output_tokens: int
    budget_entries: int | None  # the budget that applied to this sample; None if the method takes no budget
    entries_after_evict: float | None  # most entries right after an eviction; None if nothing was evicted
    entries_peak: float  # most entries while decoding
    entries_mean: float  # entries, mean over decode steps
    entries_prefill_peak: float  # most entries while the prompt was read; equal for all samples of a prompt
    kv_bytes_prefill_peak: int  # most bytes of the prompt's cache, all layers together, while the prompt was read
    kv_bytes_peak: int  # live bytes at the peak: K, V, positions, method columns, stored queries, sliding-window rings
    kv_bytes_extra: int  # part of the peak beside keys and values: positions, columns, queries, hidden states, states
    kv_bytes_mean: int
    kv_bytes_slot: int  # bytes allocated for the slot
    state_bytes: int  # part of each kv_bytes figure: states of recurrent layers, equal at any number of tokens
    evictions: int
    first_eviction: int | None  # how many tokens of the sequence were read before its first eviction; None: no eviction
    # Time to read the prompt, divided equally among its samples, and this sample's share of the steps that read prompts
    # of later turns; without evictions.
    prefill_seconds: float
    decode_seconds: float  # sum over the steps that drew a token of: the step's time / number of live sequences
    evict_seconds: float  # this sample's share of the evictions' time
    decoding: str  # what computed the decode steps, see `Engine.decoding`
    # Share of the text tokens, and of the image tokens, that still have entries at the end; None without images.
    kept_text: float | None = None
    kept_images: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The finished result of one sample.

    `status`: "ok", or why the sample gets no score (nan_logits, oom, prompt_too_long, prompt_empty).
    """

    request: Request
    sample: int
    token_ids: tuple[int, ...]
    text: str
    stop_reason: str  # "length" if any turn was truncated; else the last turn's: "stop" (an end token), "stop_string"
    usage: Usage | None
    status: str = "ok"
    note: str = ""
    turns: tuple[str, ...] = ()  # the answers of all turns; `text` is the last of them
    log_probs: tuple[float, ...] = ()  # natural log-probability of each token of `Request.forced`
    greedy: bool | None = None  # whether every token of `Request.forced` was the most probable one

    @classmethod
    def failed(cls, request: Request, sample: int, status: str, note: str) -> Generation:
        """Return the result of a sample that could not be generated. status: as in `Generation`. note: the cause in
        words."""
        return cls(
            request=request, sample=sample, token_ids=(), text="", stop_reason="", usage=None, status=status, note=note
        )
