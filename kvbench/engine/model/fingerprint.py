"""Tells models of equal sizes apart by their parameters, so that what was trained for one is not used with another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLE = 64  # numbers of each tensor


def fingerprint(model: Any) -> str | None:
    """SHA-256 over evenly spaced numbers of every parameter, rounded to bfloat16.

    The same for a checkpoint loaded in float32 or bfloat16, on any device, whatever its tensors are called. None where
    that cannot be said: float16 loses small numbers otherwise than bfloat16 does, and quantised or offloaded tensors
    are not what was stored.
    """
    digests = []
    for parameter in model.parameters():
        plain = type(parameter.data) is torch.Tensor and not parameter.is_meta
        if not plain or parameter.dtype not in (torch.float32, torch.bfloat16):
            return None
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE]
        digests.append(hashlib.sha256(some.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes()).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
