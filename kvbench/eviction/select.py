"""From scores to the entries that stay: protection, budgets, the one tie rule.

Entries compete inside the method's scope. Ties go to the newer entry everywhere, so CPU and GPU agree; `order_key` is
that rule.
"""

from __future__ import annotations

from kvbench.errors import BudgetViolation
from kvbench.eviction.api import Method, Protect, ScoreOut, TopK
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


def decide(
    method: Method, view: LayerView, quotas: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One whole decision about one layer.

    Args:
        quotas: [b, Hk] int64 entries that each head keeps; None is the view's budget in every head.

    Returns:
        [b, Hk, N] bool of what stays, and new column values.
    """
    out = method.score(view)
    if not isinstance(out, ScoreOut):
        out = ScoreOut(out)
    valid = None if view.whole else view.valid
    must = protected(method.protect(view.budget), view.positions, view.seen, view.prompt_len, valid)
    count = view.budget if quotas is None else quotas
    keep = keep_mask(out.score.float(), view.positions, valid, must, count, method.scope, method.selector())
    check(keep, must, count)
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
    valid: torch.Tensor | None,
    must: torch.Tensor | None,
    count: int | torch.Tensor,
    scope: str = "head",
    selector: TopK | None = None,
) -> torch.Tensor:
    """Choose the entries that stay.

    Args:
        score: [b, Hk, N] float32 (for scope "model": layers and heads joined in axis 1); positions: same shape.
        valid: same shape, or None when all are.
        must: [b, Hk, N] bool or None; these stay whatever their score.
        count: entries to keep per head (scope "head"; as a tensor, quotas [b, Hk]), or the mean per head (scopes
            "layer" and "model").
        scope: "head" picks in every head by itself; otherwise the heads of axis 1 share `count * Hk`.
        selector: how to pick by keys; default the largest.

    Returns:
        [b, Hk, N] bool with min(count, valid entries) set per head, or min(count * Hk, valid entries) over the heads.
    """
    selector = selector or TopK()
    if valid is not None:
        score = torch.where(valid, score, 0.0)  # whatever lies in unused storage must not even be NaN
    key = order_key(score, positions)
    if must is not None:
        key = key.masked_fill_(must, torch.iinfo(torch.int64).max)
    if valid is not None:
        key = key.masked_fill_(~valid, torch.iinfo(torch.int64).min)
    if scope == "head":
        keep = selector.choose(key, count, distinct=True)
    else:  # two heads can tie in score and position
        keep = selector.choose(key.flatten(1), count * key.shape[1], distinct=False).view(key.shape)
    return keep if valid is None else keep & valid


def check(keep: torch.Tensor, must: torch.Tensor | None, count: int | torch.Tensor, min_entries: int = 1) -> None:
    """Assert what every eviction promises: protected entries stay, the budget holds, no head is empty.

    Raises:
        BudgetViolation: naming the promise that was broken.
    """
    sizes = keep.sum(dim=-1)  # [b, Hk]
    if must is not None and bool((must & ~keep).any()):
        raise BudgetViolation("a protected entry (sink, recent token or prompt) was evicted.")
    allowed = count.sum(dim=-1) if isinstance(count, torch.Tensor) else count * sizes.shape[-1]
    if bool((sizes.sum(dim=-1) > allowed).any()):
        raise BudgetViolation(f"budget exceeded: {int(sizes.sum(dim=-1).max())} entries kept in a layer.")
    if bool((sizes < min_entries).any()):
        raise BudgetViolation(f"a head was left with fewer than {min_entries} entries.")
