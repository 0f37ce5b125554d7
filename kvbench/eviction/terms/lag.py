"""LagKV's score: the spread of a key or value over its channels, scaled by the next partition (arXiv 2504.04704).

A partition is `lag` successive entries in text order.
"""

from __future__ import annotations

from kvbench.lazy import torch


def unevenness(x: torch.Tensor, index: torch.Tensor, lag: int) -> torch.Tensor:
    """Return the score of each entry of all partitions but the last, [b, Hk, P - 1, lag] float32.

    Each channel is scaled so that its minimum and maximum in the next partition become 0 and 1; a channel that is
    constant in the next partition becomes 0. An entry's score is the standard deviation over its channels, put through
    a softmax over the entries of its partition. No partition follows the last one, so the last one gets no scores.

    x: keys or values [b, Hk, N, d]; index: [b, Hk, P lag], the indices of the entries of P partitions, `lag` entries
    each.
    """
    parts = x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1])).float().unflatten(2, (-1, lag))
    low, high = parts[:, :, 1:].amin(dim=3, keepdim=True), parts[:, :, 1:].amax(dim=3, keepdim=True)
    return (parts[:, :, :-1] - low).div_(high - low).masked_fill_(high == low, 0.0).std(dim=-1).softmax(dim=-1)
