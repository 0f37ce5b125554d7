"""The global score of G-KV (arXiv 2512.00504, Eq. 3-5): what an entry's attention was at earlier evictions counts too.

A local score is divided by its head's maximum and merged with F', the score that the entry had at the eviction before:

    max   F_j = max(alpha F'_j, local_j)
    mean  F_j = alpha F'_j + (1 - alpha) local_j
    sum   F_j = alpha F'_j + local_j

and F_j = local_j for entries without F': the window of the eviction before and everything newer. F is stored as it is,
before any pooling or redundancy, for the entries outside the window.
"""

from __future__ import annotations

from typing import Literal

from kvbench.eviction.api import Column
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

Form = Literal["max", "mean", "sum"]

MEMORY = Column(name="memory", init=float("nan"))


def normalised(x: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Scores [b, Hk, N] divided by their maximum over the marked entries of a head; an all-zero head stays so."""
    return x / x.masked_fill(~among, 0.0).amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def merged(view: LayerView, local: torch.Tensor, form: Form, alpha: float) -> torch.Tensor:
    """F from a local score and the stored F'."""
    memory = view.columns[MEMORY.name]
    if form == "max":
        score = torch.maximum(alpha * memory, local)
    else:
        score = alpha * memory + local * (1 - alpha if form == "mean" else 1)
    return torch.where(memory.isnan(), local, score)


def stored(score: torch.Tensor, among: torch.Tensor) -> dict[str, torch.Tensor]:
    """The column to keep: F of the marked entries."""
    return {MEMORY.name: torch.where(among, score, float("nan"))}
