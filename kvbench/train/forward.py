"""One differentiable pass of a model over tokens, its attention in the hands of the caller: `plain`, or their own."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine.attention import AttentionCall, Handler, causal_bias, grouped_attention, route


def forward(
    model: Any, handler: Handler, *, start: int = 0, logits: int = 1, hidden: bool = False, **inputs: torch.Tensor
) -> torch.Tensor:
    """Logits [b, `logits`, V] of the newest rows; 0 asks for those of all rows.

    Args:
        handler: answers every layer's attention, as in `kvbench.engine.attention.route`.
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


def plain(call: AttentionCall) -> torch.Tensor:
    """[b, T, Hq, Dv] attention as the model has it."""
    positions = torch.arange(call.key.shape[2], device=call.key.device)
    bias = causal_bias(positions, positions, call.window, call.query.dtype)[None, None]
    return grouped_attention(
        call.query, call.key, call.value, bias, scaling=call.scaling, softcap=call.softcap, sinks=call.sinks
    )
