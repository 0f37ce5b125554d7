"""Measures the Token Retention Ratio (G-KV, arXiv 2512.00504) of right answers: cache length / sequence length.

    ratio   entries held per layer and KV head after the answer was read, divided by the tokens read
    script  the released script's ratio: min(1, C / (P + O)), with budget C, P prompt tokens and O answer tokens

Both are means over the answers whose score is 1. All methods read the same answers, which were generated with the full
cache. The paper instead averages over the right answers that each method generated itself. With ``--run`` there is also
this mean, over the answers that the run stored:

    own     mean of the released script's ratio over the right answers that the run generated with the method and budget
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.eviction.budget import entries
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import MethodAnalysis, Moment, Row, Table, cells, panel, register, size
from kvbench.report.plots.figure import Figure


@register("retention-ratio")
class RetentionRatio(MethodAnalysis):
    about = "cache length / sequence length of right answers, by method"
    scored = True

    def moment(self, moment: Moment) -> None:
        if moment.index is not None:
            return
        held = moment.held.sum(dim=-1).mean(dim=(0, 2)) * moment.copies  # [b]
        for i, place in enumerate(moment.traces):
            trace = self.study.traces[place]
            right = self.study.right.get((trace.request.doc_id, trace.sample))
            total = len(trace.prompt) + len(trace.answer)
            budget = moment.chosen.budget
            script = 1.0 if budget is None else min(1.0, entries(budget, len(trace.prompt)) / total)
            sums = {"right": 1.0, "ratio": float(held[i]) / moment.seen, "script": script}
            if not right:
                sums = dict.fromkeys(sums, 0.0)
            self.tally.add((moment.chosen, moment.bounded), [place], answers=float(right is not None), **sums)

    def rows(self) -> list[Row]:
        """Return a row of results per method and budget. Columns `answers` and `right`: the number of answers that
        have a score, and of those with the score 1."""
        return [
            {
                "task": self.study.task,
                **chosen.columns,
                "decode_bounded": bounded,
                **{name: int(self.tally.total((chosen, bounded), name)) for name in ("answers", "right")},
                **figures,
                **_own(self.study.own.get(chosen, ())),
            }
            for (chosen, bounded), figures in self.tally.figures(ratio=("ratio", "right"), script=("script", "right"))
        ]

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {
                "panel": panel(row),
                "bar": f"{row['method']} ({row['right']}/{row['answers']})",
                "part": "ratio",
                **plots.with_error(row, "ratio"),
            }
            for row in rows
        ]
        title = "Token retention ratio of right answers"
        about = "In brackets: the number of right answers, over which the bar is a mean, and of all scored answers."
        return plots.bars("retention-ratio", title, points, x="cache length / sequence length", about=about)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "method", "budget", "right", "ratio", "se", "script", "own right", "own", "own se"]
        return head, [
            [
                r["task"],
                r["method"] + ("" if r["decode_bounded"] or size(r) == "-" else " *"),
                size(r),
                f"{r['right']}/{r['answers']}",
                *cells(r, "ratio", "ratio_se", "script"),
                f"{r['own_right']}/{r['own_answers']}" if r["own_answers"] else "-",
                *cells(r, "own", "own_se"),
            ]
            for r in rows
        ]


def _own(answers: Sequence[tuple[str, float | None]]) -> Row:
    """Return the columns about answers that a run generated with the method. answers: see `Study.own`."""
    from kvbench.replay.figures import jackknife, numbered

    right = [(cluster, ratio) for cluster, ratio in answers if ratio is not None]
    row: Row = {"own_answers": len(answers), "own_right": len(right), "own": None, "own_se": None}
    if right:
        sums = {"ratio": [ratio for _, ratio in right], "right": [1.0] * len(right)}
        clusters = numbered(cluster for cluster, _ in right)
        row["own"], row["own_se"] = jackknife(sums, clusters, lambda s: s["ratio"] / s["right"])
    return row
