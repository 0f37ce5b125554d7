"""The bytes that a model's vision part holds while it reads images, found without weights.

The vision part runs on the meta device, on tensors of the images' shapes. Only the grids (`GRIDS`) stay on the CPU,
because the model's code reads from them how many patches an image has. An operation on tensors of both devices runs on
the meta device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.engine.model.activations import LiveBytes

SIZES = "kvbench_sizes"  # name of an attention function that returns uninitialised outputs
GRIDS = ("image_grid_thw", "image_sizes", "batch_num_images")  # inputs whose numbers the model's code reads


def tower_bytes(model: Any, read: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Return the most bytes that the vision part holds while it reads images, and the bytes that it holds afterwards.

    Both numbers include the bytes of `read`. model: on the meta device, in the run's dtype; read: the model's inputs
    for the images, by name.

    Attention counts only with its output, because the kernels that transformers uses by default store no attention
    weights.
    """
    like = {"device": "meta", "dtype": model.dtype}
    given = {name: value if name in GRIDS else torch.empty(value.shape, **like) for name, value in read.items()}
    own = sum(value.nbytes for value in given.values())
    with _no_values(model), torch.inference_mode(), _MixedBytes({}) as live:
        features = model.model.get_image_features(**given)
    left = live.now
    del features  # only now, as in the model's own pass
    return own + live.peak, own + left


class _MixedBytes(LiveBytes):
    """Counts bytes as `LiveBytes` does. In an operation on CPU and meta tensors, CPU tensors become meta tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if len(places) > 1:
            args, kwargs = tree_map(_moved, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _moved(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _no_values(model: Any) -> Iterator[None]:
    """Inside the `with` block, the attention of all parts of a model only allocates its outputs."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [config._attn_implementation for config in configs]
    ALL_ATTENTION_FUNCTIONS.register(SIZES, _empty)
    try:
        for config in configs:
            config._attn_implementation = SIZES
        yield
    finally:
        for config, name in zip(configs, before):
            config._attn_implementation = name
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(SIZES, None)


def _empty(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    b, heads, t, _ = query.shape
    return value.new_empty(b, t, heads, value.shape[-1]), None
