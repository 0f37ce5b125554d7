"""How unevenly entries are spread over channels, measured by the partition that follows theirs (arXiv 2504.04704)."""

from __future__ import annotations

from kvbench.lazy import torch


def unevenness(x: torch.Tensor, index: torch.Tensor, lag: int) -> torch.Tensor:
    """Return the softmax over each partition of the standard deviation over channels, [b, Hk, P - 1, lag] float32.

    Channels are first scaled by their least and largest numbers in the partition that follows; the last partition has
    none, so it gets no score. A channel that is constant there counts as 0.

    x: keys or values [b, Hk, N, d]; index: [b, Hk, P lag], the places of the P partitions' entries.
    """
    parts = x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1])).float().unflatten(2, (-1, lag))
    low, high = parts[:, :, 1:].amin(dim=3, keepdim=True), parts[:, :, 1:].amax(dim=3, keepdim=True)
    return (parts[:, :, :-1] - low).div_(high - low).masked_fill_(high == low, 0.0).std(dim=-1).softmax(dim=-1)
