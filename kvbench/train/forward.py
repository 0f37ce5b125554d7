"""One differentiable pass of a model over tokens, its attention in the hands of the caller: `plain`, or their own."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine.attention.interface import Handler, route
from kvbench.train.sparse_masks import SparseAttention

plain = SparseAttention({})  # a handler: attention as the model has it, with its windows


def forward(
    model: Any, handler: Handler, *, start: int = 0, logits: int = 1, hidden: bool = False, **inputs: torch.Tensor
) -> torch.Tensor:
    """Logits [b, `logits`, V] of the newest rows; 0 asks for those of all rows.

    Args:
        handler: answers every layer's attention, as in `kvbench.engine.attention.interface.route`.
        start: position of the first row.
        hidden: whether the handler also sees what each layer's attention reads.
        inputs: input_ids [b, n] or inputs_embeds [b, n, D].
    """
    rows = next(iter(inputs.values()))
    positions = torch.arange(start, start + rows.shape[1], device=rows.device)[None]
    with route(model, handler, hidden):
        out = model(
            **inputs,
            position_ids=positions.expand(rows.shape[0], -1),
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=logits,
        )
    return out.logits
