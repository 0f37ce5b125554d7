"""The shape of each attention layer of a model, learnt from one forward pass instead of from per-model tables.

The model reads one token with an attention function that only records what the model passes in every layer: head
counts, dimensions, scale, sliding window, logit cap and sinks. This works on real and on meta tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.console import faults
from kvbench.console.faults import words
from kvbench.engine.attention.interface import AttentionCall, route, run, text_model
from kvbench.engine.attention.layer_kinds import MEMORYLESS, SLIDING, STATEFUL, refuse_unsupported
from kvbench.engine.cache.recurrent import RecurrentStates, StateShape
from kvbench.errors import KVBenchError, UserError, quote
from kvbench.eviction.api import State
from kvbench.sources.models import context_of


class ProbeFailed(UserError):
    """The model's code failed while kvbench built the model without weights, or in a short pass that examines it; or
    its configuration lacks a field that `shape.estimate_shape` reads.

    The code fails, for example, if it reads values of meta tensors, which have none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """The shape of one attention layer, and of the entries that the cache stores for it.

    window: the sliding window in tokens, None for full attention. latent: 0 without latent attention; in latent
    attention the first `latent` numbers of a key are also the value (see the module `latent`), and `value_dim` counts
    the numbers of an index key instead. topk, indexer_heads: the most entries to which a query attends and the heads of
    the indexer that chooses them (see the module `indexer`); 0 if a query attends to all.
    hidden: how many numbers a hidden state (the input of the layer's attention) has. device: the layer's own device in
    a model that is divided among several devices, else None. shared_by: the indices of later layers that compute no
    keys and values and attend to the entries of this layer.
    """

    index: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: int = 0
    hidden: int = 0
    device: torch.device | None = None
    shared_by: tuple[int, ...] = ()
    topk: int = 0
    indexer_heads: int = 0

    def on(self, device: torch.device) -> torch.device:
        """Return the layer's own device; `device` if the whole model is on one device."""
        return self.device or device

    def entry_bytes(self, element: int) -> int:
        """Return the bytes of one token's entries in all KV heads, without columns: in each head K, V and, in a layer
        without a sliding window, a position of 4 bytes. element: the bytes of one number in K or V."""
        return self.kv_heads * ((self.head_dim + self.value_dim) * element + (4 if self.window is None else 0))

    def state_shape(self, state: State) -> tuple[int, ...]:
        """Return the shape of a method's state in this layer, with numbers in place of named dimensions."""
        named = {"query_heads": self.query_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return tuple(named[size] if isinstance(size, str) else size for size in state.shape)

    def read_values(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the values of stored entries, as attention and methods read them. In latent attention these are the
        first `latent` numbers of `keys`, in other layers `values` as they are."""
        return keys[..., : self.latent] if self.latent else values

    def adapt(self, call: AttentionCall) -> AttentionCall:
        """Return a call of a layer that attends to the entries of this layer, with the heads of this layer's cache. The
        call of another layer becomes a call of this layer that stores nothing."""
        call = call if call.layer == self.index else call.sharing(self.index, self.device)
        return call.for_heads(self.kv_heads)

    @property
    def kind(self) -> LayerGeometry:
        """The geometry without the layer's place in the model, equal for layers of equal shape."""
        return replace(self, index=0, shared_by=())

    @property
    def attending(self) -> tuple[int, ...]:
        """The indices of all layers that attend to this layer's entries, its own first, then `shared_by`."""
        return self.index, *self.shared_by

    @property
    def causal(self) -> bool:
        """Whether attention is plainly causal: no logit cap, no sinks, no sliding window, no indexer."""
        return self.softcap is None and not self.sinks and self.window is None and not self.topk

    @property
    def read_dim(self) -> int:
        """The dimension of a value as attention reads it."""
        return self.latent or self.value_dim

    @property
    def group(self) -> int:
        """The number of query heads that share a KV head."""
        return self.query_heads // self.kv_heads

    @property
    def evicts(self) -> bool:
        """Whether methods evict entries of this layer: False if a sliding window already bounds the layer's memory."""
        return self.window is None


def read_layers(model: Any) -> tuple[tuple[LayerGeometry, ...], tuple[StateShape, ...]]:
    """Return the geometry of the layers of a language model that store entries, and the shapes of the states of its
    recurrent layers.

    Raises UserError when the engine does not support the model. Raises ProbeFailed, a subclass of UserError, when the
    forward pass fails: on meta tensors, which have no values, a pass may fail that succeeds on a loaded model. For a
    model with recurrent layers, a failed pass raises a plain UserError, because the pass of such a model needs no
    values and would fail on the loaded model too.
    """
    refuse_unsupported(model.config)
    text = model.config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    wanted = int(getattr(text, "num_hidden_layers", 0))
    stateful = getattr(model, "_is_stateful", False) or not STATEFUL.isdisjoint(kinds)
    states = RecurrentStates(wanted, getattr(text, "number_of_conv_states", 1)) if stateful else None
    layers: dict[int, LayerGeometry] = {}
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # a layer's keys and values of the one token
    sharing: dict[int, int] = {}  # a layer without keys and values of its own -> the earlier layer that has them
    divided = len(devices_of(model)) > 1

    def record(call: AttentionCall) -> torch.Tensor:
        index = call.layer
        if index in layers or index in sharing:
            name = quote(type(model).__name__)
            raise UserError(
                f"model {name} calls attention layer {index} twice, which is not supported. Choose another model."
            )
        b, hq, t, _ = call.query.shape
        home = next(
            (i for i, (key, value) in stored.items() if _same(call.key, key) and _same(call.value, value)), None
        )
        if home is not None:
            _check_sharing(model, layers[home], call)
            sharing[index] = home
            return call.value.new_zeros(b, t, hq, layers[home].read_dim)
        stored[index] = call.key, call.value
        layers[index] = LayerGeometry(
            index=index,
            query_heads=hq,
            kv_heads=call.key.shape[1],
            head_dim=call.key.shape[-1],
            value_dim=call.value.shape[-1],
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks is not None,
            latent=0 if call.latent is None else call.latent.rank,
            topk=0 if call.indexer is None else call.indexer.topk,
            indexer_heads=0 if call.indexer is None else call.indexer.heads,
            hidden=int(getattr(text, "hidden_size", 0) or 0),
            device=call.query.device if divided else None,
        )
        return call.value.new_zeros(b, t, hq, layers[index].read_dim)

    device = next(model.parameters()).device
    failure = UserError if stateful else ProbeFailed
    with torch.no_grad(), route(model, record, latent=True), own_failures(model, failure):
        first = torch.zeros(1, 1, dtype=torch.long, device=device)
        # The embedding of a padding token may be 0, and the keys of all layers with it.
        token = first + 1 if getattr(model.get_input_embeddings(), "padding_idx", None) == 0 else first
        run(model, states, input_ids=token, position_ids=first)
    found = states.shapes(divided) if states is not None else ()
    served = {
        *layers,
        *sharing,
        *(s.layer for s in found),
        *(at for at, kind in enumerate(kinds) if kind in MEMORYLESS),
    }
    if not layers or len(served) != wanted:
        missing = [at for at in range(wanted) if not layers or at not in served]
        raise UserError(
            f"architecture {quote(type(model).__name__)} is not supported: {len(missing)} of {wanted} layers have "
            "neither a KV cache nor a state that kvbench can manage (the first is of type "
            f"{layer_type(model, missing[0])}). Choose another model."
        )
    geometry = tuple(
        replace(layers[i], shared_by=tuple(sorted(at for at, home in sharing.items() if home == i)))
        for i in sorted(layers)
    )
    _check_windows(model.config, geometry)
    return geometry, found


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are one. Tensors on two devices count as one if they are equal and not 0."""
    if tensor.device == other.device or tensor.shape != other.shape:
        return tensor is other
    return bool(tensor.any()) and torch.equal(tensor.cpu(), other.cpu())


def _check_sharing(model: Any, layer: LayerGeometry, call: AttentionCall) -> None:
    """Raise UserError if a layer that attends to an earlier layer's entries has another sliding window or number of
    query heads than this earlier layer. call: the later layer's attention call."""
    if (call.window, call.query.shape[1]) != (layer.window, layer.query_heads):
        raise UserError(
            f"model {quote(type(model).__name__)} is not supported: layer {call.layer} shares the keys and values of "
            f"layer {layer.index}, but with another sliding window or number of query heads. Choose another model."
        )


def homes(geometry: Sequence[LayerGeometry]) -> dict[int, int]:
    """Return, for each attention layer, the layer that stores the entries to which it attends: nearly always itself."""
    return {index: g.index for g in geometry for index in g.attending}


def devices_of(model: Any) -> tuple[torch.device, ...]:
    """Return the devices of a model's parameters, in the order of its modules."""
    return tuple(dict.fromkeys(parameter.device for parameter in model.parameters()))


def layer_type(model: Any, index: int) -> str:
    """Return the type of a layer for messages: its kind in the configuration, if given there, and its class."""
    text = model.config.get_text_config()
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    modules = text_model(model).modules()
    layers = (m for m in modules if isinstance(m, torch.nn.ModuleList) and len(m) == text.num_hidden_layers)
    names = ([quote(kinds[index])] if kinds else []) + [type(stack[index]).__name__ for stack in layers][:1]
    return " ".join(names)


def _check_windows(config: Any, layers: Sequence[LayerGeometry]) -> None:
    """Raise UserError if a layer has a sliding window that the model does not pass to attention.

    Such a model applies the window only by an attention mask. The engine runs the model without a mask, so the layer
    would attend to all entries. A window as long as the model's context hides none of them.
    """
    text = config.get_text_config()
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if type(window) is int and window >= context_of(config):
        return
    slides = bool(window) and getattr(text, "use_sliding_window", True) is not False
    for layer in layers:
        if layer.window is None and (kinds[layer.index] in SLIDING if kinds else slides):
            raise UserError(
                f"model type {quote(text.model_type)} is not supported: it does not pass its sliding window to "
                "attention. Choose another model."
            )


@contextlib.contextmanager
def own_failures(model: Any, failure: type[UserError] = ProbeFailed) -> Iterator[None]:
    """Turn an exception of the model's code, which the `with` block runs, into `failure`, a UserError. Errors of
    kvbench itself, of memory and of devices are raised as they are."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KVBenchError) or faults.of_machine(error):
            raise
        reason = (words(error).splitlines() or [""])[0].rstrip(".")
        raise failure(
            f"model type {quote(model.config.model_type)} is not supported: its code fails in a short pass without "
            f"transformers' cache ({type(error).__name__}: {reason})."
        ) from error


def largest_group(geometry: Sequence[LayerGeometry]) -> int:
    """Return the largest number of query heads per KV head in the layers that methods evict; in all layers if each has
    a sliding window, because methods evict a layer whose window hides no token (`for_lengths`)."""
    return max((g.group for g in geometry if g.evicts), default=max((g.group for g in geometry), default=1))


def asks_indexers(geometry: Sequence[LayerGeometry], most: int) -> bool:
    """Return whether a layer with an indexer may hold more entries than a query may attend to, so that decode steps ask
    the indexer. most: entries of the longest head."""
    return any(0 < g.topk < most for g in geometry)


def for_lengths(geometry: Sequence[LayerGeometry], longest: int) -> tuple[LayerGeometry, ...]:
    """Return the geometry with full attention in layers whose sliding window has `longest` or more tokens. longest:
    tokens of the longest sequence; a window that is at least as long hides no key."""
    return tuple(replace(g, window=None) if g.window is not None and g.window >= longest else g for g in geometry)


RUN_SHORTER = (
    "Use the method full, or lower the limit of tokens (--max-new-tokens; max_tokens of EvictionCache) until a whole "
    "sequence fits into a window"
)


def check_evicts(geometry: Sequence[LayerGeometry], longest: int, cure: str = RUN_SHORTER) -> None:
    """Raise UserError when every layer has a sliding window: a method then has no layer to evict. longest: tokens of
    the longest sequence; cure: what the user can do; both for the message."""
    if not any(g.evicts for g in geometry):
        window = max(g.window or 0 for g in geometry)
        raise UserError(
            f"every layer of the model has a sliding window of at most {window} tokens, and methods do not evict from "
            f"such layers. {cure} (now up to {longest} tokens): methods evict from a layer whose window hides no token."
        )


def per_query_head(geometry: Sequence[LayerGeometry]) -> tuple[LayerGeometry, ...]:
    """Return the geometry of a cache that keeps keys and values per query head instead of per KV head. Layers with a
    sliding window, which methods do not evict, still have KV heads."""
    return tuple(replace(g, kv_heads=g.query_heads) if g.evicts else g for g in geometry)


def check_equal_groups(geometry: Sequence[LayerGeometry], name: str) -> None:
    """Raise UserError when evicted layers differ in query heads per KV head. A method that keeps entries or a column
    per query head needs equal numbers. name: the method's, for the message."""
    if len(groups := sorted({g.group for g in geometry if g.evicts})) > 1:
        raise UserError(
            f"evicted layers of this model have {' or '.join(map(str, groups))} query heads per KV head, and {name} "
            "needs equally many, because it keeps numbers for each query head. Use its option heads=kv, if it has one, "
            "or another method."
        )


def check_equal_heads(geometry: Sequence[LayerGeometry]) -> None:
    """Raise UserError when the evicted layers differ in heads or dimensions. A method that spreads its budget unevenly
    needs equal layers."""
    if len({(g.kv_heads, g.head_dim, g.value_dim) for g in geometry if g.evicts}) > 1:
        raise UserError(
            "layers of this model differ in heads or dimensions, which a method that spreads its budget unevenly does "
            "not support. Use a method that keeps equally many entries in all heads."
        )
