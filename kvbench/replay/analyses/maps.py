"""Draws heat maps of one answer: to which tokens each part of the answer attends, by layer and KV head, with the full
cache.

After ForesightKV (arXiv 2602.03203, Figure 1). The answer is the first of the task; `--sample ID` names another
question. Queries (tokens of the answer) and tokens (prompt and answer) are each cut into at most `SIDE` stretches of
equal length. A square of the map is the attention that a stretch of queries pays to a stretch of tokens. It is summed
over the tokens, and averaged over the queries and over the query heads of a group. So the squares of a stretch of
queries add up to 1. The table has all KV heads of the layers in which methods evict. The figure has up to `LAYERS` of
these layers with up to `HEADS` KV heads each, evenly spread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import AttentionAnalysis, Row, Study, Table, Window, cells, register
from kvbench.report.plots.figure import Figure

SIDE, LAYERS, HEADS = 32, 4, 2


@register("maps")
class Maps(AttentionAnalysis):
    about = "heat maps of the attention of one answer"
    file = "parquet"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        trace = study.traces[0]
        self._prompt, self._queries = len(trace.prompt), len(trace.answer) - 1
        self._sums: dict[int, torch.Tensor] = {}  # by layer: [Hk, stretches of queries, stretches of tokens]

    def window(self, window: Window) -> None:
        if 0 not in window.traces:
            return
        weights = window.weights[window.traces.index(0)]  # [Hq, w, N]
        heads, queries, n = weights.shape
        paid = weights.view(window.kv_heads, heads // window.kv_heads, queries, n).mean(dim=1)
        total = self._prompt + self._queries
        token = torch.arange(n, device=weights.device) // _width(total)
        query = torch.arange(n - queries, n, device=weights.device).sub(self._prompt) // _width(self._queries)
        if window.layer not in self._sums:
            shape = window.kv_heads, -(-self._queries // _width(self._queries)), -(-total // _width(total))
            self._sums[window.layer] = paid.new_zeros(shape)
        by_token = paid.new_zeros(*paid.shape[:2], self._sums[window.layer].shape[2]).index_add_(2, token, paid)
        self._sums[window.layer].index_add_(1, query, by_token)

    def rows(self) -> list[Row]:
        """Return a row of results per layer, KV head and square.

        Columns: row (number of the stretch of queries, from 0), column (number of the stretch of tokens, from 0), query
        and token (positions of the first tokens of these two stretches), share (the square's attention).
        """
        trace, step = self.study.traces[0], _width(self._queries)
        place = {"task": self.study.task, "doc_id": trace.request.doc_id, "sample": trace.sample}
        found = []
        for layer, sums in sorted(self._sums.items()):
            queries = torch.tensor([min(step, self._queries - i * step) for i in range(sums.shape[1])])
            for head, square in enumerate((sums.cpu() / queries[:, None]).tolist()):
                for i, line in enumerate(square):
                    for j, share in enumerate(line):
                        at = {"layer": layer, "head": head, "row": i, "column": j, "query": self._prompt + i * step}
                        at["token"] = j * _width(self._prompt + self._queries)
                        found.append(place | at | {"share": share})
        return found

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        squares: dict[str, dict[str, dict[str, float | None]]] = {}
        layers = _spread(sorted({row["layer"] for row in rows}), LAYERS)
        heads = _spread(sorted({row["head"] for row in rows}), HEADS)
        for row in rows:
            if row["layer"] in layers and row["head"] in heads:
                panel = squares.setdefault(f"{row['task']}, layer {row['layer']}, KV head {row['head']}", {})
                panel.setdefault(str(row["row"]), {})[str(row["column"])] = row["share"] or None
        title = "Attention of one answer, full cache"
        about = "Rows: equal stretches of the answer; columns: of prompt and answer. A row adds up to 1."
        return plots.heat("maps", title, squares, x="stretch of tokens", value="share of attention", about=about)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        """Return, by layer and KV head, the stretch of tokens to which the last stretch of queries attends most."""
        last: dict[tuple[str, int, int], list[Row]] = {}
        for row in rows:
            last.setdefault((row["task"], row["layer"], row["head"]), []).append(row)
        head = ["task", "layer", "head", "query", "token", "share"]
        ends = ([row for row in of if row["query"] == of[-1]["query"]] for of in last.values())
        return head, [cells(max(of, key=lambda row: row["share"]), *head) for of in ends]


def _width(tokens: int) -> int:
    """Return the length of the stretches when `tokens` tokens are cut into at most SIDE stretches."""
    return max(1, -(-tokens // SIDE))


def _spread(items: Sequence[int], most: int) -> set[int]:
    """Return at most `most` of the items, evenly spread."""
    return {items[i * len(items) // most] for i in range(most)} if len(items) > most else set(items)
