"""Experts on a CPU whose results for a token do not depend on the other tokens of a decode step.

A mixture of experts multiplies the tokens of each expert with the expert's weights in one product. In float32, the last
bits of a row depend on the number of rows in the product: a product of 1 to 3 rows adds the terms of a number in
another order than a larger product, and several threads divide the work by the number of rows. So rows of zeros fill
the smaller products. torch's product of bfloat16 experts gives a row the same bits for any number of rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvbench.engine.model.packing import replaced

FEWEST_ROWS = 4  # on one thread, products of as many or more rows give a row the same bits


@contextlib.contextmanager
def filled_experts(model: Any, slots: int) -> Iterator[int]:
    """Inside the `with` block, add rows of zeros to the matrix products of a float32 model's experts on a CPU, in
    passes over `slots` tokens.

    On one thread each product gets at least min(`FEWEST_ROWS`, `slots`) rows, on several threads exactly `slots` rows.
    Yields the number of layers that are changed: 0 for other models and devices, and for one slot. Experts outside
    transformers' interface for experts stay as they are.
    """
    first = next(model.parameters(), None)
    fills = slots > 1 and first is not None and first.device.type == "cpu" and first.dtype == torch.float32
    layers = [module for module in model.modules() if fills and hasattr(module, "is_transposed")]
    with replaced({layer: _filled(layer.forward, slots) for layer in layers}):
        yield len(layers)


def _filled(forward: Callable[..., torch.Tensor], slots: int) -> Callable[..., torch.Tensor]:
    def filled(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        tokens, k = top_k_index.shape
        if tokens != slots:  # the pass reads a single prompt
            return forward(hidden_states, top_k_index, top_k_weights)
        experts, weights = top_k_index.flatten(), top_k_weights.flatten()
        counts = experts.bincount()
        fewest = min(FEWEST_ROWS, slots) if torch.get_num_threads() == 1 else slots
        missing = torch.where(counts > 0, fewest - counts, 0).clamp(min=0)
        added = torch.arange(len(counts)).repeat_interleave(missing).to(experts.dtype)
        rows = hidden_states.repeat_interleave(k, dim=0)  # one row per token and expert, so that k is 1
        out = forward(
            torch.cat([rows, rows.new_zeros(len(added), rows.shape[1])]),
            torch.cat([experts, added])[:, None],
            torch.cat([weights, weights.new_zeros(len(added))])[:, None],
        )
        return out[: tokens * k].view(tokens, k, -1).sum(dim=1)

    return filled
