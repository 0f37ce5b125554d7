"""Splits a total over layers and heads into whole numbers that sum to it exactly."""

from __future__ import annotations

from kvbench.lazy import torch


def split_exactly(
    ideal: torch.Tensor, total: torch.Tensor | int, low: torch.Tensor | int, high: torch.Tensor | int
) -> torch.Tensor:
    """Return integers near `ideal`, each within [low, high], that sum to `total` along axis 1 (largest remainder).

    Args:
        ideal: [b, n] float shares. If their sum differs from `total`, the difference is spread evenly over the shares
            that are not at their bound. Of equal remainders the earlier one is rounded up first.
        total: [b] or one number; clipped to the sums of the bounds.
        low, high: [b, n] or numbers.
    """
    ideal = ideal.double()
    low = torch.as_tensor(low, device=ideal.device).expand(ideal.shape).long()
    high = torch.maximum(torch.as_tensor(high, device=ideal.device).expand(ideal.shape).long(), low)
    total = torch.as_tensor(total, device=ideal.device).expand(ideal.shape[:1]).long()
    total = torch.minimum(torch.maximum(total, low.sum(-1)), high.sum(-1))
    share = ideal.clamp(low, high)
    for _ in range(ideal.shape[-1]):  # each round fills or empties at least one member, or meets the total
        gap = total.double() - share.sum(-1)
        room = torch.where(gap[:, None] > 0, share < high, share > low)
        members = room.sum(-1).clamp(min=1)
        share = torch.where(room, share + (gap / members)[:, None], share).clamp(low, high)
    base = share.floor().long()
    missing = total - base.sum(-1)
    remainder = torch.where(base < high, share - base, -1.0)
    rank = remainder.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return base + (rank < missing[:, None]).long()
