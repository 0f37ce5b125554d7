"""AdamW in float32 whose state is divided equally among the processes of a training (ZeRO, arXiv 1910.02054, stage 1).

Every process holds all parameters, in the model's dtype. Each parameter, flattened, is divided into N parts for N
processes; the lengths of the parts differ by at most 1. Process r holds the r-th part in float32, with the two moments
of its gradient, and updates it; then the processes exchange the updated parts. Small updates, which bfloat16 would
round away, therefore add up in the float32 parts. A float32 parameter needs no copy: the part is a view of the
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from kvbench.errors import SetupError
from kvbench.train.processes import Processes

BETA1, EPSILON = 0.9, 1e-8


@dataclass(frozen=True, slots=True)
class Part:
    """This process's part of a flattened parameter, in float32, and the two moments of its gradient."""

    parameter: torch.Tensor
    exp_avg: torch.Tensor  # mean of gradients
    exp_avg_sq: torch.Tensor  # mean of squared gradients

    @classmethod
    def of(cls, row: torch.Tensor) -> Part:
        row = row.float()  # float32: the same memory; other dtypes: a copy
        return cls(row, torch.zeros_like(row), torch.zeros_like(row))


KINDS = tuple(Part.__dataclass_fields__)  # the tensors that a checkpoint holds for every parameter


class ShardedAdamW:
    """AdamW (arXiv 1711.05101) over named parameters.

    All processes must call `step`, `stored` and `restore` together, with the same parameters in the same order.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], processes: Processes, *, beta2: float, weight_decay: float
    ) -> None:
        self.processes, self.beta2, self.weight_decay, self.steps = processes, beta2, weight_decay, 0
        self.parameters = dict(parameters)
        for p in self.parameters.values():
            p.data = p.data.contiguous()
        self.parts = {name: Part.of(self._own(p)) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, lr: float, clip: float) -> float:
        """Average the gradients over the processes, clip their norm, update all parameters, and drop the gradients.

        A parameter without a gradient counts as one with gradient 0. Returns the norm of the averaged gradient before
        clipping. If this norm is not finite, raises SetupError and changes no parameter.
        """
        taken = {name: self._take_gradient(p) for name, p in self.parameters.items()}
        norm = float(torch.stack([norm.cpu() for _, norm in taken.values()]).norm())
        self.steps += 1
        if not math.isfinite(norm):
            raise SetupError(f"the norm of the gradient is {norm} at step {self.steps}; try a smaller --lr.")
        factor = min(1.0, clip / (norm + 1e-6))
        for name, p in self.parameters.items():
            gradient, _ = taken.pop(name)
            self._update(self.parts[name], gradient.mul_(factor), lr)
            self._own(p).copy_(self.parts[name].parameter)
            self.processes.share_parts(p.detach().view(-1))
        return norm

    def stored(self) -> Iterator[tuple[str, torch.Size, torch.Tensor]]:
        """Yield the name, the whole shape, and this process's part of every tensor of a checkpoint."""
        for name, part in self.parts.items():
            for kind in KINDS:
                yield f"{kind}/{name}", self.parameters[name].shape, getattr(part, kind)

    @torch.no_grad()
    def restore(self, whole: Callable[[str], torch.Tensor], steps: int) -> None:
        """Load a checkpoint that was written after `steps` steps, by any number of processes.

        whole: returns a whole tensor of the checkpoint by its name in `stored`. Raises ValueError if a tensor and its
        parameter have different shapes.
        """
        self.steps = steps
        for name, p in self.parameters.items():
            for kind in KINDS:
                tensor = whole(f"{kind}/{name}")
                if tensor.shape != p.shape:
                    raise ValueError(f"tensor {kind}/{name} has the shape {list(tensor.shape)}, not {list(p.shape)}")
                if kind == "parameter":
                    p.copy_(tensor)
                getattr(self.parts[name], kind).copy_(self._own(tensor))

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a contiguous tensor, as a view."""
        return tensor.detach().view(-1)[self.processes.part(tensor.numel())]

    def _take_gradient(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Remove a parameter's gradient and average it over the processes. Return this process's part of the averaged
        gradient, and the norm of the whole averaged gradient."""
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = None
        gradient = gradient.float().contiguous()
        self.processes.average(gradient)
        own = self._own(gradient)
        return own.clone() if len(own) < gradient.numel() else own, gradient.norm()

    def _update(self, part: Part, gradient: torch.Tensor, lr: float) -> None:
        part.exp_avg.lerp_(gradient, 1 - BETA1)
        part.exp_avg_sq.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        scale = (part.exp_avg_sq / (1 - self.beta2**self.steps)).sqrt_().add_(EPSILON)
        part.parameter.mul_(1 - lr * self.weight_decay)
        part.parameter.addcdiv_(part.exp_avg, scale, value=-lr / (1 - BETA1**self.steps))
