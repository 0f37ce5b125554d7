"""LagKV's score: the spread of a key or value over its channels, scaled by the next partition (arXiv 2504.04704)."""

from __future__ import annotations

from kvbench.lazy import torch


def unevenness(x: torch.Tensor, index: torch.Tensor, lag: int) -> torch.Tensor:
    """Return each entry's standard deviation over channels, after a softmax over its partition: [b, Hk, P - 1, lag].

    The result is float32. First, each channel is scaled by its minimum and maximum in the next partition; a channel
    that is constant there counts as 0. No partition follows the last, so the last gets no score.

    x: keys or values [b, Hk, N, d]; index: [b, Hk, P lag], the places of the entries of P partitions, `lag` entries
    each.
    """
    parts = x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1])).float().unflatten(2, (-1, lag))
    low, high = parts[:, :, 1:].amin(dim=3, keepdim=True), parts[:, :, 1:].amax(dim=3, keepdim=True)
    return (parts[:, :, :-1] - low).div_(high - low).masked_fill_(high == low, 0.0).std(dim=-1).softmax(dim=-1)
