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
from typing import TYPE_CHECKING

from kvbench.eviction.budget import entries
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import MethodAnalysis, Moment, Row, Study, Table, cells, panel, register, size
from kvbench.report.plots.figure import Figure

if TYPE_CHECKING:
    from kvbench.replay.choices import Chosen


@register("retention-ratio")
class RetentionRatio(MethodAnalysis):
    about = "cache length / sequence length of right answers, by method"
    scored = True

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self._seen: dict[Chosen, int] = {}
        self._bounded: dict[Chosen, bool] = {}

    def moment(self, moment: Moment) -> None:
        if moment.index is not None:
            return
        held = moment.held.sum(dim=-1).mean(dim=(0, 2)) * moment.copies  # [b]
        for i, place in enumerate(moment.traces):
            trace = self.study.traces[place]
            right = self.study.right.get((trace.request.doc_id, trace.sample), False)
            self._bounded[moment.chosen] = moment.bounded
            self._seen[moment.chosen] = self._seen.get(moment.chosen, 0) + 1
            total = len(trace.prompt) + len(trace.answer)
            budget = moment.chosen.budget
            script = 1.0 if budget is None else min(1.0, entries(budget, len(trace.prompt)) / total)
            of = {"right": 1.0, "ratio": float(held[i]) / moment.seen, "script": script} if right else {"right": 0.0}
            self.tally.add((moment.chosen,), [place], **{"ratio": 0.0, "script": 0.0} | of)

    def rows(self) -> list[Row]:
        """Return a row of results per method and budget.

        Columns: answers (number of answers read), right (how many of them have the score 1; `ratio` and `script` are
        means over these), own_answers and own_right (the same numbers for answers that the run generated with the
        method).
        """
        return [
            {
                "task": self.study.task,
                **chosen.columns,
                "decode_bounded": self._bounded[chosen],
                "answers": self._seen[chosen],
                "right": int(self.tally.total((chosen,), "right")),
                **figures,
                **_own(self.study.own.get(chosen, ())),
            }
            for (chosen,), figures in self.tally.figures(ratio=("ratio", "right"), script=("script", "right"))
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
        about = "In brackets: the number of right answers, over which the bar is a mean, and of all answers."
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
