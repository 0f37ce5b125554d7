"""The memory of a training on one device, counted from the model's configuration before its weights are loaded.

The recipe's own code runs on the meta device (`kvbench.train.rehearsal`): the step of a batch of the longest traces with
its backward pass, the update by the optimiser, and the held-out figures. Decoder layers are alike, so two rehearsals,
with two and with three layers, give every part's bytes per layer: in every stretch of the computation the bytes are a
constant and a multiple of the number of layers. A model whose layers differ is rehearsed whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvbench.engine.attention.geometry import read_layers
from kvbench.engine.attention.interface import text_model
from kvbench.engine.attention.kernel_choice import planned_for
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import on_meta
from kvbench.eviction.checks import unread
from kvbench.train.recipe import Recipe, Settings
from kvbench.train.rehearsal import Ledger, Parts

WEIGHTS, TRAINED, GRADIENTS, OPTIMISER = "weights", "trained tensors", "gradients", "optimiser"
LOGITS, ATTENTION, CACHE, ACTIVATIONS = "logits", "attention", "keys and values", "activations"
FIRST, INNER, LAST = "first layer", "inner layer", "last layer"
COPIES = "scratch for weights"
BETWEEN = "between steps"
SMALLEST = 2  # layers of a rehearsal: a first and a last one
Segments = dict[str, list[tuple[str, Parts]]]  # by phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a rehearsal needs.

    Attributes:
        recipe: its class; config: of the model.
        items, held_out: what the recipe trains on and holds out.
        dtype: of the loaded weights; gpu: whether to count a GPU's kernels.
        share: items of a step's batch that one process computes.
    """

    recipe: type[Recipe]
    config: Any
    settings: Settings
    items: Sequence[Any]
    held_out: Sequence[Any]
    dtype: torch.dtype
    gpu: bool
    share: int

    def phases(self) -> dict[str, Parts]:
        """Return the bytes of every part at the peak of each phase, by the phase's name."""
        config = self.config.get_text_config()
        layers = int(config.num_hidden_layers)
        if layers <= SMALLEST + 1 or not _alike(self._loaded(layers)):
            return {name: _peak(segments) for name, segments in self._run(layers).items()}
        few, more = self._run(SMALLEST), self._run(SMALLEST + 1)
        return {name: _peak(_extended(few[name], more[name], layers)) for name in few}

    def _run(self, layers: int) -> Segments:
        loaded = self._loaded(layers)
        ledger = Ledger(_kinds(loaded), self.recipe.answers(self.settings))
        done: Segments = {}
        with unread(), planned_for(gpu=self.gpu), ledger, _marking(loaded.model, ledger):
            ledger.name((*loaded.model.parameters(), *loaded.model.buffers()), WEIGHTS)
            recipe = self.make(loaded)
            _name_held(recipe, loaded, ledger)
            done["preparing"] = ledger.taken()
            optimiser = _optimiser(recipe, self.settings, ledger, gpu=self.gpu)
            ledger.taken()
            for p in recipe.parameters().values():
                p.register_post_accumulate_grad_hook(lambda p: ledger.name([p.grad], GRADIENTS) if p.grad is not None else None)
            recipe.rehearse_loss(slice(0, self.share)).backward()
            done["step"] = ledger.taken()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            done["update"] = ledger.taken()
            done[BETWEEN] = [("", Parts(ledger.parts))]
            recipe.rehearse_held_out()
            done["held-out figures"] = ledger.taken()
        return done

    def make(self, loaded: LoadedModel) -> Recipe:
        """Return the recipe for a model on the meta device."""
        make: Any = self.recipe
        return make(loaded, self.settings, self.items, self.held_out)  # type: ignore[no-any-return]

    def _loaded(self, layers: int) -> LoadedModel:
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        model = on_meta(config).to(self.dtype)
        geometry, states = read_layers(model)
        device = torch.device("meta")
        context = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
        return LoadedModel(model, None, geometry, device, self.dtype, context, frozenset({0}), states=states)


def _optimiser(recipe: Recipe, settings: Settings, ledger: Ledger, *, gpu: bool) -> torch.optim.Optimizer:
    """Return the optimiser with its moments, as after a first step."""
    parameters = list(recipe.parameters().values())
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, foreach=gpu)
    for p in parameters:
        p.grad = torch.empty_like(p)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    for state in optimiser.state.values():
        ledger.name(state.values(), OPTIMISER)
    return optimiser


def _name_held(recipe: Recipe, loaded: LoadedModel, ledger: Ledger) -> None:
    """Name what the recipe holds: models beside the trained one by their attributes, and its trained tensors."""
    ledger.name(recipe.parameters().values(), TRAINED)
    for name, value in vars(recipe).items():
        if isinstance(value, nn.Module) and value is not loaded.model:
            ledger.name((*value.parameters(), *value.buffers()), name)
    ledger.name((*loaded.model.parameters(), *loaded.model.buffers()), WEIGHTS)


def _alike(loaded: LoadedModel) -> bool:
    """Return whether all decoder layers have equal attention and equal parameters."""
    geometry = {replace(g, index=0) for g in loaded.geometry}
    shapes = {tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in _layers(loaded.model)}
    return len(geometry) == 1 and len(shapes) == 1


def _layers(model: Any) -> list[nn.Module]:
    return list(text_model(model).layers)


class _marking:
    """While the block runs, begin a segment when a decoder layer is entered, forwards and backwards."""

    def __init__(self, model: Any, ledger: Ledger) -> None:
        self.layers, self.ledger = _layers(model), ledger
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        for index, layer in enumerate(self.layers):
            label = FIRST if index == 0 else LAST if index == len(self.layers) - 1 else INNER
            self.hooks.append(layer.register_forward_pre_hook(self._entering(label)))
            self.hooks.append(layer.register_forward_hook(self._leaving(label)))

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _entering(self, label: str) -> Callable[..., None]:
        return lambda *_: self.ledger.mark(label)

    def _leaving(self, label: str) -> Callable[..., None]:
        def left(module: Any, args: Any, out: Any) -> None:
            self.ledger.mark(f"after {label}")
            tensor = out[0] if isinstance(out, tuple) else out
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.ledger.mark(f"back through {label}"))

        return left


def _kinds(loaded: LoadedModel) -> Callable[[torch.Tensor], str]:
    """Return a function that names the part of a tensor, by its shape."""
    parameters = {p.shape for p in loaded.model.parameters()}
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    heads = {(g.kv_heads, size) for g in loaded.geometry for size in (g.head_dim, g.value_dim)}
    widths = {size for shape in parameters for size in shape} | {size for _, size in heads}
    widths |= {size // 2 for _, size in heads}

    def kind(tensor: torch.Tensor) -> str:
        shape = tensor.shape
        if shape in parameters:
            return COPIES
        if vocabulary in shape:
            return LOGITS
        if len(shape) == 4 and (shape[1], shape[-1]) in heads:
            return CACHE
        return ATTENTION if len(shape) > 2 and shape[-1] not in widths else ACTIVATIONS

    return kind


def _peak(segments: Sequence[tuple[str, Parts]]) -> Parts:
    return max((parts for _, parts in segments), key=lambda parts: parts.total())


def _extended(few: Sequence[tuple[str, Parts]], more: Sequence[tuple[str, Parts]], layers: int) -> list[tuple[str, Parts]]:
    """Return the segments of a model with `layers` layers.

    few, more: of models with two and with three layers.
    """
    outer = list(_without_inner(more))
    if [label for label, _ in few] != [label for label, _ in outer]:
        raise AssertionError("a rehearsal with three layers ran otherwise than one with two")
    grown = []
    for (label, small), (_, large) in zip(few, outer):
        parts = {name: small[name] + (large[name] - small[name]) * (layers - SMALLEST) for name in small | large}
        grown.append((label, Parts(parts)))
    return grown


def _without_inner(segments: Sequence[tuple[str, Parts]]) -> Iterator[tuple[str, Parts]]:
    return (segment for segment in segments if INNER not in segment[0])
