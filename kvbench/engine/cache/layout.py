"""The size of the cache that a method needs, and its layout (dense or paged)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvbench.engine.attention import geometry as layer_shapes
from kvbench.engine.attention.geometry import LayerGeometry, largest_group
from kvbench.engine.cache.dense import DenseCache
from kvbench.engine.cache.paged import PagedCache
from kvbench.engine.cache.recurrent import StateShape
from kvbench.engine.cache.slot_cache import Shape, SlotCache
from kvbench.engine.kernels.backends import Backend
from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method
from kvbench.eviction.columns import QueryHeadColumn, expanded
from kvbench.eviction.declare import WHOLE
from kvbench.eviction.options import budget_in_force
from kvbench.eviction.trigger import Every

Layout = Literal["auto", "dense", "paged"]
GPU_PASS = 8, 4096  # most chunks and most tokens of a pass on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The most tokens that any sequence of a cell has in prompt plus output, in the output, in the prompt, and in the
    prompt's tail.

    With query-agnostic compression, the tail is the part of a prompt that is read after the eviction of the rest.
    """

    total: int  # prompt plus output
    output: int
    prompt: int
    tail: int = 0

    @classmethod
    def of(
        cls, max_tokens: int, max_output: int | None = None, tail: int = 0, max_prompt: int | None = None
    ) -> Lengths:
        """Return the lengths. max_output, max_prompt: None where `max_tokens` is the only bound."""
        output, prompt = (min(most or max_tokens, max_tokens) for most in (max_output, max_prompt))
        return cls(total=max_tokens, output=output, prompt=prompt, tail=tail)


def entry_budget(method: Method, budget: float | None, prompt_len: int, group: int) -> int | None:
    """Return a prompt's budget in entries per head of the cache; None when the method takes no budget.

    If the method keeps entries per query head, the budget of a KV head is divided among its `group` query heads. A
    budget given as a share of the prompt is raised, if need be, to the smallest budget that the method allows.
    """
    if budget is None or not method.takes_budget:
        return None
    entries = budget_in_force(method, budget, prompt_len, group)
    return entries // group if method.per_query_head else entries


def ticks_every(method: Method, interval: int, group: int) -> int:
    """Return how many tokens a sequence generates between two ticks; group: query heads per KV head.

    If the method keeps entries per query head, each token adds `group` entries per KV head. Ticks then come `group`
    times as often, but at most after every token. So between two ticks a KV head gains at most the larger of `interval`
    and `group` entries.
    """
    return max(1, interval // group) if method.per_query_head else interval


def capacity(method: Method, budget: float | None, interval: int, lengths: Lengths, group: int = 1) -> int:
    """Return how many entries per head, averaged over the heads, a slot must have room for.

    For a method with a budget this is the sum of

    - the budget,
    - the prompt's tail (`Lengths`),
    - the tokens generated between two evictions; if the budget does not bound the cache while decoding, all generated
      tokens.

    The result is never more than the length of the longest sequence; without a budget it is this length.
    """
    if not method.takes_budget or budget is None:
        return lengths.total
    entries = entry_budget(method, budget, lengths.total, group) or 0
    return min(entries + lengths.tail + growth(method, interval, lengths), lengths.total)


def growth(method: Method, interval: int, lengths: Lengths) -> int:
    """Return how many entries a head gains by decoding until it is evicted to its budget again. If the budget does not
    bound the cache while decoding, these are the entries of all generated tokens."""
    between = method.during("decode").trigger(interval).growth
    return lengths.output if between is None or not method.decode_bounded else between


def sums_attention(method: Method, layout: Layout = "auto", backend: Backend = "triton") -> bool:
    """Return whether decode steps sum the attention that each entry receives, in place of storing queries.

    They do so in the dense layout, if the method evicts while decoding and needs no more than these sums
    (`Needs.sums`). With the backend "varlen", which returns no attention weights, they do not. layout: see
    `make_cache`.
    """
    if not method.evicts or method.during("decode").trigger(1).growth is None:
        return False
    needs = method.during("decode").needs()
    dense = layout == "dense" or (layout == "auto" and method.uniform)
    return dense and backend != "varlen" and needs.queries == "since_last" and needs.sums


def sum_marks(method: Method, interval: int, sums: bool) -> tuple[int, ...]:
    """Return the numbers of steps before a tick at which new sums of attention begin, the largest number first.

    The sums since these steps are the attention of the newest queries (`Needs.newest`). The result is () if the method
    does not ask for this attention, if ticks have no fixed interval, if the newest queries reach back behind the
    previous tick, or if decode steps sum no attention (`sums`, see `sums_attention`).
    """
    decode = method.during("decode")
    trigger, newest = decode.trigger(interval), decode.needs().newest
    if not (sums and newest and isinstance(trigger, Every) and trigger.interval >= max(newest)):
        return ()
    return tuple(sorted(newest, reverse=True))


def stored_queries(method: Method, interval: int, longest: int, sums: bool = False) -> tuple[int, int]:
    """Return how many of the newest queries a layer stores: while a prompt is read, and in each slot afterwards. sums:
    see `sums_attention`."""
    decode = method.during("decode")
    trigger, needs = decode.trigger(interval), decode.needs()
    after = 0
    if trigger.growth is not None:
        width = needs.window if sum_marks(method, interval, sums) else needs.width
        after = max(width, trigger.growth if needs.queries == "since_last" and not sums else 0)
    before = max(method.needs().width, method.during("prefill").needs().width, after)
    return min(before, longest), min(after, longest)


def stored_hidden(method: Method, interval: int, longest: int) -> tuple[int, int]:
    """Return how many of the newest hidden states a layer stores: while a prompt is read, and in each slot afterwards.
    When a prompt is read layer by layer, only the layer being read stores more hidden states than a slot does."""
    decode = method.during("decode")
    after = 0 if decode.trigger(interval).growth is None else decode.needs().hidden
    before = max(method.during("prefill").needs().prompt_hidden, after)
    return min(before, longest), min(after, longest)


def fit(geometry: Sequence[LayerGeometry], method: Method, longest: int) -> tuple[LayerGeometry, ...]:
    """Return the geometry of the cache for a method and sequences of at most `longest` tokens.

    Layers with a sliding window of at least `longest` tokens get full attention. For a method that keeps entries per
    query head, every query head of an evicted layer counts as a KV head.

    Raises UserError in four cases:

    - The method evicts, and every layer has a sliding window.
    - The method spreads its budget unevenly, and the evicted layers differ in heads or dimensions.
    - The method keeps entries or a column per query head, and the evicted layers differ in query heads per KV head.
    - All heads share each entry (latent attention), and the method keeps entries per query head, has weights, or reads
      the model's attention or output projection.
    """
    fitted = layer_shapes.for_lengths(geometry, longest)
    if method.evicts:
        layer_shapes.check_evicts(fitted, longest)
    for g in fitted:
        _check_latent(g, method)
    if method.per_query_head or any(isinstance(column, QueryHeadColumn) for column in method.columns()):
        layer_shapes.check_equal_groups(fitted, type(method).__name__)
    if method.per_query_head:
        fitted = layer_shapes.per_query_head(fitted)
    if not method.uniform:
        layer_shapes.check_equal_heads(fitted)
    return fitted


def _check_latent(g: LayerGeometry, method: Method) -> None:
    """Raise UserError if a layer has latent attention, where all heads share each entry, but the method needs each
    head's own entries.

    Such a method keeps entries per query head, has weights, or reads the model's attention or output projection.
    """
    if g.latent and method.per_query_head:
        raise UserError(
            f"latent attention stores {g.head_dim} numbers per token for all heads; entries per query head would be "
            f"{g.query_heads} copies of them. Use the method's option heads=kv, or another method."
        )
    if g.latent and (weights := method.weights()) is not None:
        raise UserError(
            f"method {quote(weights.kind)} reads weights made for each KV head, but in this model's latent attention "
            "all heads share one entry. Use a method without weights."
        )
    if g.latent and method.needs().attention:
        raise UserError(
            f"{type(method).__name__} reads keys and values of every head, but in this model's latent attention all "
            "heads share one entry. Use another method."
        )
    if g.latent and method.needs().layer_weights:
        raise UserError(
            f"{type(method).__name__} multiplies each head's values by the output projection, but in this model's "
            "latent attention all heads share one entry. Use another method."
        )


def check_prefill(method: Method, prefill: str, name: str = "") -> None:
    """Raise UserError if `prefill` is "chunked" and the method does not work with chunked prefill. name: the method's
    name, for the error text."""
    needs, label = method.during("prefill").needs(), quote(name or type(method).__name__)
    whole = "runs probes over" if needs.probes else "reads the hidden states of" if needs.prompt_hidden == WHOLE else ""
    if prefill == "chunked" and whole:
        raise UserError(
            f"method {label} {whole} the whole prompt, but --prefill chunked evicts entries before the prompt's end. "
            "Use --prefill full."
        )


def layer_by_layer(method: Method, prefill: str, states: bool) -> bool:
    """Return whether a prompt is read in one forward pass, in which each layer is evicted as soon as no attention reads
    it any more.

    states: whether layers of the model keep a state. In one pass over a long prompt, the activations of such layers may
    take more memory than all entries. So a model with such layers reads every prompt in chunks.
    """
    acting = method.during("prefill")
    return not states and prefill == "full" and acting.evicts and acting.layerwise and not acting.needs().probes


def pass_tokens(chunk: int, *, gpu: bool, states: bool) -> int:
    """Return the most tokens that a forward pass reads of a prompt without images, if no eviction lies between passes.

    This is one chunk (`prefill.PromptReader`) on a CPU and in a model with states (`layer_by_layer`). Otherwise a pass
    on a GPU reads several chunks: with one chunk, the host would take longer to launch a pass than the GPU to compute.
    """
    chunks, most = GPU_PASS
    return max(chunk, min(chunks * chunk, most)) if gpu and not states else chunk


def shape_of(
    geometry: Sequence[LayerGeometry],
    method: Method,
    budget: float | None,
    interval: int,
    lengths: Lengths,
    slots: int,
    states: tuple[StateShape, ...] = (),
    sums: bool = False,
) -> Shape:
    """Return the size of a cache for sequences of these lengths. geometry: the model's geometry, not the result of
    `fit`. states: the shapes of the recurrent layers' states. sums: see `sums_attention`."""
    group, decode = largest_group(geometry), method.during("decode")
    rows = capacity(method, budget, interval, lengths, group)
    evicts = method.evicts and decode.trigger(interval).growth is not None  # else nothing reads columns and states
    return Shape(
        slots=slots,
        rows=rows,
        bounded=method.takes_budget and method.decode_bounded,
        longest=lengths.total,
        columns=expanded(decode.columns(), group) if evicts else (),
        states=decode.states() if evicts else (),
        queries=stored_queries(method, interval, lengths.total, sums)[1] if method.evicts else 0,
        sums=sums,
        marks=sum_marks(method, interval, sums) if method.evicts else (),
        hidden=stored_hidden(method, interval, lengths.total)[1] if method.evicts else 0,
        recurrent=states,
    )


def make_cache(
    geometry: Sequence[LayerGeometry],
    method: Method,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout = "auto",
) -> SlotCache:
    """Return an empty cache. layout: "auto" is dense if the method keeps equally many entries in all heads, else paged.
    Raises UserError for the dense layout if the method may keep unequal numbers of entries in different heads."""
    if layout == "auto":
        layout = "dense" if method.uniform else "paged"
    if layout == "dense" and not method.uniform:
        raise UserError(
            f"{type(method).__name__} spreads its budget unevenly, which the dense layout cannot store. "
            "Use layout 'paged' or 'auto'."
        )
    kind = DenseCache if layout == "dense" else PagedCache
    return kind(geometry, shape, device, dtype)


def plan_slot_bytes(geometry: Sequence[LayerGeometry], method: Method, shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of one slot of a cache, without allocating the cache."""
    nowhere = [replace(g, device=None) for g in geometry]
    return make_cache(nowhere, method, shape, torch.device("meta"), dtype).slot_bytes()
