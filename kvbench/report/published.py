"""Scores that papers print (`kvbench.sources.published`), and the cells that they belong to.

    for printed in of_cell(table, cell, models, lengths): ...

A printed score belongs to a cell of the same model, task, method and budget; if the paper states its limit on the
tokens of an answer, the cell's rows must have the same limit. Papers used their own code and budgets, and print no
error bars.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from kvbench.config.run_config import MethodChoice
from kvbench.errors import KVBenchError
from kvbench.eviction import choose
from kvbench.eviction.budget import named
from kvbench.report.cells import ScoreCell
from kvbench.sources.published import Published, published

SCORE = re.compile(r"accuracy|pass@1( \(.*\))?")  # not "pass@1 gain"
SAMPLES = re.compile(r"(?:avg of )?(\d+)(?: samples)?\)")
LENGTH = re.compile(r"max output length (\d+)")
TASKS = {"gpqa": "gpqadiamond", "livecodebenchv3": "livecodebenchreleasev3"}
METHODS = {  # names that papers use and that are not aliases in kvbench
    "full-kv": "full",
    "snapkv (decode)": "snapkv-decode",
    "g-kv + untrained": "gkv",
    "golden eviction (oracle)": "golden(within=mean)",
    "foresightkv (w/o rl)": "foresightkv",
    "foresightkv w/o rl, input=attn+kv, sampling=top-k+multinomial": "foresightkv",
    "foresightkv w/o rl, input=attn, sampling=top-k+multinomial": "foresightkv(features=attn)",
    "foresightkv w/o rl, input=attn+kv, sampling=multinomial": "foresightkv(pool=1000.0)",
    "foresightkv w/o rl, input=attn+kv, sampling=top-k": "foresightkv(sampling=False)",
}
REWARD = "foresightkv, rl reward "
# DuoAttention by the budget that a paper states. The label has `sparsity`, the share of streaming heads; with it, `duo`
# takes no budget.
STREAMING = {"1024": "duo(sparsity=0.75)", "2048": "duo(sparsity=0.5)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """A score that a paper prints. model, task, method, budget: as kvbench names them; `model` and `task` have only
    lower-case letters and digits, because papers spell them in several ways.

    row: the score as the paper prints it. samples: the number of answers per question. longest: the limit on the tokens
    of an answer. `samples` and `longest` are None if the paper does not state them. part: how many questions the paper
    asked, if it is known to have asked only a part of the benchmark; otherwise None.
    """

    model: str
    task: str
    method: str
    budget: str
    row: Published
    value: float  # a share
    samples: int | None
    longest: int | None
    part: int | None

    @property
    def source(self) -> str:
        return f"{self.row.paper}, {self.row.table_or_figure}"

    @property
    def notes(self) -> str:
        part = "" if self.part is None else f"only {self.part} of the benchmark's questions"
        return "; ".join(filter(None, (self.row.notes, part)))


def of_cell(task: str, cell: ScoreCell, models: Collection[str], lengths: Collection[int]) -> Iterator[Printed]:
    """Yield the printed scores that belong to a cell of a task. models: the models of the table's rows; if there are
    several, no score belongs to the cell. lengths: the limits on the tokens of an answer in these rows."""
    if len(models) != 1:
        return
    (model,) = models
    method = without_weights(cell.method)
    for printed in of_task(task, model):
        same = (printed.method, printed.budget) == (method, named(cell.budget))
        if same and (printed.longest is None or set(lengths) == {printed.longest}):
            yield printed


def of_task(task: str, model: str) -> list[Printed]:
    """Return the printed scores of a model on a task."""
    place = plain(model.rsplit("/", 1)[-1]), plain(task)
    return [printed for printed in every() if (printed.model, printed.task) == place]


@functools.cache
def without_weights(label: str) -> str:
    """Return the label of a cell's method without the option that names its file of weights: papers name no files."""
    try:
        method = choose.from_label(label)
    except KVBenchError:  # of a plug-in that is not loaded
        return label
    weights, name = method.weights(), label.partition("(")[0].strip()
    options = choose.changed(name, method)
    kept = tuple(o for o in options if weights is None or o[1] != weights.path)
    return MethodChoice(name=name, options=kept).label


@functools.cache
def every() -> tuple[Printed, ...]:
    """Return every accuracy and pass@1 in percent that papers print for methods of kvbench, at a budget in entries or
    with the full cache. Ranges are left out."""
    return tuple(printed for row in published() if (printed := _printed(row)) is not None)


def no_match(models: Iterable[str]) -> str:
    """Return the sentence for a report in which no published score belongs to a cell. models: the report's models."""
    of = f"None of the {len(every())} published scores is of model {', '.join(models)}"
    return f"{of} with a task, method and budget of this report."


def _printed(row: Published) -> Printed | None:
    """Return a published number as a score. The result is None in four cases: the number is no accuracy or pass@1 in
    percent; it is a range; its budget is neither in entries nor the full cache; kvbench has no such method."""
    if row.unit != "%" or not SCORE.fullmatch(row.metric) or (row.entries is None and row.budget != "full"):
        return None
    entries = named(None) if row.entries is None else str(row.entries)
    method = label_of(row.method.lower(), entries)
    try:
        value = float(row.value) / 100
    except ValueError:  # a range
        return None
    if method is None:
        return None
    samples, longest = SAMPLES.search(row.metric), LENGTH.search(row.notes)
    task = plain(row.task)
    return Printed(
        model=plain(row.model),
        task=TASKS.get(task, task),
        method=method,
        budget=named(None) if method in STREAMING.values() else entries,
        row=row,
        value=value,
        samples=int(samples[1]) if samples else None,
        longest=int(longest[1]) if longest else None,
        part=int(row.questions) if row.questions else None,
    )


def label_of(name: str, budget: str) -> str | None:
    """Return the label that kvbench gives to a paper's method; None if kvbench has no such method, or if the method is
    DuoAttention at a budget that STREAMING lacks. name: the method as the paper names it, in lower case. budget: the
    budget as text."""
    if name == "duoattention":
        return STREAMING.get(budget)
    if name.startswith(REWARD):
        return "foresightkv"
    try:
        return METHODS.get(name) or choose.canonical(name)
    except KVBenchError:
        return None


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
