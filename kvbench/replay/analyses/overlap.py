"""Measures how long attention stays on the same tokens: the share of a window's attended tokens that later windows
attend to again.

A window is 16 successive queries (`api.WINDOW`). Its attended tokens S are, per KV head, the fewest older tokens that
carry 90% of the window's attention to older tokens (`api.MASS`). This attention is a mean over the window's queries and
over the query heads of a group. For an earlier window a and a later window b:

    overlap = |S_a and S_b| / |S_a|
    chance  = share of the tokens older than a that are in S_b: the overlap of a random set
    mass    = attention of b to S_a, divided by attention of b to all tokens older than a: the share of attention
              that a cache with only S_a would keep

Answers are read with the full cache, so the chosen methods do not matter. To bound memory, only `ANCHORS` windows of an
answer, evenly spread, serve as earlier windows.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import WINDOW, AttentionAnalysis, Row, Study, Table, Window, cells, register, top_mass
from kvbench.report.plots.figure import Figure

ANCHORS = 32


@register("overlap")
class Overlap(AttentionAnalysis):
    about = "share of the attended tokens that later queries attend to too"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        # By layer, of earlier windows: (index, first, S).
        self._anchors: dict[int, list[tuple[int, int, torch.Tensor]]] = {}

    def window(self, window: Window) -> None:
        if window.index == 0:
            self._anchors[window.layer] = []
        weights, first = window.weights, window.first
        b, heads, queries, _ = weights.shape
        if queries < WINDOW:
            return
        paid = weights.view(b, window.kv_heads, heads // window.kv_heads * queries, -1).mean(dim=2)[..., :first]
        attended = top_mass(paid)
        for index, older, before in self._anchors[window.layer]:
            distance = WINDOW << (window.index - index - 1).bit_length()
            now, later = attended[..., :older], paid[..., :older]
            # [b, Hk] False if a window pays no attention to older tokens
            there = before.any(dim=-1) & (later.sum(dim=-1) > 0)
            shares = {
                "overlap": (before & now).sum(dim=-1) / before.sum(dim=-1),
                "chance": now.float().mean(dim=-1),
                "mass": (later * before).sum(dim=-1) / later.sum(dim=-1),
            }
            sums = {name: share.where(there, 0.0).sum(dim=-1) for name, share in shares.items()}
            self.tally.add((window.layer, distance), window.traces, windows=1.0, pairs=there.sum(dim=-1), **sums)
        if window.index % -(-window.count // ANCHORS) == 0:
            self._anchors[window.layer].append((window.index, first, attended))

    def rows(self) -> list[Row]:
        """Return a row of results per layer and distance between windows, rounded up to 16, 32, 64, ... tokens."""
        return self.means(("overlap", "chance", "mass"), "pairs", "layer", "distance", pairs="windows")

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {
                "panel": row["task"],
                "line": f"layer {row['layer']}",
                "x": row["distance"],
                "pairs": row["pairs"],
                **plots.with_error(row, "overlap"),
            }
            for row in rows
        ]
        title = "Attended tokens that later queries attend to again, full cache"
        x, y = "distance of windows (tokens, up to)", "share of attended tokens"
        about = (
            f"A window is {WINDOW} successive queries; a point is the mean over at least "
            f"{min((row['pairs'] for row in rows), default=0)} pairs of windows."
        )
        return plots.lines("overlap", title, points, x=x, y=y, about=about, log=True)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "layer", "distance", "overlap", "chance", "mass"]
        return head, [cells(r, *head) for r in rows]
