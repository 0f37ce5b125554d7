"""Chooses which entries stay: those with the highest scores, under the method's protection and budgets.

Entries compete inside the method's scope. Of entries with equal scores the newer one stays, on CPU and GPU alike
(`order_key`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import BudgetViolation, PluginError
from kvbench.eviction import returned
from kvbench.eviction.api import Allocation, Method, Protect, ScoreOut, TopK
from kvbench.eviction.checks import refuse
from kvbench.eviction.modality import MODALITY
from kvbench.eviction.terms.shares import split_exactly
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


@dataclass(frozen=True, slots=True)
class Decision:
    """One layer's eviction: the entries that stay, and new values of columns and states."""

    keep: torch.Tensor  # [b, Hk, N] bool
    columns: dict[str, torch.Tensor]
    count: int | None = None  # how many entries every head keeps; None: the numbers must be read from `keep`

    def at(self, device: torch.device) -> Decision:
        """Return the decision with its tensors on a device."""
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return Decision(self.keep.to(device), columns, self.count)


def decide(method: Method, views: Sequence[LayerView]) -> list[Decision]:
    """Choose the entries that stay in several layers of the same sequences.

    views: all layers that evict. For a `layerwise` method some of these layers are enough; for a `stacked` method the
    views may be `StackView`s. The views may hold different numbers of entries, but have the same budget.

    Raises BudgetViolation for NaN scores and for a choice that `check` refuses; PluginError for results of the
    method's functions that `returned` refuses.
    """
    outs = [returned.scored(method, "score", method.score(view), view) for view in views]
    wheres = [view.positions.device for view in views]
    if len(set(wheres)) > 1:  # a model divided among devices
        views, outs = [view.at(wheres[0]) for view in views], [out.at(wheres[0]) for out in outs]
    if method.joint:
        outs = _settled(method, views, outs)
    musts = [protected(kept_always(method, v), v.positions, v.seen, v.prompt_len, v.mask) for v in views]
    shares = returned.quotas_of(method, allocation_of(views, outs)) if not method.uniform else None
    if shares is not None and method.replaced is not None:
        shares = _with_room(shares, views, musts)
    if method.scope == "model":
        keeps = _jointly(method, views, outs, musts)
    else:
        keeps = []
        first = 0
        for view, out, must in zip(views, outs, musts):
            layers = slice(first, first := first + max(1, len(view.decided)))
            count = view.budget if shares is None else view.per_row(shares[:, layers])
            score, positions, selector = out.score.float(), view.positions, method.selector()
            ahead = text_of(method, view)
            keeps.append(keep_mask(score, positions, view.mask, must, count, method.scope, selector, ahead))
    budget, total = views[0].budget, views[0].budget * views[0].layer_count
    each = budget if shares is None and method.scope != "model" else None
    check(
        [view.per_sequence(keep) for view, keep in zip(views, keeps)],
        [None if must is None else view.per_sequence(must) for view, must in zip(views, musts)],
        each,
        total,
    )
    counts = [_kept_per_head(method, view) for view in views]
    return [Decision(keep, out.columns, n).at(where) for keep, out, n, where in zip(keeps, outs, counts, wheres)]


def _kept_per_head(method: Method, view: LayerView) -> int | None:
    """Return how many entries every head of a view keeps; None if the number depends on scores or the view's mask."""
    if method.uniform and method.scope == "head" and view.whole and type(method.selector()) is TopK:
        return min(view.budget, view.positions.shape[-1])
    return None


def _settled(method: Method, views: Sequence[LayerView], outs: list[ScoreOut]) -> list[ScoreOut]:
    """Return the final scores of all layers. Raises PluginError for a wrong number of layers or a wrong shape."""
    final = method.settled(views, outs)
    if len(final) != len(views):
        raise PluginError(
            f"{type(method).__name__}.settled() must return one ScoreOut per layer ({len(views)}); got {len(final)}."
        )
    return [returned.scored(method, "settled", out, view) for out, view in zip(final, views)]


def allocation_of(views: Sequence[LayerView], outs: Sequence[ScoreOut]) -> Allocation:
    """Return the input of `Method.quotas` for these layers and their scores."""
    first = views[0]

    def join(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([v.per_sequence(x) for v, x in zip(views, values)], dim=1)

    return Allocation(
        budget=first.budget,
        layers=tuple(layer for v in views for layer, _ in v.decided),
        ordinals=tuple(ordinal for v in views for _, ordinal in v.decided),
        layer_count=first.layer_count,
        query_heads=first.queries.shape[1],
        held=join([v.held() for v in views]),
        seen=first.per_sequence(first.seen)[:, 0],
        prompt_len=first.per_sequence(first.prompt_len)[:, 0],
        stats={name: join([out.stats[name] for out in outs]) for name in outs[0].stats},
        weights=first.weights,
        held_by_layer=first.held_by_layer,
    )


def _jointly(
    method: Method, views: Sequence[LayerView], outs: Sequence[ScoreOut], musts: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Let the entries of all layers and heads compete for one budget; return each layer's mask of kept entries."""
    longest = max(v.positions.shape[-1] for v in views)

    def join(parts: Sequence[torch.Tensor], fill: float | bool) -> torch.Tensor:
        padded = (torch.nn.functional.pad(p, (0, longest - p.shape[-1]), value=fill) for p in parts)
        return torch.cat([v.per_sequence(p).flatten(1, 2) for v, p in zip(views, padded)], dim=1)

    must = [m if m is not None else torch.zeros_like(v.valid) for m, v in zip(musts, views)]
    texts = [text for view in views if (text := text_of(method, view)) is not None]
    keep = keep_mask(
        join([out.score.float() for out in outs], 0.0),
        join([v.positions for v in views], -1),
        join([v.valid for v in views], False),
        join(must, False),
        views[0].budget,
        "model",
        method.selector(),
        join(texts, False) if texts else None,
    )
    heads = [v.positions.shape[1] for v in views]
    parts = keep.split([len(v.decided) * count for v, count in zip(views, heads)], dim=1)
    return [
        v.per_row(part.unflatten(1, (-1, count)))[..., : v.positions.shape[-1]]
        for v, part, count in zip(views, parts, heads)
    ]


def _with_room(shares: torch.Tensor, views: Sequence[LayerView], musts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Adjust the quotas `shares` [b, L, Hk] so that each has room for its head's protected entries (`musts`).

    First, each quota is cut to the number of entries that its head holds. Then entries move between the quotas of a
    sequence; their sum grows only if the protected entries need more. A quota can lack room only if the option
    `protection` protects more entries than the method's own protection does.
    """
    held = torch.cat([v.per_sequence(v.held()) for v in views], dim=1)
    low = torch.cat(
        [v.per_sequence(v.held() * 0 if must is None else must.sum(-1)) for v, must in zip(views, musts)], dim=1
    )
    wanted = torch.minimum(shares, held).flatten(1)
    fitting = split_exactly(wanted, wanted.sum(dim=1), low.clamp_min(1).flatten(1), held.flatten(1))
    return fitting.view_as(held)


def kept_always(method: Method, view: LayerView) -> Protect:
    """Return the protection that applies (`Method.keeps_always`) at the budget and interval of a view."""
    return method.keeps_always(view.budget).at(view.interval)


def competing(method: Method, view: LayerView) -> torch.Tensor:
    """Return the mask of valid entries that no protection keeps, [b, Hk, N] bool."""
    must = protected(kept_always(method, view), view.positions, view.seen, view.prompt_len, view.mask)
    return view.valid if must is None else view.valid & ~must


def text_of(method: Method, view: LayerView) -> torch.Tensor | None:
    """Return the mask of text entries, [b, Hk, N] bool, if the method prefers text to images; otherwise None."""
    return view.columns[MODALITY.name] == 0 if kept_always(method, view).text else None


def protected(
    protect: Protect,
    positions: torch.Tensor,
    seen: torch.Tensor,
    prompt_len: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the mask of protected entries, [b, Hk, N] bool, or None if nothing is protected. positions: [b, Hk, N];
    seen, prompt_len: [b]; valid: [b, Hk, N], None if all entries are valid."""
    mask = None
    if protect.sinks:
        mask = positions < protect.sinks
    if protect.recent:
        recent = positions >= (seen - protect.recent)[:, None, None]
        mask = recent if mask is None else mask | recent
    if protect.prompt:
        reach = prompt_len if protect.prompt_most is None else prompt_len.clamp(max=protect.prompt_most)
        prompt = positions < reach[:, None, None]
        mask = prompt if mask is None else mask | prompt
    return mask if mask is None or valid is None else mask & valid


def order_key(score: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that order entries by score, then by position: the largest keys are kept.

    The upper 32 bits are the float32 score, mapped to int32 so that the order is kept; the lower 32 bits are the
    position. One integer top-k therefore decides ties exactly and equally on every device. Raises BudgetViolation for
    NaN scores.
    """
    message = "the method returned NaN scores, so no entry can be chosen."
    refuse(torch.isnan(score).sum(), lambda _: BudgetViolation(message))
    bits = (score + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which must tie with it
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | positions.long()


def lowest(keys: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return the mask of the `count` [...] lowest int64 keys of each row, [..., n] bool. If further keys equal the
    largest marked key, they are marked too."""
    if keys.device.type == "cpu":  # numpy sorts short rows several times as fast as torch
        ordered = keys.clone()
        ordered.numpy().sort(axis=-1)
    else:
        ordered = keys.sort(dim=-1).values
    last = ordered.gather(-1, (count[..., None] - 1).clamp(0, keys.shape[-1] - 1))
    return (keys <= last) & (count > 0)[..., None]


def _in_two_ranks(key: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
    """Return order keys that rank the entries of `ahead` above all others. Within both groups the order is unchanged.

    Score (32 bits) and position (31 bits) need only 63 of a key's 64 bits. The remaining bit distinguishes the groups.
    """
    packed = ((key >> 32) << 31) | (key & 0x7FFFFFFF)
    return torch.where(ahead, packed + (1 << 62), packed - (1 << 62))


def keep_mask(
    score: torch.Tensor,
    positions: torch.Tensor,
    valid: torch.Tensor | None,
    must: torch.Tensor | None,
    count: int | torch.Tensor,
    scope: str = "head",
    selector: TopK | None = None,
    ahead: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mask of entries that stay: `count` per head or, if heads share a budget, `count * Hk` over all heads.

    If there are fewer valid entries, all of them stay.

    Args:
        score: [b, Hk, N] float32; all masks have this shape too. For scope "model", axis 1 joins layers and heads.
        valid: mask of valid entries; None: all entries are valid.
        must: mask of entries that stay whatever their score; None: no entries.
        count: entries to keep per head; a tensor [b, Hk] gives each head's quota.
        scope: "head" picks within each head. Otherwise the heads of axis 1 share the sum of their counts, and each head
            keeps at least its best entry.
        selector: picks entries by their `order_key`; default: the largest keys.
        ahead: entries that rank above all others except `must`, whatever their scores; None: no entries.
    """
    selector = selector or TopK()
    if valid is not None:
        score = torch.where(valid, score, 0.0)  # unused storage may hold NaN
    key = order_key(score, positions)
    if ahead is not None:
        key = _in_two_ranks(key, ahead)
    if must is not None:
        key = key.masked_fill_(must, torch.iinfo(torch.int64).max)
    if valid is not None:
        key = key.masked_fill_(~valid, torch.iinfo(torch.int64).min)
    if scope == "head":
        keep = selector.choose(key, count, distinct=True)
        return keep if valid is None else keep & valid
    # No head may be left empty, so the best entry of each head stays.
    best = key.argmax(dim=-1, keepdim=True)
    key = key.scatter(-1, best, torch.iinfo(torch.int64).max)
    if valid is not None:
        key = key.masked_fill_(~valid, torch.iinfo(torch.int64).min)
    total = count.sum(dim=-1) if isinstance(count, torch.Tensor) else count * key.shape[1]
    keep = selector.choose(key.flatten(1), total, distinct=False).view(key.shape)  # keys of two heads can be equal
    return keep if valid is None else keep & valid


def check(
    keeps: Sequence[torch.Tensor],
    musts: Sequence[torch.Tensor | None],
    each: int | None,
    total: int,
    min_entries: int = 1,
) -> None:
    """Raise BudgetViolation if a decision drops protected entries, exceeds the budget or leaves a head too few entries.

    Args:
        keeps, musts: the entries that stay, and the protected entries (None: nothing is protected). Each tensor has
            one or several layers, [b, L, Hk, N].
        each: how many entries per head a layer may keep, averaged over its heads; None: no limit per layer.
        total: how many entries per head may stay in all layers of the model together, averaged over heads.
        min_entries: how many entries every head must keep.
    """
    # Numbers are summed, not combined by `any`: `checks.read` would have to convert each bool.
    lost = [(must & ~keep).sum() for keep, must in zip(keeps, musts) if must is not None]
    if lost:
        message = "a protected entry (sink, recent token or prompt) was evicted."
        refuse(lost[0] if len(lost) == 1 else torch.stack(lost).sum(), lambda _: BudgetViolation(message))
    counts = [keep.sum(dim=-1) for keep in keeps]
    sizes = counts[0] if len(counts) == 1 else torch.cat(counts, dim=1)  # [b, L, Hk]
    of_layers = sizes.sum(dim=-1)
    if each is not None:
        _refuse_more(of_layers, each * sizes.shape[-1], "kept in a layer")
    _refuse_more(of_layers.sum(dim=-1), total * sizes.shape[-1], "kept")
    refuse(
        (sizes < min_entries).sum(),
        lambda _: BudgetViolation(f"a head was left with fewer than {min_entries} entries."),
    )


def _refuse_more(held: torch.Tensor, most: int, where: str) -> None:
    """Raise BudgetViolation if a number in `held` exceeds `most`. where: words for the error message."""
    largest = torch.where(held > most, held, 0).amax()
    refuse(largest, lambda count: BudgetViolation(f"budget exceeded: {count} entries {where}; {most} allowed."))
