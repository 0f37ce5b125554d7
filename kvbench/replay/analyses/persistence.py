"""Measures how long each KV head keeps attending to the same tokens, with the full cache.

After Make Each Token Count (arXiv 2605.09649, Figure 2), which shows that heads forget tokens at different rates. The
attention of a query in a KV head is a mean over the query heads of its group. W_a are the fewest tokens that carry 90%
(`api.MASS`) of the attention of the query at position a. For the queries at the positions a and a + h:

    persistence = |W_a and W_(a+h)| / |W_a|
    chance      = share of the tokens up to position a that are in W_(a+h): the persistence of a random set

The distance h is 1, 2, 4, ... To bound memory, only `ANCHORS` queries of an answer, evenly spread, serve as earlier
queries.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.lazy import torch
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import WINDOW, AttentionAnalysis, Row, Study, Table, Window, fixed, register, top_mass
from kvbench.report.plots.figure import Figure

ANCHORS = 32


@register("persistence")
class Persistence(AttentionAnalysis):
    about = "attended tokens that are attended h steps later, by KV head"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self._anchors: dict[int, dict[int, torch.Tensor]] = {}  # by layer and position a: W_a [b, Hk, a + 1]

    def window(self, window: Window) -> None:
        if window.index == 0:
            self._anchors[window.layer] = {}
        anchors = self._anchors[window.layer]
        b, heads, queries, _ = window.weights.shape
        paid = window.weights.view(b, window.kv_heads, heads // window.kv_heads, queries, -1).mean(dim=2)
        start = window.first - WINDOW * window.index  # position of the answer's first token
        apart = -(-WINDOW * window.count // ANCHORS)
        for query in range(queries):
            at = window.first + query
            steps = [1 << k for k in range((at - start).bit_length())]
            earlier = {step: anchors[at - step] for step in steps if at - step in anchors}
            anchor = (at - start) % apart == 0
            if not earlier and not anchor:
                continue
            wanted = top_mass(paid[:, :, query, : at + 1])  # [b, Hk, at + 1]
            for step, before in earlier.items():
                self._compare(window, step, before, wanted[..., : before.shape[-1]])
            if anchor:
                anchors[at] = wanted

    def _compare(self, window: Window, step: int, before: torch.Tensor, now: torch.Tensor) -> None:
        """Add to the tally, for each trace, `persistence` and `chance` of two queries that are `step` tokens apart.

        before, now: the tokens that carry 90% of the attention of the earlier and of the later query (W_a in the
        module's docstring), as masks [b, Hk, n] over the n tokens up to the earlier query.
        """
        persists = (before & now).sum(dim=-1) / before.sum(dim=-1)
        chance = now.float().mean(dim=-1)
        for head in range(before.shape[1]):
            sums = {"persistence": persists[:, head], "chance": chance[:, head]}
            self.tally.add((window.layer, head, step), window.traces, pairs=1.0, **sums)

    def rows(self) -> list[Row]:
        """Return a row of results per layer, KV head and distance h (column steps). Column pairs: the number of
        compared pairs of queries."""
        return self.means(("persistence", "chance"), "pairs", "layer", "head", "steps", pairs="pairs")

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        squares: dict[str, dict[str, dict[str, float | None]]] = {}
        for row in rows:
            heads = squares.setdefault(row["task"], {})
            heads.setdefault(f"{row['layer']}.{row['head']}", {})[str(row["steps"])] = row["persistence"]
        title = "Attended tokens that are attended to again, by KV head, full cache"
        about = "Rows: layer.head."
        value = "share of attended tokens"
        return plots.heat("persistence", title, squares, x="steps later", value=value, about=about)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        """Return, for each layer and distance h, the mean, least and largest persistence of the layer's KV heads, and
        their mean chance."""
        layers: dict[tuple[str, int, int], list[Row]] = {}
        for row in rows:
            layers.setdefault((row["task"], row["layer"], row["steps"]), []).append(row)
        head = ["task", "layer", "steps", "persistence", "least", "most", "chance"]
        lines = []
        for (task, layer, steps), of in layers.items():
            shares, chance = [row["persistence"] for row in of], [row["chance"] for row in of]
            figures = (sum(shares) / len(of), min(shares), max(shares), sum(chance) / len(of))
            lines.append([task, str(layer), str(steps), *map(fixed, figures)])
        return head, lines
