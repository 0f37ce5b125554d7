"""Attention of prompts through the package flash-attn (`--attn flash`).

It has no masks, so it serves what has no gaps: prompts that nothing was evicted from yet, or as much of every head. All
else, decoding too, is read with SDPA as without it. Which of the two reads a block follows from the run's settings and
the block's place alone.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from kvbench.errors import SetupError, UserError

Attn = Literal["sdpa", "flash"]


def check_attn(attn: Attn, device: torch.device, dtype: torch.dtype) -> None:
    """Raises SetupError without flash-attn, UserError where it cannot compute."""
    if attn != "flash":
        return
    if importlib.util.find_spec("flash_attn") is None:
        raise SetupError("--attn flash needs the package flash-attn, which is not installed. 'sdpa' works here.")
    if device.type != "cuda" or dtype == torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--attn flash computes on CUDA in bfloat16 or float16, not on {device.type} in {name}. Use --attn sdpa."
        )


def flash_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention [b, t, Hq, D] of the newest t tokens to n rows, themselves included.

    query: [b, Hq, t, D]; keys, values: [b, Hk, n, D], by age. window: a query sees so many rows, its own included.
    """
    from flash_attn import flash_attn_func

    out: torch.Tensor = flash_attn_func(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        softmax_scale=scaling,
        causal=True,  # aligned at the last query and the last row
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out
