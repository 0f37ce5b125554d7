"""From scores to the entries that stay: protection, budgets, the one tie rule.

Entries compete inside the method's scope. Ties go to the newer entry everywhere, so CPU and GPU agree; `order_key` is
that rule.
"""

from __future__ import annotations

from kvbench.errors import BudgetViolation
from kvbench.eviction.api import Method, Protect, ScoreOut
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


def decide(method: Method, view: LayerView) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One whole decision about one layer at `view.budget`: [b, Hk, N] bool of what stays, and new column values."""
    out = method.score(view)
    if not isinstance(out, ScoreOut):
        out = ScoreOut(out)
    must = protected(method.protect(view.budget), view.positions, view.seen, view.prompt_len, view.valid)
    keep = keep_mask(out.score.float(), view.positions, view.valid, must, view.budget, method.scope)
    check(keep, must, view.budget)
    return keep, out.columns


def protected(
    protect: Protect,
    positions: torch.Tensor,
    seen: torch.Tensor,
    prompt_len: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """[b, Hk, N] bool of entries that must stay, or None when nothing is protected.

    positions: [b, Hk, N]; seen, prompt_len: [b]; valid: [b, Hk, N], without it all entries are taken for valid.
    """
    mask = None
    if protect.sinks:
        mask = positions < protect.sinks
    if protect.recent:
        recent = positions >= (seen - protect.recent)[:, None, None]
        mask = recent if mask is None else mask | recent
    if protect.prompt:
        prompt = positions < prompt_len[:, None, None]
        mask = prompt if mask is None else mask | prompt
    return mask if mask is None or valid is None else mask & valid


def order_key(score: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 keys whose order is (score, then position): larger is kept first, equal scores go to the newer entry.

    The float32 score is mapped to an int32 of the same order and put above the position, so one integer top-k decides
    ties exactly and equally on every device. Raises BudgetViolation on NaN scores.
    """
    if bool(torch.isnan(score).any()):
        raise BudgetViolation("the method returned NaN scores; no entry can be chosen.")
    bits = (score + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which must tie with it
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | positions.long()


def keep_mask(
    score: torch.Tensor,
    positions: torch.Tensor,
    valid: torch.Tensor,
    must: torch.Tensor | None,
    count: int,
    scope: str = "head",
) -> torch.Tensor:
    """Choose the entries that stay.

    Args:
        score: [b, Hk, N] float32 (for scope "model": layers and heads joined in axis 1); positions, valid: same shape.
        must: [b, Hk, N] bool or None; these stay whatever their score.
        count: entries to keep per head (scope "head"), or the mean per head (scopes "layer" and "model").
        scope: "head" picks `count` in every head; otherwise the heads of axis 1 share `count * Hk`.

    Returns:
        [b, Hk, N] bool with min(count, valid entries) set per head, or min(count * Hk, valid entries) over the heads.
    """
    key = order_key(torch.where(valid, score, 0.0), positions)  # whatever lies in unused storage must not even be NaN
    if must is not None:
        key = torch.where(must, torch.iinfo(torch.int64).max, key)
    key = torch.where(valid, key, torch.iinfo(torch.int64).min)
    shape = key.shape
    rows = key if scope == "head" else key.flatten(1)
    wanted = count if scope == "head" else count * shape[1]
    n = rows.shape[-1]
    drop = n - min(wanted, n)
    keep = torch.ones_like(rows, dtype=torch.bool)
    if drop:
        if scope == "head":
            # The dropped are fewer than the kept between two evictions, so selecting them is the cheaper top-k.
            evicted = rows.topk(drop, dim=-1, largest=False, sorted=False).indices
        else:
            # Two heads can tie in score and position, and top-k breaks ties as it likes: the later head wins.
            evicted = rows.argsort(dim=-1, stable=True)[:, :drop]
        keep.scatter_(-1, evicted, False)
    return keep.view(shape) & valid


def check(keep: torch.Tensor, must: torch.Tensor | None, count: int, min_entries: int = 1) -> None:
    """Assert what every eviction promises: protected entries stay, the budget holds, no head is empty.

    Raises:
        BudgetViolation: naming the promise that was broken.
    """
    sizes = keep.sum(dim=-1)  # [b, Hk]
    if must is not None and bool((must & ~keep).any()):
        raise BudgetViolation("a protected entry (sink, recent token or prompt) was evicted.")
    if bool((sizes.sum(dim=-1) > count * sizes.shape[-1]).any()):
        raise BudgetViolation(f"budget {count} exceeded: {int(sizes.max())} entries kept in one head.")
    if bool((sizes < min_entries).any()):
        raise BudgetViolation(f"a head was left with fewer than {min_entries} entries.")
