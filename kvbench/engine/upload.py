"""Copies arrays from the host to a device; the host does not wait for the copy."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on the device. On a CPU the tensor shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":  # only copies from pinned memory return at once
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
