"""`--device-map auto`: which GPU holds which layers, so that a model may be larger than one GPU.

The package accelerate assigns whole layers to GPUs, in the order in which the model runs them. It also moves hidden
states from one GPU to the next. Each layer's entries are on the GPU of its weights. All GPUs get the same limit for
bytes of weights, about the smallest with which the model fits, so that GPUs of one size have about equal room for
entries. No GPU's weights take more than the share `WEIGHTS` of its memory.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.engine import memory
from kvbench.engine.attention.geometry import ProbeFailed
from kvbench.engine.attention.interface import text_model
from kvbench.engine.model.load import pick_device, refuse_kept
from kvbench.engine.model.shape import ModelShape, Part, on_meta
from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import quantised

WEIGHTS = 0.75  # largest share of a GPU's memory that weights may take; the rest is for entries
STEPS = 4  # the limit on every GPU's weights is raised by 1 / STEPS of the largest layer at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which device holds which parts of a model.

    modules: the device of each of the model's modules, by the module's name; parts: what each device holds.
    """

    modules: Mapping[str, torch.device]
    parts: tuple[Part, ...]

    def line(self) -> str:
        """Return a sentence that says how many layers each GPU holds, and that decode steps run without CUDA graph and
        compiled layers."""
        held = (f"{len(part.layers)} on {part.device}" for part in self.parts)
        return (
            f"--device-map auto: layers are divided among {len(self.parts)} GPUs ({', '.join(held)}); decode steps run "
            "without CUDA graph and compiled layers, which need a single GPU."
        )

    def dispatch(self, model: Any) -> Any:
        """Move a model's parts to their devices; return the model, which then moves its hidden states by itself."""
        from accelerate import dispatch_model

        return dispatch_model(model, dict(self.modules), skip_keys=model._skip_keys_device_placement)


def divide(config: Any, device_map: str, device: str, dtype: torch.dtype) -> Division | None:
    """Divide a model among the visible GPUs; None if `device_map` is "none" or only one GPU is visible.

    config: the model's configuration; device_map, device: the settings of these names.

    Raises, with `device_map` "auto":
        SetupError: the run uses no GPU, accelerate is not installed, or the weights are too large.
        UserError: `device` names a single GPU, or the model cannot be divided.
    """
    if device_map == "none":
        return None
    if device == "cpu" or not torch.cuda.is_available():
        raise SetupError("--device-map auto divides a model among GPUs; this run uses no GPU. Leave out --device-map.")
    if re.fullmatch(r"cuda:\d+", device):
        raise UserError(
            f"--device-map auto uses all visible GPUs, --device {device} only one. Leave one of the two out; "
            "CUDA_VISIBLE_DEVICES can limit the visible GPUs."
        )
    if torch.cuda.device_count() == 1:
        return None
    _check(config)
    return _divided(_weightless(config).to(dtype))


def with_parts(shape: ModelShape, division: Division | None) -> ModelShape:
    """Return the shape of a model, with its parts on several devices if it is divided."""
    return shape if division is None else replace(shape, parts=division.parts)


def mover(device_map: str, device: str) -> Callable[[Any], Any] | None:
    """Return a function that moves a loaded model to its devices, for the argument `move` of `load`. The result is None
    for device map "none"."""

    def move(model: Any) -> Any:
        division = divide(model.config, device_map, device, model.dtype)
        return model.to(pick_device(device)) if division is None else division.dispatch(model)

    return None if device_map == "none" else move


def _check(config: Any) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise SetupError("--device-map auto needs accelerate: pip install 'kvbench[device-map]'.")
    refuse_kept(quantised.form_of(config.to_dict()))


def _weightless(config: Any) -> Any:
    try:
        return on_meta(config)
    except ProbeFailed as error:
        raise UserError(
            f"--device-map auto cannot divide model type {quote(config.model_type)}, which cannot be built without its "
            "weights. Leave out --device-map."
        ) from error


def _divided(model: Any) -> Division:
    names = _spread(model)
    used = sorted(set(names.values()))
    devices = {index: torch.device("cuda", index) for index in used}

    def of(name: str) -> int:
        while name not in names and name:
            name = name.rpartition(".")[0]
        return names[name]

    layers, numbers = dict[int, set[int]](), dict.fromkeys(used, 0)
    for at, name in enumerate(_layers(model)):
        layers.setdefault(of(name), set()).add(at)
    for name, parameter in model.named_parameters():
        numbers[of(name)] += parameter.numel()
    parts = (
        Part(
            device=devices[index],
            layers=frozenset(layers.get(index, ())),
            parameters=numbers[index],
            memory=memory.total(devices[index]),
        )
        for index in used
    )
    return Division(modules={name: devices[index] for name, index in names.items()}, parts=tuple(parts))


def _spread(model: Any) -> dict[str, int]:
    """Return the GPU of each part of a model. Raises SetupError when the weights do not fit into the share `WEIGHTS` of
    the GPUs' memory."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    sizes, whole = compute_module_sizes(model), list(model._no_split_modules or ())
    layers = [sizes[name] for name, module in model.named_modules() if type(module).__name__ in whole] or [sizes[""]]
    single = [sizes.get(name, 0) for name, module in model.named_modules() if not any(module.children())]
    room = {i: int(WEIGHTS * memory.total(torch.device("cuda", i))) for i in range(torch.cuda.device_count())}
    most = sizes[""] // len(room)
    while True:
        share = {index: min(most, size) for index, size in room.items()}
        # accelerate leaves room on the first GPU for its largest layer, in case it must load layers from the host
        for spare in (max(layers + single), 0):
            limits = share | {0: share[0] + spare}
            found = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole)
            if _within(share, found, sizes):
                return dict(found)
        if share == room:
            raise SetupError(
                f"the weights ({sizes[''] / 2**30:.3g} GiB) do not fit into {WEIGHTS:.0%} of the memory of "
                f"{len(room)} GPUs ({sum(room.values()) / 2**30:.3g} GiB); the rest of the memory is for entries. Use "
                "more GPUs or a smaller dtype."
            )
        most += max(layers) // STEPS


def _within(share: Mapping[int, int], found: Mapping[str, int | str], sizes: Mapping[str, int]) -> bool:
    """Return whether all parts of a model are on GPUs, and no GPU holds more bytes than its share."""
    held = Counter[int | str]()
    for name, place in found.items():
        held[place] += sizes.get(name, 0)
    return all(isinstance(place, int) and size <= share[place] for place, size in held.items())


def _layers(model: Any) -> list[str]:
    """Return the names of a model's decoder layers, in order. Raises UserError when the model has no list of them."""
    inside, count = {id(m) for m in text_model(model).modules()}, model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        layers = isinstance(module, torch.nn.ModuleList) and len(module) == count and id(module) in inside
        if layers and type(module[0]).__name__ in (model._no_split_modules or ()):
            return [f"{name}.{at}" for at in range(count)]
    raise UserError(
        f"--device-map auto finds no list of layers at which it could divide model type "
        f"{quote(model.config.model_type)}. Leave out --device-map."
    )
