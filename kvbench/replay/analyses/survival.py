"""Measures whether a method still holds the tokens to which the answer attends: the share held, by age and KV head.

A block is `--interval` successive tokens of the answer. With the full cache, the block's queries pay attention to the
tokens before the block. The attended tokens, per layer and KV head, are the fewest of these tokens that carry 90%
(`api.MASS`) of this attention. The age of a token is its distance from the block's beginning; the newest token before
the block has age 1. A block counts only if more tokens than fit into the budget were read before it, so all methods at
one budget have the same blocks.

    share  share of the attended tokens of this age that the method holds when the block begins
    mass   share of the attention paid to tokens of this age that goes to tokens held when the block begins
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import MethodAnalysis, Moment, Row, Table, fixed, panel, register, size, top_mass
from kvbench.report.plots.figure import Figure

YOUNGEST = 16  # ages up to this form the first bin; each further bin ends at twice the age


@register("survival")
class Survival(MethodAnalysis):
    about = "attended tokens that are still held, by age, head and method"

    def moment(self, moment: Moment) -> None:
        if moment.paid is None or not moment.due:
            return
        layers, _, heads, seen = moment.held.shape
        attended = top_mass(moment.paid).to(moment.held.dtype)
        parts = {
            "attended": attended,
            "survived": attended * moment.held,
            "paid": moment.paid,
            "found": moment.paid * moment.held,
        }
        oldest = YOUNGEST
        while oldest < 2 * seen:
            ages = slice(max(0, seen - oldest), seen - oldest // 2 if oldest > YOUNGEST else seen)
            sums = {name: part[..., ages].sum(dim=-1) for name, part in parts.items()}  # [L, b, Hk]
            self.tally.add(
                (moment.chosen, oldest, None, None),
                moment.traces,
                **{name: s.sum(dim=(0, 2)) for name, s in sums.items()},
            )
            for layer in range(layers):
                for head in range(heads):
                    key = (moment.chosen, oldest, moment.layers[layer], head)
                    self.tally.add(key, moment.traces, **{name: s[layer, :, head] for name, s in sums.items()})
            oldest *= 2

    def rows(self) -> list[Row]:
        """Return rows of results per method, budget and bin of ages: a row for all heads (layer and head are None), and
        a row per layer and KV head. Columns: age (the bin's largest), attended (number of attended tokens)."""
        ratios = {"share": ("survived", "attended"), "mass": ("found", "paid")}
        figures = dict(self.tally.figures(**ratios))
        cells = list(dict.fromkeys(key[0] for key in figures))
        every = (None, None)
        heads = sorted({key[2:] for key in figures} - {every})
        ages = sorted({key[1] for key in figures})
        return [
            {
                "task": self.study.task,
                **key[0].columns,
                "age": key[1],
                "layer": key[2],
                "head": key[3],
                "attended": int(self.tally.total(key, "attended")),
                **figures[key],
            }
            for place, cell, age in itertools.product((every, *heads), cells, ages)
            if (key := (cell, age, *place)) in figures
        ]

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = []
        heads: dict[str, dict[str, dict[str, list[Row]]]] = {}
        for row in rows:
            if row["layer"] is None:
                line = {"panel": panel(row), "line": row["method"], "x": row["age"], "attended": row["attended"]}
                points.append(line | plots.with_error(row, "share"))
            else:
                head = f"{row['layer']}.{row['head']}"
                heads.setdefault(panel(row), {}).setdefault(row["method"], {}).setdefault(head, []).append(row)
        cells = {
            name: {m: {h: _over_ages(of) for h, of in found.items()} for m, found in methods.items()}
            for name, methods in heads.items()
        }
        title, value = "Attended tokens still held when blocks begin", "share of attended tokens"
        by_age = plots.lines(
            "survival", f"{title}, by age", points, x="age (tokens, up to)", y=value, about="Over all heads.", log=True
        )
        return by_age + plots.heat("survival-heads", f"{title}, by KV head", cells, x="layer.head", value=value)

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        found: dict[tuple[str, ...], dict[int, Row]] = {}
        for row in rows:
            if row["layer"] is None:
                found.setdefault((row["task"], row["method"], size(row)), {})[row["age"]] = row
        ages = sorted({age for of in found.values() for age in of})
        head = ["task", "method", "budget", *(f"age {age}" for age in ages), "all"]
        return head, [
            [*key, *(fixed(of[age]["share"] if age in of else None) for age in ages), fixed(_over_ages([*of.values()]))]
            for key, of in found.items()
        ]


def _over_ages(rows: Sequence[Row]) -> float | None:
    attended = sum(row["attended"] for row in rows)
    return sum(row["share"] * row["attended"] for row in rows if row["attended"]) / attended if attended else None
