"""defensivekv: score entries by the worst case over queries and heads instead of the mean, times the norm of the value.

Paper: Feng et al., Taming the Fragility of KV Cache Eviction in LLM Inference, arXiv 2510.13334.

The last w = `window` queries of the prompt attend to all entries. Per KV head, entry j before the window gets

    m_j   maximum over group and window of the attention to j. Before this maximum is taken, each query's row of
          attention is pooled along the text, and scaled so that pooling does not change its sum.
    s_j = max(m_j, mean of m) * n_j / (sum of n_j over the KV heads)

n_j is the norm of criticalkv: mean over the group of |v_j W_O^h|_1. The heads of a layer share its budget (Ada form);
with level=model (Layer-DefensiveKV) the heads of all layers share one budget. No head is guaranteed a share of it.

Some entries of a head are forced to stay: those with the most mean attention. Together they get less than a share of
the attention to the entries before the window; this share is `mass` minus a bias (below). With N entries in the head
and budget C, at most int((N - w) C / N) - w are forced; the option `forced` replaces this limit. Forced entries and the
window get the score of the layer's best entry.

    bias=released  the attention to the w entries before the window, a mean over queries and heads: the released code is
                   meant to use the attention to the window, but has already removed the window
    bias=window    the attention to the window, a mean over queries and heads
    bias=off       0
    norm=heads     s_j as above, as in the released code; with one KV head, values then have no effect
    norm=tokens    n_j is divided by its sum over the entries instead

Defaults: window 32, average pooling of 5, mass 0.9. Trap: if int((N - w) C / N) is below w, the released limit on
forced entries is negative and forces nearly all; here the limit is then 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Column, Method, Needs, Once, Protect, Trigger, option
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.ranks import count_before, ranks
from kvbench.eviction.terms.value_norm import VALUE_NORM, projected_norms, shares
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("defensivekv")
@dataclass(frozen=True)
class DefensiveKV(Method):
    paper = "Feng et al., arXiv 2510.13334"

    window: int = option(32, "last tokens of the prompt: their queries vote, and they always stay", low=1)
    kernel: int = option(5, "average-pooling width, 1 for none", low=1, odd=True)
    level: Literal["layer", "model"] = option(
        "layer", "layer: entries compete over the heads of each layer; model: over the heads of all layers"
    )
    mass: float = option(
        0.9,
        "a head's entries with the most attention are forced to stay, as long as together their share of the attention "
        "to entries before the window is less than mass minus bias",
        low=0,
        high=1,
    )
    bias: Literal["released", "window", "off"] = option(
        "released",
        "which attention is subtracted from the option mass. released: the attention to the last entries before the "
        "window; window: the attention to the window; off: none",
    )
    norm: Literal["heads", "tokens"] = option(
        "heads",
        "what a value's norm is divided by. heads: the sum of the norms of the same token in all KV heads of the "
        "layer; tokens: the sum of the norms of all entries of the same head before the window",
    )
    forced: int | None = option(
        None, "a head has at most this many forced entries; none: the budget sets the limit", low=0
    )

    @property
    def scope(self) -> Literal["head", "layer", "model"]:  # type: ignore[override]  # an option decides
        return self.level

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window, layer_weights=("o_proj",))

    def columns(self) -> tuple[Column, ...]:
        return (VALUE_NORM,)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.window)

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        norms = projected_norms(new)
        return {VALUE_NORM.name: shares(norms, dim=1) if self.norm == "heads" else norms}

    def score(self, view: LayerView) -> torch.Tensor:
        view = view.last_queries(self.window)  # a combined method may need more queries
        older = view.older(self.window)
        paid = torch.where(older[:, :, None, None], view.attend(reduce_g=None, reduce_q=None), 0.0)  # [b, Hk, g, w, N]
        worst = _pooled(view, paid.flatten(2, 3), self.kernel, older).amax(dim=2)
        worst = worst.maximum(worst.sum(dim=-1, keepdim=True) / older.sum(dim=-1, keepdim=True).clamp(min=1))
        norms = torch.where(older, view.columns[VALUE_NORM.name], 0.0)
        score = worst * (shares(norms, dim=-1) if self.norm == "tokens" else norms)
        return torch.where(older & ~self._forced(view, paid, older), score, score.amax(dim=(1, 2), keepdim=True))

    def _forced(self, view: LayerView, paid: torch.Tensor, older: torch.Tensor) -> torch.Tensor:
        """Return the mask of forced entries, the best by mean attention, [b, Hk, N].

        paid: the attention of the window's queries to the older entries, [b, Hk, g, w, N]. older: mask of the entries
        before the window, [b, Hk, N].
        """
        mean, held = paid.mean(dim=(2, 3)), view.held()
        rank = ranks(mean, view.positions, older)
        most = ((held - self.window) * view.budget // held.clamp(min=1) - self.window).clamp(min=0)
        most = most if self.forced is None else most * 0 + self.forced
        count = count_before(mean, rank, self.mass - self._bias(view, paid.double()))
        return rank < count.minimum(most)[..., None]

    def _bias(self, view: LayerView, paid: torch.Tensor) -> torch.Tensor | float:
        """Return the bias, attention that is subtracted from `mass`, [b, 1, 1]; with bias=off, the number 0. paid: the
        attention of the window's queries to the entries before the window, [b, Hk, g, w, N]."""
        if self.bias == "window":
            return 1 - paid.sum(dim=-1).mean(dim=(1, 2, 3))[:, None, None]
        newest = ~view.older(2 * self.window)  # of the entries before the window
        return 0.0 if self.bias == "off" else (paid * newest[:, :, None, None]).sum(-1).mean((1, 2, 3))[:, None, None]


def _pooled(view: LayerView, rows: torch.Tensor, kernel: int, among: torch.Tensor) -> torch.Tensor:
    """Return the attention `rows` [b, Hk, r, N] of r queries, average-pooled along the text and rescaled: each query's
    sum over the entries in `among` is unchanged.

    among: [b, Hk, N] bool, the entries that are pooled; the result is 0 at all others.
    """
    count = rows.shape[2]
    order, inside = (x.repeat_interleave(count, dim=1) for x in (view.text_order(), among))
    pooled = view.pool(rows.flatten(1, 2), "avg", kernel, inside, order).masked_fill_(~inside, 0.0).view_as(rows)
    whole = rows.masked_fill(~among[:, :, None], 0.0).sum(dim=-1, keepdim=True)
    return pooled * (whole / pooled.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny))
