"""The shape of a model, from which a run is planned: its attention layers, and the parameters that a step reads."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvbench.console.faults import words
from kvbench.engine import memory
from kvbench.engine.attention.geometry import LayerGeometry, ProbeFailed, devices_of, read_layers
from kvbench.engine.attention.interface import text_model
from kvbench.engine.attention.layer_kinds import refuse_unsupported
from kvbench.engine.cache.recurrent import StateShape
from kvbench.engine.model.activations import pass_bytes
from kvbench.engine.model.continuation import check_continues
from kvbench.engine.model.load import LoadedModel, auto_class
from kvbench.engine.model.packing import large_linears
from kvbench.engine.model.tower import tower_bytes
from kvbench.errors import SetupError, quote
from kvbench.sources.quantised import StoredBytes

SMALL = 20_000_000  # with fewer parameters, a model is fastest on one CPU thread
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")  # fields: experts that a token uses
EMPTY = ("zero_expert_num",)  # fields with the number of further experts that have no weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One device's part of a model that is divided among several devices.

    layers: indices of its layers; parameters: how many the device holds; memory: bytes of the device's memory.
    """

    device: torch.device
    layers: frozenset[int]
    parameters: int
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model that a plan needs.

    Attributes:
        weightless: function that returns the model without weights, on the meta device.
        parameters: number of parameters of the whole model, also of those that text never uses (a vision tower).
        streamed: number of parameters that every step reads, without routed experts.
        routed: number of parameters of routed experts; `active`: the share of them that one token uses.
        states: the states of recurrent layers, per sequence.
        stored: bytes of weights that stay quantised in memory; None: all weights have the run's dtype.
        width: numbers per token that activations hold at their widest, without attention; `vocabulary`: logits per
            token.
        packable: number of parameters of layers that a CPU may pack for decode steps, see `packing`.
        traced: function (number of tokens, dtype) -> the most bytes of activations while a pass reads that many tokens;
            None for models without states.
        images: function (the model's inputs for images, dtype) -> two numbers: the most bytes that the vision part
            holds while it reads the images, and the bytes that it holds afterwards; see `tower`.
        parts: the part of each device, if the model is divided among several; else empty.
        counted: see `scratch.Scratch`.
    """

    geometry: tuple[LayerGeometry, ...]
    weightless: Callable[[], Any] = field(compare=False, repr=False)
    parameters: int
    streamed: int
    routed: int = 0
    active: float = 1.0
    states: tuple[StateShape, ...] = ()
    width: int = 0
    vocabulary: int = 0
    stored: StoredBytes | None = None
    packable: int = 0
    traced: Callable[[int, torch.dtype], int] | None = field(default=None, compare=False, repr=False)
    images: Callable[[Mapping[str, torch.Tensor], torch.dtype], tuple[int, int]] | None = field(
        default=None, compare=False, repr=False
    )
    parts: tuple[Part, ...] = ()
    counted: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def activations(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of activations, without attention, while one sequence reads `tokens` tokens in a pass."""
        plain = tokens * self.width * dtype.itemsize
        return plain if self.traced is None else max(plain, self.traced(tokens, dtype))

    def weight_bytes(self, element: int) -> int:
        """Return the bytes of all weights in memory. element: bytes of one weight; not used if the weights stay
        quantised in memory (`stored`)."""
        return self.parameters * element if self.stored is None else self.stored.total

    def bytes_read(self, element: int, slots: int) -> float:
        """Return the bytes of weights that a step of `slots` sequences reads.

        element: bytes of one weight that is not quantised. If weights stay quantised, the bytes of parameters that no
        step reads (embedding tables, a vision tower) are subtracted from the stored bytes. These parameters are assumed
        not to be quantised, so each counts `element` bytes.
        """
        streamed, routed = self.streamed * element, self.routed * element
        if self.stored is not None:
            unread = (self.parameters - self.streamed - self.routed) * element
            routed = self.stored.routed
            streamed = max(0, self.stored.total - routed - unread)
        return streamed + routed * (1 - (1 - self.active) ** slots)


def read_shape(config: Any) -> ModelShape:
    """Return the shape of a model from its configuration, without weights (on the meta device). Raises UserError when
    the model is not supported, ProbeFailed when the layers can be read only from a loaded model."""
    model = on_meta(config)
    geometry, states = read_layers(model)
    check_continues(model, states)
    return _shape(model, geometry, states)


def shape_of_model(model: Any) -> ModelShape:
    """Return the shape of a model in memory or on the meta device. Raises UserError when it is not supported."""
    return _shape(model, *read_layers(model))


def known_shape(config: Any, load: Callable[[], LoadedModel]) -> tuple[ModelShape, LoadedModel | None]:
    """Return the shape of a model from its configuration; if the model's code fails on meta tensors, load the model.
    Also return the model if it was loaded. Raises KVBenchError when the model is not supported or cannot be loaded."""
    try:
        return read_shape(config), None
    except ProbeFailed:
        loaded = load()
        return shape_of_model(loaded.model), loaded


def estimate_shape(config: Any) -> ModelShape:
    """Estimate the shape of a model from common fields of its configuration, for a plan that must not load the model.

    All layers count as equal attention layers, of the largest sizes in any layer: the estimate has no sliding windows
    and no states of recurrent layers.
    Raises UserError when the model is not supported, ProbeFailed when the configuration lacks these fields or the model
    cannot be built without weights.
    """
    text = config.get_text_config()
    heads, layers = _first(text, ("num_attention_heads",)), _first(text, ("num_hidden_layers",))
    if not heads or not layers:
        raise _only_loaded(config, ValueError("its config.json lacks the number of layers or heads"))
    kv_heads = _first(text, ("num_key_value_heads",)) or heads
    dim = _first(text, ("head_dim",)) or int(text.hidden_size) // heads
    layer: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": dim, "value_dim": dim}
    if rank := _first(text, ("kv_lora_rank",)):  # latent attention: one entry for all heads
        beside = _first(text, ("index_head_dim",)) or 0
        layer = {"kv_heads": 1, "head_dim": rank + int(text.qk_rope_head_dim), "value_dim": beside, "latent": rank}
    layer |= {"query_heads": heads, "scaling": dim**-0.5}
    return _shape(on_meta(config), tuple(LayerGeometry(index=i, **layer) for i in range(layers)))


def on_meta(config: Any) -> Any:
    """Build the model without weights, in bfloat16, a dtype that every operator accepts on the meta device. Raises
    UserError when the model is not supported, SetupError when its code needs a package, ProbeFailed when it needs
    weights."""
    refuse_unsupported(config)
    kind = auto_class(config)
    try:
        with torch.device("meta"):
            return kind.from_config(copy.deepcopy(config), dtype=torch.bfloat16, trust_remote_code=False).eval()
    except ImportError as error:
        reason = " ".join(words(error).split()).partition(" Please note")[0].rstrip(".")
        raise SetupError(
            f"model type {quote(config.model_type)} needs a package that is not installed; install it: {reason}."
        ) from error
    except Exception as error:  # transformers' code for a model may raise any exception
        raise _only_loaded(config, error) from error


def _only_loaded(config: Any, error: Exception) -> ProbeFailed:
    reason = (words(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ProbeFailed(
        f"the layers of model type {quote(config.model_type)} can be read only with its weights, which --dry-run does "
        f"not load ({reason}). Leave --dry-run out."
    )


def _shape(model: Any, geometry: tuple[LayerGeometry, ...], states: tuple[StateShape, ...] = ()) -> ModelShape:
    decoder, head = text_model(model), model.get_output_embeddings()
    tables = {id(m.weight) for m in decoder.modules() if isinstance(m, torch.nn.Embedding)}  # hardly read
    read = {id(p): p.numel() for p in decoder.parameters() if id(p) not in tables}  # without a vision tower
    read |= {id(p): p.numel() for p in head.parameters()} if head is not None else {}
    experts = {at: math.prod(shape) for at, shape in _routed_experts(model).items() if at in read}
    config = model.config

    @functools.cache
    def weightless() -> Any:
        return on_meta(config)

    @functools.cache
    def empty_states() -> tuple[StateShape, ...]:  # a loaded model may have states of another dtype
        return read_layers(weightless())[1]

    @functools.cache
    def traced(tokens: int, dtype: torch.dtype) -> int:
        return pass_bytes(weightless(), empty_states(), tokens, dtype)

    def images(read: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[int, int]:
        return tower_bytes(on_meta(config).to(dtype), read)

    return ModelShape(
        geometry=geometry,
        states=states,
        parameters=sum(p.numel() for p in model.parameters()),
        streamed=sum(size for at, size in read.items() if at not in experts),
        routed=sum(experts.values()),
        active=_active_share(model.config.get_text_config()),
        width=_width(model, decoder) + 2 * max((g.head_dim for g in geometry), default=0),  # RoPE's cosines and sines
        vocabulary=int(head.weight.shape[0]) if head is not None else 0,
        packable=sum(layer.weight.numel() for layer in large_linears(model)),
        traced=traced if states else None,
        images=images,
        weightless=weightless,
        parts=_parts(model, geometry, states),
    )


def _parts(model: Any, geometry: Sequence[LayerGeometry], states: Sequence[StateShape]) -> tuple[Part, ...]:
    """Return what each device of a divided model holds; () if the model is on one device."""
    devices = devices_of(model)
    if len(devices) == 1:
        return ()
    held = {g.index: g.device for g in geometry} | {s.layer: s.device for s in states}
    return tuple(
        Part(
            device=device,
            layers=frozenset(layer for layer, where in held.items() if where == device),
            parameters=sum(p.numel() for p in model.parameters() if p.device == device),
            memory=memory.total(device),
        )
        for device in devices
    )


def _width(model: Any, decoder: Any) -> int:
    """Return how many numbers per token the model's activations hold at their widest, without RoPE.

    The model keeps the embeddings and the layer's input until the layer ends. Beside these, it holds the numbers of one
    of two stages of the layer; the larger stage counts:

    - The norm holds the residual and float32 numbers, which count twice.
    - A gated MLP holds the residual, its norm, the outputs of the two widest linear layers and their product; a token
      counts once for each routed expert that it uses.
    """
    tables = {id(m.weight) for m in decoder.modules() if isinstance(m, torch.nn.Embedding)}
    used = _first(model.config.get_text_config(), USED) or 1
    experts = _routed_experts(model)
    matrices = {id(p): p.shape for p in decoder.parameters() if p.ndim >= 2 and id(p) not in tables}
    hidden = max((m.weight.shape[1] for m in decoder.modules() if isinstance(m, torch.nn.Embedding)), default=0)
    widths = (used * max(experts[at][1:]) if at in experts else max(shape[-2:]) for at, shape in matrices.items())
    widest = max(widths, default=0)
    return 2 * hidden + max(6 * hidden, 2 * hidden + 3 * widest)


def _routed_experts(model: Any) -> dict[int, tuple[int, int, int]]:
    """Return the shapes [experts, rows, columns] of the routed experts' weights, by the weights' id().

    transformers stacks the experts of a layer in a tensor of this shape, or (DBRX) the rows of all experts in a matrix.
    The number of experts comes from the module or, if the module does not state it, from the configuration. Rows for
    experts that have no weights of their own (LongCat Flash) are not counted, because no step reads them.
    """
    text = model.config.get_text_config()
    configured, empty = _first(text, EXPERTS), _first(text, EMPTY) or 0
    shapes: dict[int, tuple[int, int, int]] = {}
    for name, module in model.named_modules():
        if not (experts := getattr(module, "num_experts", configured)):
            continue
        for p in module.parameters(recurse=False):
            if p.ndim == 3 and p.shape[0] in (experts, experts + empty):
                shapes[id(p)] = experts, p.shape[1], p.shape[2]
            elif p.ndim == 2 and "experts" in name.split(".") and p.shape[0] > experts and p.shape[0] % experts == 0:
                shapes[id(p)] = experts, p.shape[0] // experts, p.shape[1]
    return shapes


def _active_share(config: Any) -> float:
    """Return the share of the routed experts that a token uses; 1 if the configuration lacks the common fields."""
    used, experts = _first(config, USED), _first(config, EXPERTS)
    return min(1.0, used / (experts + (_first(config, EMPTY) or 0))) if used and experts else 1.0


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the value of the first of these fields that holds an integer, in the configuration or else in one of its
    parts. If the field holds one integer per layer, return the largest. None if no field holds integers."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        for name in names:
            value = _field(part, name)
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if numbers and all(type(number) is int for number in numbers):
                return max(numbers)
    return None


def _field(config: Any, name: str) -> Any:
    """Return the value of a field, as a list of one value per layer if the layers differ; None if it is absent."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises it if the layers differ
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def use_threads(shape: ModelShape, device: torch.device) -> int:
    """Use one CPU thread for a model so small that more threads slow it down; return the number of threads in use."""
    if device.type == "cpu" and shape.parameters < SMALL:
        torch.set_num_threads(1)
    return torch.get_num_threads()
