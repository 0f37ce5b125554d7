"""Finds to which kinds of tokens each query head attends, with the full cache.

The attention of the answer's queries is split into five shares, which add up to 1. A far token is neither sink nor
local.

    sink        the first 4 tokens (as in StreamingLLM)
    local       the newest 16 tokens, with the query's own, but without the sinks
    stripe      the 4 far tokens with the most attention over the whole answer: heavy hitters, vertical stripes
    retrieval   the 4 far tokens with the most attention of each query, minus stripe: tokens that change with the query
    dispersed   the rest

A head's kind is its largest share. `retrieval` is never negative: the 4 best far tokens of each query get at least as
much of its attention as the 4 tokens of `stripe`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import AttentionAnalysis, Row, Study, Table, Window, cells, fixed, register
from kvbench.report.plots.figure import Figure

SINKS, LOCAL, LARGEST = 4, 16, 4
KINDS = ("sink", "local", "stripe", "retrieval", "dispersed")


@register("patterns")
class Patterns(AttentionAnalysis):
    about = "kinds of heads: sink, local, stripe, retrieval, dispersed"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self._sums: dict[int, dict[str, torch.Tensor]] = {}  # by layer, over the windows of an answer: [b, Hq]
        self._far: dict[int, torch.Tensor] = {}  # by layer: attention paid to far tokens, [b, Hq, N]

    def window(self, window: Window) -> None:
        weights = window.weights
        n = weights.shape[-1]
        query = torch.arange(window.first, n, device=weights.device)[:, None]
        token = torch.arange(n, device=weights.device)
        sink, local = (token < SINKS).expand(len(query), n), (token >= SINKS) & (query - token < LOCAL)
        far = weights.masked_fill(sink | local, 0.0)
        found = {
            "sink": (weights * sink).sum(dim=(-1, -2)),
            "local": (weights * local).sum(dim=(-1, -2)),
            "own": far.topk(min(LARGEST, n), dim=-1).values.sum(dim=(-1, -2)),
            "far": far.sum(dim=(-1, -2)),
        }
        before = self._sums.get(window.layer) if window.index else None
        self._sums[window.layer] = {k: v + before[k] if before else v for k, v in found.items()}
        columns = far.sum(dim=-2)
        if window.index:
            known = self._far[window.layer]
            columns[..., : known.shape[-1]] += known
        self._far[window.layer] = columns
        if window.index == window.count - 1:
            self._finish(window)

    def _finish(self, window: Window) -> None:
        sums, columns = self._sums.pop(window.layer), self._far.pop(window.layer)
        stripe = columns.topk(min(LARGEST, columns.shape[-1]), dim=-1).values.sum(dim=-1)
        parts = (sums["sink"], sums["local"], stripe, sums["own"] - stripe, sums["far"] - sums["own"])
        shares = torch.stack(parts).clamp_min(0.0)  # [5, b, Hq]
        shares /= shares.sum(dim=0)
        kind = shares.argmax(dim=0)
        for head in range(shares.shape[-1]):
            self.tally.add(
                (window.layer, head),
                window.traces,
                answers=1.0,
                **{name: shares[i, :, head] for i, name in enumerate(KINDS)},
                **{f"is_{name}": (kind[:, head] == i).float() for i, name in enumerate(KINDS)},
            )

    def rows(self) -> list[Row]:
        """Return a row of results per layer and query head: the head's mean shares, its kind, and in the column
        `answers` the share of answers in which the head has this kind."""
        found = []
        for row in self.means((*KINDS, *(f"is_{kind}" for kind in KINDS)), "answers", "layer", "head"):
            kind = max(KINDS, key=row.__getitem__)
            place = {name: row[name] for name in ("task", "layer", "head")}
            shares = {part: row[part] for name in KINDS for part in (name, f"{name}_se")}
            found.append(place | {"kind": kind, "answers": row[f"is_{kind}"]} | shares)
        return found

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {"panel": row["task"], "bar": f"layer {row['layer']} head {row['head']}", "part": name, "y": row[name]}
            for row in rows
            for name in KINDS
        ]
        title = "Where the attention of each query head goes, full cache"
        return plots.bars("patterns", title, points, x="share of the attention")

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "layer", "head", "kind", "answers", *KINDS]
        return head, [
            [*cells(r, "task", "layer", "head", "kind"), fixed(r["answers"], 2), *cells(r, *KINDS)] for r in rows
        ]
