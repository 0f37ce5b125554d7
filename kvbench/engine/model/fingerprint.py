"""A hash over some numbers of each parameter. It distinguishes models of equal shape, so that weights trained for one
model are not used with another."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLE = 64  # numbers hashed per tensor


def fingerprint(model: Any) -> str | None:
    """Return the SHA-256 over evenly spaced elements of every parameter, rounded to bfloat16.

    A checkpoint has the same fingerprint in float32 and bfloat16, on any device, with any tensor names. Returns None if
    the model in memory would get another fingerprint than its checkpoint: float16 rounds small numbers differently from
    bfloat16, and quantised or offloaded tensors do not hold the stored numbers.
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
