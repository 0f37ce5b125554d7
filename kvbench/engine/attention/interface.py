"""Sends a model's attention calls to a handler, through transformers' attention interface.

`route(model, handler)` sends every attention call of a model to `handler(call) -> output` inside a with-block, without
patching the model. The handler receives post-RoPE queries, keys and values of the new tokens only, because the model
runs without transformers' cache. With `route(latent=True)`, the calls of layers with latent attention hold the queries,
keys and values of the latent form (module `latent`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.engine.attention.grouped import grouped_attention
from kvbench.engine.attention.indexer import IndexerCall, IndexerHooks
from kvbench.engine.attention.latent import PROJECTION, Latent, Latents, projections
from kvbench.engine.cache.recurrent import RecurrentStates
from kvbench.errors import UserError, quote

# Arguments that models pass to attention and that do not change the attention that the engine computes.
_HARMLESS = {"dropout", "position_ids", "use_cache", "cache_position", "logits_to_keep"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits"}
_replaced: dict[str, str] = {}  # name of a routing (a `route` block) -> the attention implementation that it replaced


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments with which the model calls the attention of one layer."""

    layer: int
    query: torch.Tensor  # [b, Hq, t, D]
    key: torch.Tensor  # [b, Hk, t, D], new tokens only
    value: torch.Tensor  # [b, Hk, t, Dv]
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [Hq] logits of a virtual key
    hidden: torch.Tensor | None = None  # [b, t, hidden size] input of the attention module, with route(hidden=True)
    tokens: torch.Tensor | None = None  # [b, t] ids, with route(hidden=True); None where the model reads embeddings
    latent: Latent | None = None  # a latent layer's matrices, with route(latent=True); `value` then has index keys
    indexer: IndexerCall | None = None  # in sparse attention
    stores: bool = True  # False: the entries are those of an earlier layer, which has stored them

    def for_heads(self, kv_heads: int) -> AttentionCall:
        """Return the call with keys and values repeated to `kv_heads` heads, for a cache kept per query head."""
        times = kv_heads // self.key.shape[1]
        if times == 1:
            return self
        return replace(self, key=self.key.repeat_interleave(times, 1), value=self.value.repeat_interleave(times, 1))

    def sharing(self, home: int, device: torch.device | None) -> AttentionCall:
        """Return the call of a layer that attends to the entries of layer `home` as a call of layer `home` that stores
        nothing. device: the own device of layer `home`; None if all layers are on one device."""
        moved = self.query, self.key, self.value
        query, key, value = moved if device is None else (tensor.to(device) for tensor in moved)
        sinks = self.sinks if device is None or self.sinks is None else self.sinks.to(device)
        return replace(self, layer=home, stores=False, query=query, key=key, value=value, sinks=sinks)

    def in_latents(self, maps: Latent, latent: torch.Tensor) -> AttentionCall:
        """Return the call with queries and keys in the latent form: one key per token for all heads (module `latent`).
        The values are a part of the keys; `value` has the index keys instead, no numbers in layers without an indexer.
        maps: the matrices of the layer; latent: [b, 1, t, R], the latents of the new tokens."""
        key = maps.entries(latent, self.key)
        beside = key[..., :0] if self.indexer is None else self.indexer.key.to(key.device)
        return replace(self, query=maps.queries(self.query), key=key, value=beside, latent=maps)

    def part(self, rows: slice = slice(None), tokens: slice = slice(None)) -> AttentionCall:
        """Return the call for the queries of these sequences and these new tokens. Keys and values stay as they are."""
        indexer = None if self.indexer is None else self.indexer.part(rows, tokens)
        return replace(self, query=self.query[rows, :, tokens], indexer=indexer)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of queries to stored entries, with the scaling, softcap, sinks and indexer of the call.

        The arguments are those of `grouped_attention`; `query` is the call's, or another one in a call without indexer.
        In latent layers, where the values are a part of the keys, `values` has the index keys.
        """
        read = values if self.latent is None else keys[..., : self.latent.rank]
        how: dict[str, Any] = {"scaling": self.scaling, "softcap": self.softcap, "sinks": self.sinks}
        if self.indexer is None:
            return grouped_attention(query, keys, read, bias, **how, sums=sums)
        chosen = self.indexer.hide(values if self.latent else self.indexer.key, bias)
        if sums is not None and chosen is not bias:  # methods see attention to all entries, chosen or not
            grouped_attention(query, keys, read, bias, **how, sums=sums)
            sums = None
        return grouped_attention(query, keys, read, chosen, **how, sums=sums)


Handler = Callable[[AttentionCall], torch.Tensor]  # returns [b, t, Hq, Dv]
# id() of a module -> its input in this forward pass; TOKENS -> the token ids; INDEXER -> the newest call of an indexer
Read = dict[int, Any]
TOKENS, INDEXER = -1, -2  # keys that are no module's id()
_routings: dict[str, tuple[Handler, Read, Latents]] = {}  # the open `route` blocks, by name


@contextlib.contextmanager
def route(
    model: Any, handler: Handler, hidden: bool = False, *, latent: bool = False, latents: Latents | None = None
) -> Iterator[None]:
    """Send the model's attention to `handler` inside the `with` block; afterwards the model is as before.

    hidden: add to each call the hidden states that the attention module reads, and the token ids. latent: convert
    the calls of layers with latent attention by `AttentionCall.in_latents`; latents: the matrices of these layers from
    an earlier `route` block of this model.
    """
    name = next(name for name in map("kvbench_{}".format, itertools.count()) if name not in _replaced)
    text = text_model(model)
    _replaced[name] = text.config._attn_implementation
    _routings[name] = handler, {}, latents or Latents()
    attention, note, note_tokens, of_indexers = _functions(name)
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")] if hidden else []
    layers += projections(model).values() if latent else []
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    if hidden:
        hooks += [module.register_forward_pre_hook(note_tokens) for module in (model, model.get_input_embeddings())]
    hooks += of_indexers.register(model)
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    try:
        set_implementation(text, name)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del _routings[name]  # routings may end in any order
        if text.config._attn_implementation == name:  # else a later routing has taken over
            before = name
            while before in _replaced and before not in _routings:  # an open routing, else the model's own
                before = _replaced[before]
            set_implementation(text, before)
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
        if not _routings:
            _replaced.clear()


def run(model: Any, states: RecurrentStates | None = None, **inputs: Any) -> Any:
    """Run a forward pass in which the model keeps no keys and values and makes no mask; return the model's output.
    states: the states of recurrent layers, which the pass continues and replaces."""
    return model(**inputs, attention_mask=None, past_key_values=states, use_cache=states is not None)


class RoutedModel:
    """A model whose attention handler may differ from one forward pass to the next, inside `with model.routed()`.

    Registering a function with transformers takes about a millisecond; changing the handler takes no time. So prefill
    and decoding alternate within one `routed()` block. The handler gets the calls of layers with latent attention in
    the latent form (`AttentionCall.in_latents`). hidden: as for `route`.
    """

    def __init__(self, model: Any, hidden: bool) -> None:
        self.model, self.hidden, self._latents = model, hidden, Latents()
        self._handlers: list[Handler] = []

    def routed(self) -> AbstractContextManager[None]:
        return route(self.model, lambda call: self._handlers[-1](call), self.hidden, latent=True, latents=self._latents)

    @contextlib.contextmanager
    def attend(self, handler: Handler) -> Iterator[None]:
        """Make `handler` compute the attention of forward passes inside the `with` block."""
        self._handlers.append(handler)
        try:
            yield
        finally:
            self._handlers.pop()

    def run(self, handler: Handler, states: RecurrentStates | None, **inputs: Any) -> Any:
        with self.attend(handler):
            return run(self.model, states, **inputs)


def text_model(model: Any) -> Any:
    """Return a model's decoder, without vision part and output layer. If transformers finds no decoder, return the
    model. In a vision-language model, vision part and decoder may have different attention implementations."""
    try:
        decoder = model.get_decoder()
    except (AttributeError, NotImplementedError):  # transformers does not know it
        return model
    return decoder if hasattr(decoder, "set_attn_implementation") else model


def set_implementation(model: Any, name: str) -> None:
    """Let a model call the attention function registered as `name`. Raises UserError when the model does not support
    transformers' attention interface."""
    # Models with states use the interface too, but transformers does not set `_supports_attention_backend` for them.
    stateful = getattr(model, "_is_stateful", False) and model._can_set_attn_implementation()
    if not (stateful or getattr(model, "_supports_attention_backend", False)):
        raise UserError(
            f"model type {quote(model.config.model_type)} is not supported: "
            "it does not support transformers' attention interface. Choose another model."
        )
    model.set_attn_implementation(name)


@functools.cache
def _functions(
    name: str,
) -> tuple[Callable[..., tuple[torch.Tensor, None]], Callable[..., None], Callable[..., None], IndexerHooks]:
    """Return the attention function and the hooks of the `with route(...)` block that goes by `name`; torch compiles
    none of them.

    The first hook stores the input of a module: the hidden states that an attention module reads, or latents. The
    second hook deletes the token ids of the previous pass when a pass begins, and stores the token ids that the
    embedding reads. The last hooks store the calls of indexers. A later block of this name gets the same functions,
    because compiled layers stay valid only with the same functions.
    """

    @torch.compiler.disable
    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _routings[name][1][id(module)] = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    @torch.compiler.disable
    def note_tokens(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        read = _routings[name][1]
        read.pop(TOKENS, None)
        if isinstance(module, torch.nn.Embedding):
            read[TOKENS] = args[0]

    @torch.compiler.disable
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        indices: torch.Tensor | None = None,
        **extra: Any,
    ) -> tuple[torch.Tensor, None]:
        for extra_name, argument in extra.items():
            if argument is not None and extra_name not in _HARMLESS:
                owner = quote(type(module).__name__)
                raise UserError(
                    f"the model's {owner} passes {quote(extra_name)} to attention, which kvbench does not support. "
                    "Choose another model."
                )
        # kvbench passes no mask, and transformers makes none for this function; one for indexers has no elements.
        if attention_mask is not None and attention_mask.numel():
            raise UserError(
                f"the model's {quote(type(module).__name__)} passes its own mask to attention, which kvbench does not "
                "support. Choose another model."
            )
        layer: Any = module
        handler, read, latents = _routings[name]
        if is_causal is False or getattr(layer, "is_causal", True) is False:
            raise UserError(
                f"the model's {quote(type(module).__name__)} attends in both directions; kvbench supports causal "
                "models only. Choose another model."
            )
        call = AttentionCall(
            layer=int(layer.layer_idx),
            query=query,
            key=key,
            value=value,
            scaling=scaling if scaling is not None else float(layer.scaling),
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
            hidden=read.pop(id(module), None),
            tokens=read.get(TOKENS),
            indexer=None if indices is None else read[INDEXER],
        )
        projection: Any = getattr(layer, PROJECTION, None)
        if (latent := read.pop(id(projection), None)) is None:
            # Entries of an earlier layer may be on its device. Some models call .view on the output.
            return handler(call).to(query.device).contiguous(), None
        maps = latents.of(projection, latent.shape[-1], key, value)
        return maps.outputs(handler(call.in_latents(maps, latent))).contiguous(), None

    def heard(call: IndexerCall | None) -> None:
        if name in _routings:  # a hook of `EvictionCache` may have closed the block before the pass ends
            _routings[name][1][INDEXER] = call

    return attention, note, note_tokens, IndexerHooks(heard)
