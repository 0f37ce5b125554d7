"""A differentiable forward pass whose attention the caller computes, and a helper that computes attention in blocks.

Letters: b sequences, n tokens, Hq query heads, D hidden size, Dv size of a value, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from kvbench.engine.attention.interface import AttentionCall, Handler, route

ROWS = 1024  # queries per attention call
# Calls a function, and again in the backward pass instead of keeping activations. The functions draw no random numbers,
# so no generator's state is kept.
recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def forward(
    model: Any, handler: Handler, *, start: int = 0, logits: int = 1, hidden: bool = False, **inputs: torch.Tensor
) -> torch.Tensor:
    """Run a differentiable forward pass; return the logits [b, `logits`, V] of the last tokens (logits=0: of all).

    Args:
        handler: computes every layer's attention, as in `kvbench.engine.attention.interface.route`.
        start: position of the first token.
        hidden: True if the handler also needs the hidden states that each layer's attention reads.
        inputs: the tokens as input_ids [b, n], or their embeddings as inputs_embeds [b, n, D].
    """
    with route(model, handler, hidden):
        return run_from(model, start, logits, inputs).logits


def run_from(model: Any, start: int, logits: int, inputs: Mapping[str, torch.Tensor]) -> Any:
    """Run a forward pass over tokens from position `start` on, without a cache; return the model's output. logits: how
    many of the last tokens get logits; 0: all."""
    rows = next(iter(inputs.values()))
    positions = torch.arange(start, start + rows.shape[1], device=rows.device)[None]
    return model(
        **inputs,
        position_ids=positions.expand(rows.shape[0], -1),
        attention_mask=None,
        past_key_values=None,
        use_cache=False,
        logits_to_keep=logits,
    )


def in_blocks(call: AttentionCall, attend_block: Attend, rows: int = ROWS) -> torch.Tensor:
    """Return the attention output [b, n, Hq, Dv] of a whole sequence, computed in blocks of `rows` queries.

    attend_block: returns the output of one block. Its arguments: the position of the block's first query; the block's
    queries; all keys and all values up to the block's last query. If there are several blocks, the backward pass
    recomputes each of them, so that memory holds the attention weights of one block only.
    """
    n = call.key.shape[2]
    again = n > rows and torch.is_grad_enabled()
    parts = []
    for first in range(0, n, rows):
        last = min(first + rows, n)
        tensors = call.query[:, :, first:last], call.key[:, :, :last], call.value[:, :, :last]
        block = partial(attend_block, first)
        parts.append(recompute(block, *tensors) if again else block(*tensors))
    return torch.cat(parts, dim=1)
