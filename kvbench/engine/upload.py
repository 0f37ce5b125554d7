"""Copies arrays from the host to a device; the host does not wait for the copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on the device. On a CPU both share memory: a change of one changes the other."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":  # only copies from pinned memory return at once
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def upload_ids(tokens: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return token ids as a tensor [b, t] on the device."""
    return upload(np.array(tokens, dtype=np.int64), device)
