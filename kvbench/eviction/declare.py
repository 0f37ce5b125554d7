"""What a method declares: tensors to collect, memory to keep, entries to protect, probes to run, weights to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from kvbench.lazy import torch

if TYPE_CHECKING:
    from kvbench.eviction.api import Method

Phase = Literal["prefill", "decode"]
LayerWeight = Literal["o_proj"]
WHOLE = 1 << 40  # more tokens than any prompt has, for `Needs.prompt_hidden`


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Tensors that the engine must collect.

    queries: which queries (after RoPE) the method sees:

        none         no query
        last         the newest query
        window       the newest `window` queries
        since_last   every query; the engine shows each to `Method.observe` exactly once: the prompt's in blocks while
                     the model reads the prompt, those of generated tokens at the sequence's next tick
    """

    queries: Literal["none", "last", "window", "since_last"] = "none"
    window: int = 0
    # With "since_last": whether `observe` uses the queries of generated tokens only in `view.attend(reduce_q="sum")`.
    # Decode steps may then sum their attention; `observe` gets the sums, and the engine does not store the queries.
    sums: bool = False
    # Numbers n for which `score` calls `view.newest_attention`, the attention of the newest n queries. With `sums`,
    # decode steps may sum it as well, and the engine does not store these queries.
    newest: tuple[int, ...] = ()
    values: bool = False  # whether `score` or `observe` reads `view.values`
    # Whether `score` or `observe` reads `view.keys` itself. Calls of `view.attend` do not count, nor do calls of
    # `redundancy` in a method that also calls `view.attend`. If False, views show more layers and sequences at once,
    # and views without queries show NaN in place of keys.
    keys: bool = True
    rope: bool = False  # whether the method uses `view.rope` or `view.rotate`
    probes: bool = False  # whether `probes` yields any
    prompt: bool = False  # whether `probes` reads the prompt's tokens, itself or with a draft model
    layer_weights: tuple[LayerWeight, ...] = ()  # the model's matrices that `on_tokens` reads, see `NewTokens`
    marks: str = ""  # characters; `on_tokens` reads which tokens consist of these and of white space, see `NewTokens`
    hidden: int = 0  # number of newest hidden states that `score` sees while decoding (`view.hidden`)
    prompt_hidden: int = 0  # number of newest hidden states that it sees when the prompt is evicted; WHOLE: all
    attention: tuple[str, ...] = ()  # classes of attention modules that `score` can read as `view.attention`; (): none

    @property
    def width(self) -> int:
        """How many of the newest queries `score` sees at most: 0 with "none", 1 with "last", otherwise the largest of
        `window` and the numbers in `newest`. Where decode steps sum the attention that `newest` asks for, the engine
        uses `window` instead."""
        return {"none": 0, "last": 1}.get(self.queries, max(self.window, *self.newest, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A named float32 tensor [b, Hk, N] that the engine stores beside K and V.

    Its values move with the entries, and its bytes count as memory of the cache.
    """

    name: str
    init: float = 0.0  # value of new entries; NaN marks "never scored"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A named float32 tensor [b, *shape] that a method keeps per sequence and layer; zero at first.

    `shape` holds numbers or the names "query_heads", "kv_heads" and "head_dim", which stand for the model's sizes.
    """

    name: str
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """The tokens whose entries always stay: the first `sinks`, the newest `recent` and, if `prompt` is true, the
    prompt's.

    prompt_most: protect only this many first tokens of the prompt; None: all. by_interval: cap `recent` at the eviction
    interval. text: among the unprotected entries, evict those of images before those of text; the method must then
    declare the column `modality.MODALITY`.
    """

    sinks: int = 0
    recent: int = 0
    prompt: bool = False
    prompt_most: int | None = None
    by_interval: bool = False
    text: bool = False

    def at(self, interval: int) -> Protect:
        """Return the protection at this eviction interval."""
        return replace(self, recent=min(self.recent, interval)) if self.by_interval else self


@dataclass(frozen=True, slots=True)
class ScoreOut:
    """The result of `Method.score` if scores alone are not enough.

    Attributes:
        score: [b, Hk, N] float32.
        columns: new values of columns and states.
        stats: named tensors [b, ...] for `Method.quotas`.
    """

    score: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    stats: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, result: torch.Tensor | ScoreOut) -> ScoreOut:
        """Return the result of `Method.score` as a `ScoreOut`."""
        return result if isinstance(result, ScoreOut) else cls(result)

    def at(self, device: torch.device) -> ScoreOut:
        """Return the result on a device; tensors that are there already are not copied."""
        columns, stats = ({k: x.to(device) for k, x in part.items()} for part in (self.columns, self.stats))
        return ScoreOut(self.score.to(device), columns, stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The input of `Method.quotas`: facts on some layers of the model, or on all layers if the method is `joint`."""

    budget: int  # entries per layer and KV head, averaged over the model
    layers: tuple[int, ...]  # index of each layer, as in `view.layer`; () for a `StackView` of separate layers
    ordinals: tuple[int, ...]  # place of each layer among the layers that evict, from 0
    layer_count: int  # layers that evict, in the whole model
    query_heads: int
    held: torch.Tensor  # [b, L, Hk] int64 entries before the eviction
    seen: torch.Tensor  # [b]
    prompt_len: torch.Tensor  # [b]
    stats: Mapping[str, torch.Tensor]  # [b, L, ...] from `score`
    weights: Mapping[str, torch.Tensor]
    held_by_layer: tuple[int, ...] = ()  # as in `LayerView`, for the whole model


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Tokens that the model reads at the positions after the prompt, so that `observe` sees their queries.

    Their entries are dropped before the model generates.

    Attributes:
        against: the cache that the tokens attend to. None: the prompt's full cache. A method: a copy of this cache,
            from which the method has evicted entries down to the budget.
        keep: whether later probes against the same cache attend to these tokens too.
        span: the positions of the prompt, (first, last + 1), whose entries the probe scores. Only `observe` reads it.
        learned: name of a tensor [n, hidden] among the method's weights. The model reads the tensor's n vectors as
            embeddings, in place of `tokens`. While it reads them, the low-rank adapter in the method's weights is
            active (`kvbench.engine.adapter`).
    """

    tokens: tuple[int, ...] = ()
    against: Method | None = None
    keep: bool = False
    span: tuple[int, int] = (0, 0)
    learned: str = ""


class Prompt(Protocol):
    """The prompt as `Method.probes` sees it."""

    ids: tuple[int, ...]
    budget: int
    next_token: int  # the greedy next token with the full cache

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens."""

    @property
    def reply_header(self) -> tuple[int, ...]:
        """The tokens between the user's text and the reply in the run's prompts; () without a chat template."""

    def draft(self, model: str, count: int) -> tuple[int, ...]:
        """Return a draft model's greedy continuation of the prompt, at most `count` tokens.

        The draft model must have the same tokenizer as the model that answers.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights or tables that a method needs: safetensors with a JSON card that names their model.

    Attributes:
        path: a file, a folder with ``<kind>.safetensors``, or "auto" for ``<kind>.safetensors`` beside the model's own
            weights.
        recipe: the recipe of ``kvbench train`` that makes the weights; "" if none does.
    """

    kind: str
    path: str = "auto"
    recipe: str = ""
