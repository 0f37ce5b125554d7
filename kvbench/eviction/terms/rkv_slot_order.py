"""The order in which the released R-KV code stores entries (its "slots"), for ``compat=reference`` only.

The released code stores the survivors of an eviction in the order of their scores, followed by the window and then by
new tokens. From its second eviction on, pooling runs over neighbours in rank, and the redundancy's last similar key is
the last by rank, not by text. A column of ranks reproduces this; entries without a rank follow the ranked ones in text
order. Scores become ranks too: the code resolves ties at the cut as ``torch.topk`` does, which differs between devices
and row lengths.
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
    """Choose the best entries outside the window with ``torch.topk``; together with the window they fill the budget.

    Return the ranks of the chosen entries, and scores made of the ranks. Other entries get rank NaN and score -inf.
    """
    outside = int(view.older(window).sum(dim=-1).max())
    row = score.gather(-1, order)[..., :outside]  # the window and invalid entries lie behind
    top = row.topk(min(view.budget - window, outside), dim=-1).indices
    places = torch.arange(top.shape[-1], device=top.device, dtype=torch.float32).expand_as(top)
    rank = torch.full_like(score, float("nan")).scatter_(-1, order.gather(-1, top), places)
    return ScoreOut((-rank).nan_to_num(nan=float("-inf")), {RANK.name: rank})
