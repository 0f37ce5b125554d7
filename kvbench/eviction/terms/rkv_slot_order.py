"""The order in which the released R-KV code stores entries (its "slots"), for ``compat=reference`` only.

The released code stores the survivors of an eviction in the order of their scores, followed by the window and then by
new tokens. From its second eviction on, pooling runs over neighbours in rank, and R-KV's redundancy takes the
last similar key by rank, not by text. A column of ranks reproduces this; entries without a rank follow the ranked ones
in text order.

The released code breaks ties as ``torch.topk`` happens to, which depends on the device and on the number of entries.
Therefore `keep_in_score_order` calls ``torch.topk`` itself, and returns minus the ranks as scores: these have no ties.
"""

from __future__ import annotations

from kvbench.eviction.api import Column, ScoreOut
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

RANK = Column(name="rank", init=float("nan"))


def slot_order(view: LayerView) -> torch.Tensor:
    """Return the indices of the entries in the released code's storage order, [b, Hk, N] int64; invalid entries come
    last."""
    rank = view.columns[RANK.name]
    key = torch.where(rank.isnan(), view.positions + (1 << 32), rank.nan_to_num().long())
    return torch.where(view.valid, key, torch.iinfo(torch.int64).max).argsort(dim=-1)


def keep_in_score_order(view: LayerView, score: torch.Tensor, order: torch.Tensor, window: int) -> ScoreOut:
    """Choose the best entries outside the window with ``torch.topk``, as many as the budget has room for.

    Return the ranks of the chosen entries as a column, and minus the ranks as scores. All other entries get rank NaN
    and score -inf.
    """
    outside = int(view.older(window).sum(dim=-1).max())
    row = score.gather(-1, order)[..., :outside]  # the window and invalid entries come after these
    top = row.topk(min(view.budget - window, outside), dim=-1).indices
    places = torch.arange(top.shape[-1], device=top.device, dtype=torch.float32).expand_as(top)
    rank = torch.full_like(score, float("nan")).scatter_(-1, order.gather(-1, top), places)
    return ScoreOut((-rank).nan_to_num(nan=float("-inf")), {RANK.name: rank})
