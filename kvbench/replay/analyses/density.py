"""Measures where in the sequence the kept tokens are: a histogram of their relative positions, by method and budget.

The relative position of token p among s tokens read so far is p / s: 0 is the prompt's first token, 1 the newest. The
histogram counts the kept entries of all layers and KV heads. A block is `--interval` successive tokens of the answer.
Entries are counted when a block begins, after any eviction at this point, and when the answer ends. They are counted
only after more tokens were read than fit into the budget. Per bin of positions:

    density  the bin's share of all kept entries, divided by its share of all tokens read; 1: no preference for the bin
    kept     share of the bin's tokens that are kept, mean over layers and heads
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import MethodAnalysis, Moment, Row, Table, fixed, panel, register, size
from kvbench.report.plots.figure import Figure

BINS = 20


@register("density")
class Density(MethodAnalysis):
    about = "share of tokens kept, from the oldest to the newest, by method"

    def moment(self, moment: Moment) -> None:
        if not moment.due:
            return
        layers, b, heads, seen = moment.held.shape
        bins = torch.arange(seen, device=moment.held.device) * BINS // seen
        held = moment.held.sum(dim=(0, 2)).double()  # [b, seen]
        kept = held.new_zeros(b, BINS).index_add_(1, bins, held)
        tokens = bins.bincount(minlength=BINS).tolist()
        when = "end" if moment.index is None else "evictions"
        for i in range(BINS):
            share, uniform = kept[:, i] / held.sum(dim=1), tokens[i] / seen
            every = float(tokens[i] * layers * heads)
            sums = {"share": share, "uniform": uniform, "kept": kept[:, i], "entries": every}
            self.tally.add((moment.chosen, when, i), moment.traces, **sums)

    def rows(self) -> list[Row]:
        """Return rows of results per method, budget and bin of positions: one for the moments when blocks begin, one
        for the end of the answer. Columns low and high: the bin's limits."""
        ratios = {"density": ("share", "uniform"), "kept": ("kept", "entries")}
        return [
            {
                "task": self.study.task,
                **chosen.columns,
                "when": when,
                "low": i / BINS,
                "high": (i + 1) / BINS,
                **figures,
            }
            for (chosen, when, i), figures in self.tally.figures(**ratios)
        ]

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {
                "panel": panel(row),
                "line": row["method"],
                "x": (row["low"] + row["high"]) / 2,
                **plots.with_error(row, "kept"),
            }
            for row in rows
            if row["when"] == "evictions"
        ]
        x, y = "position / tokens read (0: oldest, 1: newest)", "share of tokens kept"
        return plots.lines("density", "Positions of kept tokens when blocks begin", points, x=x, y=y)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        """Return the mean share of tokens kept in each fifth of the sequence, in a line per task, method, budget and
        value of the column `when`."""
        fifths: dict[tuple[str, ...], dict[int, list[float]]] = {}
        for row in rows:
            if row["kept"] is None:  # short sequences may leave a bin without tokens
                continue
            key = (row["task"], row["method"], size(row), row["when"])
            fifths.setdefault(key, {}).setdefault(int(row["low"] * 5 + 1e-9), []).append(row["kept"])
        head = ["task", "method", "budget", "when", "0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1"]
        return head, [
            [*key, *(fixed(sum(found[i]) / len(found[i]) if found.get(i) else None) for i in range(5))]
            for key, found in fifths.items()
        ]
