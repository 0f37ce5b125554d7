"""Base class of the mathematics tasks: prompt styles, sampling, and scoring of a final answer in a LaTeX box.

A task names its data and sets the class attributes that differ; see ``tasks/competitions.py``. The scores come from
`kvbench.scoring.math`, which applies math-verify: to the whole output for `score`, and only to the last box after the
thinking block for `score_strict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvbench.scoring.math import score_math
from kvbench.task import DataSource, Doc, GenSpec, Output, Score, Task, Turn
from kvbench.taskkit.prompts import STYLES, Style
from kvbench.taskkit.rows import documents, reasoning


class MathTask(Task):
    """The base class of tasks with mathematics problems, each with one final answer. Subclasses name the data."""

    version = "2"  # stop strings of the style lm_eval, marker of simple_evals
    suite = "math"
    prompt_styles = tuple(name for name in STYLES if name != "plain")
    samples: ClassVar[int] = 32  # default of --samples
    max_new_tokens: ClassVar[int] = 32768  # default of --max-new-tokens
    integer: ClassVar[bool] = False  # every reference is an integer: the score `int_match` compares integers
    column: ClassVar[str] = "problem"  # the data's column with the problem

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        assert self.manifest is not None
        rows = source.rows(self.name, self.manifest)[:limit]
        return documents(self, rows, lambda row: self._doc(row, style))

    def gen(self, model_type: str) -> GenSpec:
        return reasoning(model_type, n=self.samples, max_new_tokens=self.max_new_tokens)

    def score(self, doc: Doc, output: Output) -> Score:
        return score_math(
            stopped(doc, output.text),
            doc.reference,
            thinking=output.thinking,
            integer=self.integer,
            marker=doc.meta.get("marker", ""),
        )

    def reference(self, row: Mapping[str, Any]) -> str:
        """Return the right answer to a problem of the data (`row`) as text: LaTeX or a number. Some copies of the data
        on the hub store the answer as a number; it is converted here."""
        return str(row["answer"])

    def meta(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `category` of a problem (`row`) and other fields by which a report may group; by default none."""
        return {}

    def _doc(self, row: Mapping[str, Any], style: str) -> Doc:
        chosen = STYLES[style]
        turns, own = (chosen.turn(str(row[self.column])),), self.gen("").stop
        return math_doc(str(row["id"]), turns, self.reference(row), chosen, meta=self.meta(row), stop=own)


def math_doc(
    doc_id: str,
    turns: tuple[Turn, ...],
    reference: str,
    style: Style,
    *,
    meta: Mapping[str, Any] | None = None,
    stop: Sequence[str] = (),
) -> Doc:
    """Return a mathematics question with the stop strings and the answer marker of its prompt style, by which
    `MathTask` scores answers. meta: other fields. stop: the task's own stop strings; those of the style are added."""
    return Doc(
        doc_id=doc_id,
        turns=turns,
        reference=reference,
        meta=dict(meta or {}) | ({"marker": style.marker} if style.marker else {}),
        gen={"stop": (*stop, *style.stop)} if style.stop else {},
    )


def stopped(doc: Doc, text: str) -> str:
    """Return an output up to the earliest of its question's stop strings. Outputs of an older version of kvbench, which
    knew no such stop strings, may go on after one."""
    for stop in doc.gen.get("stop", ()):
        text = text.split(stop, 1)[0]
    return text
