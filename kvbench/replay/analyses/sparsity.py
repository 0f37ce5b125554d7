"""Measures how few entries get most of the attention, by layer and query head, with the full cache.

For each query of the answer, the analysis counts the fewest entries that together carry 90, 95 and 99% of the query's
attention. Of the entries that the query sees, it also finds the share with at least 1% of the query's largest weight.
H2O uses this threshold (arXiv 2306.14048, section 3.1). The results are means over queries, with standard errors over
questions.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import AttentionAnalysis, Row, Table, Window, cells, fixed, register
from kvbench.report.plots.figure import Figure

SHARES = (90, 95, 99)
NAMES = (*(f"entries_{share}" for share in SHARES), "above")
ALL = (*NAMES, "tokens")
THRESHOLD = 0.01


@register("sparsity")
class Sparsity(AttentionAnalysis):
    about = "entries that hold 90, 95 and 99% of the attention, by layer"

    def window(self, window: Window) -> None:
        weights = window.weights
        heads, queries = weights.shape[1:3]
        visible = torch.arange(window.first + 1, window.first + queries + 1, device=weights.device)  # [w]
        ordered = weights.sort(dim=-1, descending=True).values
        so_far = ordered.cumsum(dim=-1)
        sums = {
            f"entries_{share}": (so_far < share / 100 * so_far[..., -1:]).sum(dim=-1).add(1).sum(dim=-1)
            for share in SHARES
        }
        sums["above"] = ((weights >= THRESHOLD * ordered[..., :1]).sum(dim=-1) / visible).sum(dim=-1)
        for head in range(heads):
            self.tally.add(
                (window.layer, head),
                window.traces,
                queries=float(queries),
                tokens=float(visible.sum()),
                **{name: value[:, head] for name, value in sums.items()},
            )

    def rows(self) -> list[Row]:
        """Return a row of results per layer and query head, with means over queries."""
        return self.means(ALL, "queries", "layer", "head")

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {
                "panel": layer["task"],
                "line": f"{share}% of the attention",
                "x": layer["layer"],
                **plots.with_error(layer, f"entries_{share}"),
            }
            for layer in _by_layer(rows)
            for share in SHARES
        ]
        title = "Fewest entries that hold most of a query's attention, full cache"
        y = "entries (mean over queries and heads)"
        about = "The error of a layer is the mean of its heads' errors, which is an upper bound."
        return plots.lines("sparsity", title, points, x="layer", y=y, about=about)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "layer", "tokens", *(f"{share}%" for share in SHARES), "above 1% of max"]
        return head, [
            [*cells(r, "task", "layer"), *cells(r, "tokens", *NAMES[:-1], digits=1), fixed(r["above"])]
            for r in _by_layer(rows)
        ]


def _by_layer(rows: Sequence[Row]) -> list[Row]:
    """Return a row of results per task and layer, with means over the layer's heads."""
    heads: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        heads.setdefault((row["task"], row["layer"]), []).append(row)
    return [
        {"task": task, "layer": layer} | {n: _mean([r[n] for r in of]) for n in (*ALL, *(f"{n}_se" for n in ALL))}
        for (task, layer), of in heads.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
