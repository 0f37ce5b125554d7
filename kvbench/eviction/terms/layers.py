"""Merges the scores of a token in all layers into one score per head, or into one score for all heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


def mean_of_layers(views: Sequence[LayerView], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor [b, Hk, N] per layer: for each entry of head h, the mean score of its token in head h.

    The mean is over those layers whose head h still holds the token. All layers must have the same number of heads.
    """
    total = views[0].keys.new_zeros(*views[0].positions.shape[:2], _end(views) + 1, dtype=torch.float64)
    count = torch.zeros_like(total)
    for at, score in zip(_places(views), scores):
        total.scatter_add_(-1, at, score.double())
        count.scatter_add_(-1, at, torch.ones_like(at, dtype=torch.float64))
    return [(total.gather(-1, at) / count.gather(-1, at)).float() for at in _places(views)]


def best_of_heads(views: Sequence[LayerView], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor [b, Hk, N] per layer: for each entry, the best score of its token in any head of any layer."""
    best = scores[0].new_full((len(scores[0]), _end(views) + 1), float("-inf"))
    for at, score in zip(_places(views), scores):
        best.scatter_reduce_(-1, at.flatten(1), score.flatten(1), "amax")
    return [best.gather(-1, at.flatten(1)).view_as(at) for at in _places(views)]


def _places(views: Sequence[LayerView]) -> Iterator[torch.Tensor]:
    """Yield the positions of each layer's entries [b, Hk, N]; invalid entries get a number above all positions."""
    yield from (torch.where(view.valid, view.positions, _end(views)) for view in views)


def _end(views: Sequence[LayerView]) -> int:
    return max(view.longest for view in views)
