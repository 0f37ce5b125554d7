"""Attention of prompts through the package flash-attn (`--attn flash`).

flash-attn takes no mask, so the engine uses it only in layers whose heads hold equally many entries. It is not used

- while decoding,
- in layers with attention sinks,
- in layers whose keys and values have different dimensions,
- in layers with a sliding window, once entries were dropped.

Wherever flash-attn is not used, the engine uses its own attention (`grouped`, `kernels`). The choice for a block of
tokens depends on the settings and the prompt, never on other prompts.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from kvbench.errors import SetupError, UserError

Attn = Literal["sdpa", "flash"]


def check_attn(attn: Attn, device: torch.device, dtype: torch.dtype) -> None:
    """Check `--attn flash`; any other `attn` passes. Raises SetupError if flash-attn is not installed, UserError if it
    does not support the device or dtype."""
    if attn != "flash":
        return
    if importlib.util.find_spec("flash_attn") is None:
        raise SetupError("--attn flash needs the package flash-attn, which is not installed. Use --attn sdpa.")
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
    """Return the causal attention [b, t, Hq, D] of the newest t tokens to the n entries of each head.

    query: [b, Hq, t, D]; keys, values: [b, Hk, n, D], oldest first; the last t entries are those of the t tokens.
    window: a query sees at most this many entries, the entry of its own token included; None: no limit.
    """
    from flash_attn import flash_attn_func

    return flash_attn_func(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        softmax_scale=scaling,
        causal=True,  # flash-attn lets the last query see the last entry
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
