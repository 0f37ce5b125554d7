"""Compares methods on a task: reads each batch of traces with the full cache, and then with each method and budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.engine.model.load import LoadedModel
from kvbench.eviction import choose
from kvbench.replay.choices import FLOOR, ORACLE, Chosen
from kvbench.replay.comparison import Comparison, TraceFigures
from kvbench.replay.figures import figures
from kvbench.replay.parts import Parts
from kvbench.replay.reader import OnRead
from kvbench.replay.reference import readings
from kvbench.replay.traces import ForcedTrace

FIGURES = tuple(field.name for field in fields(TraceFigures) if field.name != "trace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of replaying one task, as three tables.

    `rows` has a row per cell (method and budget). `traces` has a row per cell and trace. `heads` has a row per cell,
    layer and query head.
    """

    rows: list[dict[str, Any]]
    traces: list[dict[str, Any]]
    heads: list[dict[str, Any]]


def replay(
    loaded: LoadedModel,
    task: str,
    traces: Sequence[ForcedTrace],
    chosen: Sequence[Chosen],
    *,
    interval: int,
    max_tokens: int,
    on_read: OnRead = lambda text, traces, tokens: None,
    parts: Parts | None = None,
    on_kept: Callable[[int], None] = lambda count: None,
) -> Result:
    """Read every trace with every method and budget in `chosen`, and return the figures.

    In `chosen`, the oracle `golden` must come before the other methods, as in `choices.plan`. max_tokens: the most
    tokens that a prompt and its answer have together. on_read: called after each batch. parts: the finished batches of
    an earlier command, which are not read again. on_kept: called for each of them with the number of its readings.
    """
    parts = parts or Parts()
    cells: dict[Chosen, list[TraceFigures]] = {c: [] for c in chosen}
    for batch, batch_readings in readings(loaded, traces, chosen, interval=interval, max_tokens=max_tokens):
        what = _named(task, batch, chosen, interval, max_tokens)
        if (kept := parts.read(what)) is None:
            found: dict[Chosen, list[TraceFigures]] = {c: [] for c in chosen}
            for c, reader, part, future in batch_readings:
                held = part.oracle.setdefault(c.budget, []) if c.method == ORACLE else None
                comparison = Comparison(part, reader.setup.copies, part.oracle.get(c.budget), held)
                reader.read(part.traces, comparison, future)
                found[c] += comparison.figures()
                on_read(c.label, len(part.traces), sum(len(t.answer) for t in part.traces))
            parts.write(what, {k: v for i, c in enumerate(chosen) for k, v in _packed(i, found[c]).items()})
        else:
            found = {c: _unpacked(i, batch, kept) for i, c in enumerate(chosen)}
            on_kept(len(batch) * len(chosen))
        for c in chosen:
            cells[c] += found[c]
    read = {c: cell for c, cell in cells.items() if cell}
    return _result(task, read, {c: _kind(c, interval) for c in read})


def _named(
    task: str, batch: Sequence[ForcedTrace], chosen: Sequence[Chosen], interval: int, max_tokens: int
) -> dict[str, Any]:
    """Return the name of a batch for `Parts`: the traces, the methods and budgets, and the lengths."""
    traces = [[t.request.doc_id, t.sample, t.cluster, list(t.prompt), list(t.answer)] for t in batch]
    methods = [c.columns for c in chosen]
    return {"task": task, "traces": traces, "methods": methods, "interval": interval, "max_tokens": max_tokens}


def _packed(index: int, figures: Sequence[TraceFigures]) -> dict[str, NDArray[Any]]:
    """Return the figures of a batch's traces as arrays by name; the first axis counts the traces, which have
    answers of equal length. index: the place of method and budget in the list of all."""
    return {f"{index}.{name}": np.stack([getattr(f, name) for f in figures]) for name in FIGURES}


def _unpacked(index: int, batch: Sequence[ForcedTrace], kept: Mapping[str, NDArray[Any]]) -> list[TraceFigures]:
    """Return the figures from which `_packed` made the arrays. The traces' scalars become numbers of Python again."""
    columns = {name: kept[f"{index}.{name}"] for name in FIGURES}
    values = {name: column if column.ndim > 1 else column.tolist() for name, column in columns.items()}
    return [TraceFigures(trace=t, **{name: column[i] for name, column in values.items()}) for i, t in enumerate(batch)]


def _kind(c: Chosen, interval: int) -> dict[str, Any]:
    method = choose.make(c.method.name, dict(c.method.options))
    oracle = any(part.oracle for part in (method.during("prefill"), method.during("decode")))
    return {"interval": interval, "decode_bounded": method.decode_bounded, "oracle": oracle}


def _result(task: str, cells: dict[Chosen, list[TraceFigures]], kinds: dict[Chosen, dict[str, Any]]) -> Result:
    rows, traces, heads = [], [], []
    for c, cell in cells.items():
        name = {"task": task, **c.columns}
        floor, oracle = (cells.get(Chosen(method=m, budget=c.budget)) for m in (FLOOR, ORACLE))
        rows.append(name | kinds[c] | figures(cell, (floor, oracle) if floor and oracle else None))
        at = name | {"interval": kinds[c]["interval"]}
        traces += [at | _of_trace(t) for t in cell]
        heads += [at | head for head in _of_heads(cell)]
    return Result(rows=sorted(rows, key=_order), traces=traces, heads=heads)


def _order(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return the sort key of a row of results. Rows without a budget come first, then rows whose budget is a share of
    the prompt, then those whose budget is a number of entries. Rows with equal budgets are sorted by loss ratio."""
    ratio = row["loss_ratio"]
    return row["budget"] or 0, row["budget_share"] or 0, float("inf") if ratio is None else ratio


def _of_trace(t: TraceFigures) -> dict[str, Any]:
    rows = max(1, t.rows)
    return {
        "doc_id": t.trace.request.doc_id,
        "sample": t.trace.sample,
        "cluster": t.trace.cluster,
        "prompt_tokens": len(t.trace.prompt),
        "tokens": len(t.loss),
        "loss": float(t.loss.mean()),
        "loss_full": float(t.loss_full.mean()),
        "kl": float(t.divergence.mean()),
        "top1": float(t.agrees.mean()),
        "cosine": float(t.cosine.mean()) / rows,
        "mass_lost": t.lost / rows,
        "overlap": t.overlap / t.choices if t.choices else None,
        "entries_mean": t.entries / rows,
    }


def _of_heads(cell: list[TraceFigures]) -> list[dict[str, Any]]:
    """Return, for each layer and query head, a dictionary with the cosine between the head's outputs under eviction and
    with the full cache. The cosine is a mean over tokens and traces.

    cell: the figures of all traces of one method and budget. In the results, `layer` counts only the layers in which
    methods evict, from 0.
    """
    rows = max(1, sum(t.rows for t in cell))
    mean = sum((t.cosine for t in cell[1:]), cell[0].cosine) / rows
    return [
        {"layer": layer, "head": head, "cosine": float(value)}
        for layer, of in enumerate(mean)
        for head, value in enumerate(of)
    ]
