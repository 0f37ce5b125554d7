"""Counts the memory of a training on one device from the model's configuration, before weights are loaded.

The recipe's own code runs on the meta device (`kvbench.train.rehearsal`): its set-up; the loss and the backward pass
for a batch of the longest items; the update by the optimiser; the held-out figures.

For a model with more than three decoder layers, all alike, the code runs with two layers and with three. The borders
of the layers divide the computation into segments (`kvbench.train.layer_marks`). In every segment, the bytes are a
constant plus a multiple of the number of layers. So the bytes for the whole model follow from these two rehearsals. For
any other model, the code runs with all layers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvbench.engine import memory
from kvbench.engine.meta import Answers, MetaBytes
from kvbench.engine.model.load import LoadedModel, pick_device
from kvbench.engine.model.shape import ModelShape, on_meta, shape_of_model
from kvbench.eviction.checks import unread
from kvbench.eviction.planned_device import planned_for
from kvbench.sources.models import context_of
from kvbench.train.generation_memory import Generation, fitting, parts
from kvbench.train.layer_marks import INNER, layers_of, marked
from kvbench.train.optimiser import ShardedAdamW
from kvbench.train.processes import Processes
from kvbench.train.recipe import Recipe, Settings
from kvbench.train.rehearsal import Ledger, Parts, Segment, part_by_shape

WEIGHTS, TRAINED, GRADIENTS = "weights", "trained tensors", "gradients"
MOMENTS, MASTERS = "optimiser's moments", "float32 copies of weights"
SETTING_UP, STEP, UPDATE, HELD_OUT = "setting up", "step", "update", "held-out figures"
IDLE = "between steps"
STORED = "items in memory"
UNEVEN = 0.01  # after extrapolation to all layers, a part may be negative by this share of the peak
FEWEST = 2  # layers of the smallest rehearsal: a first and a last layer
CHARACTERS = 4  # estimated characters per token
ROOM = 4096  # if the items of a call of the loss have more tokens, only two of these items are rehearsed


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a training: its name, the parts of memory at its peak (bytes by part), and a note for the plan.

    The property `bytes` is the sum over the parts.
    """

    name: str
    parts: Parts
    note: str = ""

    @property
    def bytes(self) -> int:
        return self.parts.total()


@dataclass(frozen=True, slots=True)
class _Run:
    """The results of one rehearsal: the memory in each phase, segment by segment; the recipe's `generations`; the
    weights' dtype; and the number of items whose tensors the recipe stored."""

    segments: dict[str, list[Segment]]
    generations: Sequence[Generation]
    dtype: torch.dtype
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device for which a training is planned: GPU or CPU, and the bytes of its memory.

    processes: how many processes train, each on its own device of this kind.
    """

    gpu: bool
    total: int
    processes: int = 1

    @classmethod
    def of(cls, name: str, total: int | None, processes: int) -> Device:
        """Return the device called `name` (as in --device), or a GPU with `total` bytes of memory if `total` is given.
        Such a GPU need not exist on this machine."""
        if total is not None:
            return cls(gpu=True, total=total, processes=processes)
        device = pick_device(name)
        return cls(gpu=device.type == "cuda", total=memory.total(device), processes=processes)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda" if self.gpu else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Counts the memory of one training by running the recipe's code on the meta device.

    Attributes:
        recipe: the recipe's class; config: the model's configuration; settings: the training's settings.
        items, held_out: a few made-up items to train on and to hold out, each as long as the longest real one.
        count: how many items the real training has, including those that it holds out.
        longest: tokens of each item in `items`; a question counts with its longest answer.
        dtype: dtype of the loaded weights; device: the device for which to count.
    """

    recipe: type[Recipe]
    config: Any
    settings: Settings
    items: Sequence[Any]
    held_out: Sequence[Any]
    count: int
    longest: int
    dtype: torch.dtype
    device: Device

    def phases(self) -> list[Phase]:
        """Return the phases of the training, including those in which it generates answers, but without the collection
        of answers before the training."""
        layers = int(self.config.get_text_config().num_hidden_layers)
        whole = self._loaded(layers)
        if _loops_over_experts(whole.model):
            raise ArithmeticError(
                "the model computes one expert after another, and how many tokens an expert reads depends on values"
            )
        if layers <= FEWEST + 1 or not _alike(whole):
            few = self._run(layers)
            runs = few.segments
        else:
            few, more = self._run(FEWEST), self._run(FEWEST + 1)
            runs = {name: _extended(few.segments[name], more.segments[name], layers) for name in few.segments}
        peaks = {name: max((s.peak for s in run), key=lambda p: p.total()) for name, run in runs.items()}
        for name, peak in peaks.items():
            if min(peak.values(), default=0) < -UNEVEN * peak.total():
                raise ArithmeticError(
                    f"the memory of phase {name!r} cannot be extrapolated from few layers: it does not grow linearly "
                    "with the number of layers"
                )
        each = peaks[IDLE][STORED] // max(1, few.stored)
        peaks = {name: self._all_stored(name, peak, each) for name, peak in peaks.items()}
        idle = peaks.pop(IDLE)
        generated = [self._generation(g, whole.model, few.dtype, idle) for g in few.generations]
        return [*(Phase(name, peak) for name, peak in peaks.items()), *generated]

    def _all_stored(self, phase: str, peak: Parts, each: int) -> Parts:
        """Return a phase's peak with as many stored items as the real training keeps.

        The rehearsal stores only its few items. The real training stores as many of its items as fit into
        `Recipe.stores` bytes; any other item is in memory only while it is used. peak: the rehearsal's bytes by part.
        each: stored bytes of one item.
        """
        if not each:
            return peak
        kept = min(self.count, self.recipe.stores // each)
        used = kept < self.count and phase not in (UPDATE, IDLE) and peak[STORED] > 0
        return Parts({**peak, STORED: (kept + used) * each})

    def _generation(self, generation: Generation, model: Any, dtype: torch.dtype, held: Parts) -> Phase:
        """Return the phase in which the engine generates with `generation.slots` slots. held: bytes, by part, that the
        training holds at the same time."""
        need = generation.need(_shape(model), self.device.torch_device, dtype, self.device.total)
        return Phase(generation.phase, held + parts(need, generation.slots), f"{generation.slots} slots")

    def collecting(self, generation: Generation) -> Phase:
        """Return the phase in which answers are collected, with as many of `generation.slots` slots as fit."""
        model = self._loaded(int(self.config.get_text_config().num_hidden_layers)).model
        need = generation.need(_shape(model), self.device.torch_device, self.dtype, self.device.total)
        slots = fitting(need, generation.slots, self.device.total, self.device.torch_device)
        note = f"{slots} slots" + (f", as many of {generation.slots} as fit" if slots < generation.slots else "")
        return Phase(generation.phase, Parts({WEIGHTS: need.weights}) + parts(need, slots), note)

    def _run(self, layers: int) -> _Run:
        """Rehearse the training of the model with only this number of decoder layers."""
        loaded = self._loaded(layers)
        ledger = Ledger(part_by_shape(loaded), self.recipe.answers(self.settings, self.longest))
        done: dict[str, list[Segment]] = {}
        with unread(), planned_for(gpu=self.device.gpu), ledger, marked(loaded.model, ledger):
            ledger.name((*loaded.model.parameters(), *loaded.model.buffers()), WEIGHTS)
            make: Any = type(self.recipe.__name__, (self.recipe,), {"stores": sys.maxsize})
            recipe: Recipe = make(loaded, self.settings, self.items, self.held_out)
            _name_held(recipe, loaded, ledger)
            _name_stored(recipe, ledger)
            done[SETTING_UP] = ledger.taken()
            optimiser = self._optimiser(recipe, ledger)
            for share in self._shares(recipe):
                recipe.rehearse_loss(share).backward()
            _name_stored(recipe, ledger)
            done[STEP] = ledger.taken()
            optimiser.step(self.settings.lr, self.settings.clip)
            done[UPDATE] = ledger.taken()
            done[IDLE] = [Segment("", [Parts(ledger.parts)])]
            recipe.rehearse_held_out()
            done[HELD_OUT] = ledger.taken()
        dtype = next(loaded.model.parameters()).dtype
        return _Run(done, recipe.generations(), dtype, len(recipe.stored()))

    def _optimiser(self, recipe: Recipe, ledger: Ledger) -> ShardedAdamW:
        parameters = recipe.parameters()
        how = {"beta2": self.settings.beta2, "weight_decay": self.settings.weight_decay}
        optimiser = ShardedAdamW(parameters, _Alone(self.device.processes), **how)
        for name, part in optimiser.parts.items():
            ledger.name((part.exp_avg, part.exp_avg_sq), MOMENTS)
            if parameters[name].dtype != torch.float32:  # else a view
                ledger.name([part.parameter], MASTERS)
            parameters[name].register_post_accumulate_grad_hook(lambda p: ledger.name([p.grad], GRADIENTS))
        return optimiser

    def _shares(self, recipe: Recipe) -> list[slice]:
        """Return which items of a batch each call of the loss gets in the rehearsal: one slice per call.

        The rehearsal must show which tensors of one call, or of one item, stay in memory while the next call or item is
        computed. Two calls, and two items in each, are enough for that. So the rehearsal makes at most two calls. A
        call gets all its items if these have at most `ROOM` tokens together, else at most two of them.
        """
        whole = self.settings.batch // self.device.processes
        once = min(recipe.at_once or whole, whole)
        size = once if once * self.longest <= ROOM else min(once, 2)
        return [slice(0, size), slice(size, 2 * size)][: 1 if once == whole else 2]

    def _loaded(self, layers: int) -> LoadedModel:
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        model = on_meta(config).to(self.dtype)
        shape, device, context = _shape(model), torch.device("meta"), context_of(config)
        return LoadedModel(
            *(model, _Tokenizer(), shape.geometry, device, self.dtype, context, frozenset({0})), states=shape.states
        )


@dataclass(frozen=True, slots=True)
class _Alone(Processes):
    """Stands in for one of several processes: it holds its part of each tensor, and exchanges nothing with others."""

    def average(self, tensor: torch.Tensor) -> None:
        return None

    def share_parts(self, row: torch.Tensor) -> None:
        return None


class _Tokenizer:
    """Stands in for a tokenizer: returns about as many tokens as a text would have, all with the id 0."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * max(1, len(text) // CHARACTERS)}


def _shape(model: Any) -> ModelShape:
    """Return the shape of a model on the meta device. `MetaBytes` runs what this device refuses: products of float32
    experts, and code that reads values."""
    with MetaBytes(Answers()):
        return shape_of_model(model)


def _name_held(recipe: Recipe, loaded: LoadedModel, ledger: Ledger) -> None:
    """Tell the ledger to which part of memory each tensor belongs. Trained tensors outside the model are one part, and
    the model's weights, trained or not, are another. Each further model that the recipe holds is a part of its own,
    named after the recipe's attribute that holds this model."""
    ledger.name(recipe.parameters().values(), TRAINED)
    for name, value in vars(recipe).items():
        if isinstance(value, nn.Module):
            ledger.name((*value.parameters(), *value.buffers()), name)
    ledger.name((*loaded.model.parameters(), *loaded.model.buffers()), WEIGHTS)


def _name_stored(recipe: Recipe, ledger: Ledger) -> None:
    ledger.name((tensor for tensors in recipe.stored().values() for tensor in tensors), STORED)


def _alike(loaded: LoadedModel) -> bool:
    """Return whether all decoder layers have equal attention and equal parameters."""
    geometry = {replace(g, index=0) for g in loaded.geometry}
    shapes = {tuple((name, p.shape) for name, p in layer.named_parameters()) for layer in layers_of(loaded.model)}
    return len(geometry) == 1 and len(shapes) == 1


def _loops_over_experts(model: nn.Module) -> bool:
    """Return whether the model has experts outside transformers' interface for experts (`is_transposed`)."""
    return any(
        name.endswith(".experts") and not hasattr(module, "is_transposed") for name, module in model.named_modules()
    )


def _extended(few: Sequence[Segment], more: Sequence[Segment], layers: int) -> list[Segment]:
    """Return the memory of the whole model, segment by segment, extrapolated from two rehearsals. few: the segments of
    the rehearsal with two layers. more: those with three. layers: the whole model's layers."""

    def grown(small: Parts, large: Parts) -> Parts:
        sizes = {n: small[n] + (large[n] - small[n]) * (layers - FEWEST) for n in small | large}
        return Parts(sizes)

    def points(small: Segment, large: Segment) -> Iterator[tuple[Parts, Parts]]:
        if len(small.points) == len(large.points):
            return zip(small.points, large.points)
        return iter([(small.peak, large.peak)])  # the code looped over layers: only peaks compare

    # inner layers need no more memory than the first or last one
    outer = (segment for segment in more if not segment.label.endswith(INNER))
    pairs = zip(few, outer, strict=True)
    return [Segment(small.label, [grown(*point) for point in points(small, large)]) for small, large in pairs]
