"""Measures how many of the tokens most attended by the last window were among the most attended in earlier windows.

After G-KV (arXiv 2512.00504, Figures 1 and 16): the last window of an answer is compared with the window before it, and
with the union of all windows before it. A window is 16 successive queries (`api.WINDOW`). Its attention is, per KV
head, a mean over its queries and over the query heads of a group. The tokens older than the window before the last are
the candidates; N is their number. For each share r (5%, 10%, ..., 95%), a window's best tokens are the r * N candidates
that get most of its attention:

    before  share of the last window's best tokens that are best tokens of the window before it
    union   share of the last window's best tokens that are best tokens of at least one earlier window
    size    share of the candidates that are best tokens of at least one earlier window: the expected `union` if the
            last window's best tokens were a random choice

Windows earlier than the last two are older than some candidates. Such a window ranks only the candidates older than
itself, and its best tokens are the best share r of those.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import WINDOW, AttentionAnalysis, Row, Study, Table, Window, cells, register
from kvbench.report.plots.figure import Figure

SHARES = tuple(percent / 100 for percent in range(5, 100, 5))


@register("union")
class Union(AttentionAnalysis):
    about = "best tokens of the last window that were best before"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        # By layer, for each token older than the previous window: its rank in that window, and its best rank in all
        # windows so far. Both are from 0 (most attention) to 1, [b, Hk, N].
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def window(self, window: Window) -> None:
        b, heads, queries, _ = window.weights.shape
        if queries < WINDOW or window.first == 0:
            return
        paid = window.weights.view(b, window.kv_heads, heads // window.kv_heads * queries, -1).mean(dim=2)
        rank = _ranks(paid[..., : window.first])
        if window.index:
            known, best = self._before[window.layer]
            last = (len(self.study.traces[window.traces[0]].answer) - 1) // WINDOW - 1  # the last window of 16 queries
            if window.index == last:
                self._compare(window, _ranks(paid[..., : known.shape[-1]]), known, best)
            older = rank[..., : best.shape[-1]].minimum(best)
            self._before[window.layer] = rank, torch.cat([older, rank[..., best.shape[-1] :]], dim=-1)
        else:
            self._before[window.layer] = rank, rank

    def _compare(self, window: Window, now: torch.Tensor, before: torch.Tensor, best: torch.Tensor) -> None:
        for share in SHARES:
            wanted, union = now < share, best < share
            count = wanted.sum(dim=-1)
            shares = {
                "before": (wanted & (before < share)).sum(dim=-1) / count,
                "union": (wanted & union).sum(dim=-1) / count,
                "size": union.float().mean(dim=-1),
            }
            sums = {name: value.mean(dim=-1) for name, value in shares.items()}
            self.tally.add((window.layer, share), window.traces, answers=1.0, **sums)

    def rows(self) -> list[Row]:
        """Return a row of results per layer and share r of tokens, with means over KV heads and answers."""
        return self.means(("before", "union", "size"), "answers", "layer", "kept")

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {"panel": f"{row['task']}, {what}", "line": f"layer {row['layer']}", "x": row["kept"]}
            | plots.with_error(row, name)
            for name, what in (("before", "the window before"), ("union", "all windows before"))
            for row in rows
        ]
        title = "Best tokens of the last window that were best before, full cache"
        return plots.lines("union", title, points, x="share of tokens kept", y="share of the best tokens")

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "layer", "kept", "before", "union", "size"]
        shown = [row for row in rows if round(row["kept"] * 100) % 20 == 5 or row["kept"] == 0.55]
        return head, [[*cells(r, "task", "layer"), *cells(r, *head[2:])] for r in shown]


def _ranks(paid: torch.Tensor) -> torch.Tensor:
    """Return each token's rank (0: most attention) divided by the number of tokens. paid: attention, [..., N]. Of
    tokens with equal attention, older tokens come first."""
    order = paid.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(paid.shape[-1], device=paid.device, dtype=torch.float32) / paid.shape[-1]
    return torch.empty_like(paid).scatter_(-1, order, places.expand_as(paid))
