"""Capacity loss of retention gates: by how much the entries, weighted by their decay beta^age, exceed a budget.

TRIM-KV (arXiv 2512.03324) compares the entries of each layer and head with a budget of M. Global retention (arXiv
2605.09649) adds up the entries of all L layers and Hk heads, and compares the sum with M L Hk.
"""

from __future__ import annotations

from typing import Literal

from kvbench.eviction.terms.retention import occupancy
from kvbench.lazy import torch

Hinge = Literal["released", "paper"]


def capacity_loss(
    log_beta: torch.Tensor, budget: int, *, over: Literal["head", "model"], hinge: Hinge = "released"
) -> torch.Tensor:
    """Return by how much the decayed entries exceed a budget, [b], between 0 and 1.

    h heads share a budget of h M entries: over="head" means h = 1, over="model" means h = L Hk. A_t is the sum of the
    decays of these heads' entries at time t (`occupancy`). `hinge` chooses the formula:

        released   mean over positive terms of  max(0, A_t - h M) / max(1, h t - h M)
        paper      mean over all terms of       max(0, A_t - h M) / (h t)

    There is one term for each time t and, with h = 1, also for each layer and head. "paper" is the formula of both
    papers, "released" that of the released code.

    log_beta: [b, L, Hk, T]; budget: M, entries of one layer and KV head.
    """
    alive = occupancy(log_beta)  # [b, L, Hk, T]
    heads = 1
    if over == "model":
        heads = alive.shape[1] * alive.shape[2]
        alive = alive.sum(dim=(1, 2))  # [b, T]
    seen = torch.arange(1, alive.shape[-1] + 1, device=alive.device)
    excess = (alive - heads * budget).relu()
    if hinge == "paper":
        return (excess / (heads * seen)).flatten(1).mean(dim=-1)
    share = (excess / (heads * (seen - budget)).clamp_min(1)).flatten(1)
    return share.sum(dim=-1) / (share > 0).sum(dim=-1).clamp_min(1)
