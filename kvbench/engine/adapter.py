"""A low-rank adapter (LoRA), which is active only while the model reads a probe.

    with adapted(model, weights):
        model(inputs_embeds=...)

Inside the `with` block, each linear layer that the adapter names computes W x + scaling B A x, where W is the layer's
weight.

An adapter of rank r has the tensors ``A.<layer>.<projection>`` [r, in], ``B.<layer>.<projection>`` [out, r] and
``scaling`` [1]. For example, ``A.3.q_proj`` belongs to the query projection of layer 3. Hu et al., LoRA,
arXiv 2106.09685. kvbench does not use peft here, because peft modifies the model: the prompt's keys and values must
stay bit-equal to those of the unmodified model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from kvbench.engine.attention.interface import text_model
from kvbench.errors import SetupError, quote


def projections(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that an adapter may name: those inside the decoder's layers, in the model's order.

    The keys are ``<layer>.<name>``, where the name is the last part of the linear layer's name in the model. If a
    decoder layer has several of one name, the last of them has this key; the keys of the others have the whole path
    inside the decoder layer, for example ``3.self_attn.gate_proj``.
    """
    found: dict[str, torch.nn.Linear] = {}
    for layer, decoder_layer in reversed(list(enumerate(_decoder_layers(model)))):
        for path, module in reversed(list(_linears(decoder_layer))):
            short = f"{layer}.{path.rpartition('.')[2]}"
            found[f"{layer}.{path}" if short in found else short] = module
    return dict(reversed(found.items()))


def _decoder_layers(model: Any) -> Iterable[torch.nn.Module]:
    count = model.config.get_text_config().num_hidden_layers
    stacks = (m for m in text_model(model).modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count)
    return next(stacks, ())


def _linears(layer: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers inside a decoder layer, each with its path.

    Three kinds are left out: a module inside a linear layer, because in a training peft's linear layer holds the
    model's linear layer; a layer whose weight holds the matrices of several experts; and a router of experts, because
    some routers are linear layers that return several tensors.
    """
    inside: list[str] = []
    for path, module in layer.named_modules():
        linear = hasattr(module, "in_features")  # nn.Linear, a quantised layer, or peft's
        experts = getattr(getattr(module, "weight", None), "ndim", 0) == 3  # the matrices of several experts in one
        if linear and not experts and not path.startswith(tuple(inside)):
            inside.append(f"{path}.")
            if "Router" not in type(getattr(module, "base_layer", module)).__name__:  # base_layer: of peft's layer
                yield path, module


def fit_adapter(shapes: Mapping[str, tuple[int, ...]], model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, corrected so that they fit the linear layers of `model`.

    `shapes` was derived from the model's configuration alone. The result leaves out projections that the model lacks,
    for example attention projections in layers without attention. The widths come from the model's layers, because
    `shapes` has wrong widths if attention has an output gate.
    """
    places = projections(model)
    fitted: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        part, _, place = name.partition(".")
        if part not in ("A", "B"):
            fitted[name] = shape
        elif (module := places.get(place)) is not None:
            fitted[name] = (shape[0], module.in_features) if part == "A" else (module.out_features, shape[1])
    return fitted


@contextlib.contextmanager
def adapted(model: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Apply an adapter in every forward pass inside the `with` block.

    weights: the adapter's tensors, named as the module's docstring says. Raises SetupError when the adapter names a
    layer that the model lacks, or has tensors that do not fit the layer's shape.
    """
    places = projections(model)
    hooks = []
    try:
        for name in (key[2:] for key in weights if key.startswith("A.")):
            module = places.get(name)
            if module is None:
                raise SetupError(
                    f"the method's adapter changes the linear layer {quote(name)}, which this model does not have. "
                    "Use weights that were trained for this model."
                )
            a, b = weights[f"A.{name}"], weights[f"B.{name}"]
            if (a.shape[1], b.shape[0]) != (module.in_features, module.out_features):
                ours, theirs = [module.in_features, module.out_features], [a.shape[1], b.shape[0]]
                raise SetupError(
                    f"the method's adapter of layer {quote(name)} maps {theirs[0]} to {theirs[1]} features, but the "
                    f"model's layer maps {ours[0]} to {ours[1]}. Use weights that were trained for this model."
                )
            where = next(chain(module.parameters(), module.buffers()), a).device  # quantised layers have buffers
            hooks.append(module.register_forward_hook(_add(*(x.to(where) for x in (a, b, weights["scaling"])))))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(a: torch.Tensor, b: torch.Tensor, scaling: torch.Tensor) -> Any:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].to(a.dtype)
        return output + (scaling * (x @ a.T @ b.T)).to(output.dtype)

    return hook
