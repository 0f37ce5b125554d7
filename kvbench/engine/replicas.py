"""Copies of one tensor on the devices of a model that is divided among several, each made on first use."""

from __future__ import annotations

import torch


class Replicas:
    """A tensor on the model's first device, and its copies on the devices of further layers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copies = {tensor.device: tensor}
        self._tensor = tensor

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the tensor if it is on `device`, else its copy there. Later changes of the tensor do not change the
        copy."""
        if device not in self._copies:
            self._copies[device] = self._tensor.to(device)
        return self._copies[device]
