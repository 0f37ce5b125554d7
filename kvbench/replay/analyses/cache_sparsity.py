"""Measures, by layer, which share of the entries that a method holds gets hardly any attention.

After G-KV (arXiv 2512.00504, Appendix B, Figure 9). For each query of the answer, among the entries that the cache
holds and the query sees:

    below_1  share of the entries whose weight is below 1% of the query's largest weight
    below_5  share of the entries whose weight is below 5% of the query's largest weight

The shares are means over queries and query heads. `entries` is the mean number of entries that the cache holds and the
query sees. The method `full` gives the figures of the full cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import Look, MethodAnalysis, Row, Table, cells, named, register, size
from kvbench.report.plots.figure import Figure

PERCENT = (1, 5)
NAMES = (*(f"below_{percent}" for percent in PERCENT), "entries")


@register("cache-sparsity")
class CacheSparsity(MethodAnalysis):
    about = "held entries with little attention, by method and layer"

    def attended(self, look: Look) -> None:
        weights, visible = look.weights, look.visible
        largest = weights.amax(dim=-1, keepdim=True)
        count = visible.sum(dim=-1)  # [b, Hq, w]
        sums = {"entries": count.float()}
        for percent in PERCENT:
            sums[f"below_{percent}"] = (visible & (weights < percent / 100 * largest)).sum(dim=-1) / count
        means = {name: value.mean(dim=1).sum(dim=-1) for name, value in sums.items()}
        self.tally.add((look.chosen, look.layer), look.traces, queries=float(weights.shape[2]), **means)

    def rows(self) -> list[Row]:
        """Return a row of results per method, budget and layer."""
        ratios = {name: (name, "queries") for name in NAMES}
        return [
            {"task": self.study.task, **chosen.columns, "layer": layer, **figures}
            for (chosen, layer), figures in self.tally.figures(**ratios)
        ]

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {"panel": f"{row['task']}, below {percent}%", "line": named(row), "x": row["layer"]}
            | plots.with_error(row, f"below_{percent}")
            for percent in PERCENT
            for row in rows
        ]
        title = "Held entries with little attention"
        return plots.lines("cache-sparsity", title, points, x="layer", y="share of the entries held")

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "method", "budget", "layer", "entries", "below 1% of max", "below 5% of max"]
        return head, [
            [r["task"], r["method"], size(r), str(r["layer"]), *cells(r, "entries", digits=1), *cells(r, *NAMES[:2])]
            for r in rows
        ]
