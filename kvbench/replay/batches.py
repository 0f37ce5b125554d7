"""The comparison of one task: read each batch of traces once with the full cache, then once per method and budget.

result = replay(loaded, "walk", traces, chosen, interval=128, max_tokens=400)
result.rows          # one for each method and budget: figures with standard errors
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.eviction.budget import label
from kvbench.replay.choices import FLOOR, FULL, ORACLE, Chosen
from kvbench.replay.comparison import Comparison, Held, TraceFigures
from kvbench.replay.figures import figures
from kvbench.replay.reader import Tick, TraceReader
from kvbench.replay.reference import Reference, batches, read_full
from kvbench.replay.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of one task's replay as plain rows: one per cell, per cell and trace, and per cell and query head."""

    rows: list[dict[str, Any]]
    traces: list[dict[str, Any]]
    heads: list[dict[str, Any]]


def replay(
    loaded: LoadedModel,
    task: str,
    traces: Sequence[Trace],
    chosen: Sequence[Chosen],
    *,
    interval: int,
    max_tokens: int,
    tick: Tick = lambda text, traces, tokens: None,
) -> Result:
    """Read every trace with every chosen method.

    chosen: as `choices.plan` returns it, with the yardsticks `golden` and `random` of each budget first.
    """
    readers = {c: TraceReader.of(loaded, c, interval=interval, max_tokens=max_tokens) for c in chosen}
    full = TraceReader.of(loaded, FULL, interval=interval, max_tokens=max_tokens)
    found: dict[Chosen, list[TraceFigures]] = {c: [] for c in chosen}
    extreme = any(reader.within == "max" for reader in readers.values())
    with torch.inference_mode():
        for batch in batches(traces, loaded, interval):
            reference = read_full(full, batch, extreme=extreme)
            future = reference.future()
            oracle: dict[str, Held] = {}  # by budget
            for c, reader in readers.items():
                size = label(c.budget) if c.budget else ""
                if c.method == ORACLE:
                    oracle[size] = []
                held = oracle[size] if c.method == ORACLE else None
                found[c] += _read(reader, reference, future if reader.within else {}, oracle.get(size), held)
                tick(c.label, len(batch), sum(len(t.answer) for t in batch))
    return _result(task, found, readers, interval)


def _read(
    reader: TraceReader,
    reference: Reference,
    future: dict[str, torch.Tensor],
    oracle: Held | None,
    held: Held | None,
) -> list[TraceFigures]:
    """Read the batch with one method and return the figures of its traces. oracle, held: see `Comparison`."""
    copies = reader.setup.copies
    if reader.together:
        heard = Comparison(reference, copies, oracle, held)
        reader.read(reference.traces, heard, future)
        return heard.figures()
    found: list[TraceFigures] = []
    for i, trace in enumerate(reference.traces):
        heard = Comparison(reference.pick(i), copies, oracle and [block[:, i : i + 1] for block in oracle])
        reader.read([trace], heard)
        found += heard.figures()
    return found


def _result(
    task: str, found: dict[Chosen, list[TraceFigures]], readers: dict[Chosen, TraceReader], interval: int
) -> Result:
    rows, traces, heads = [], [], []
    for c, cell in found.items():
        reader = readers[c]
        name = {"task": task, **c.columns}
        floor, oracle = (found.get(Chosen(method=m, budget=c.budget)) for m in (FLOOR, ORACLE))
        yardsticks = (floor, oracle) if floor and oracle else None
        kind = {
            "interval": interval,
            "decode_bounded": reader.method.decode_bounded,
            "oracle": reader.within is not None,
        }
        rows.append(name | kind | figures(cell, yardsticks))
        traces += [name | _of_trace(t) for t in cell]
        heads += [name | head for head in _of_heads(cell)]
    return Result(rows=sorted(rows, key=_order), traces=traces, heads=heads)


def _order(row: dict[str, Any]) -> tuple[float, float, float]:
    """Sort key of a row: rows without a budget first, then by budget, then by loss ratio."""
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
    """Return the mean cosine per query head; `layer` counts only the layers that are evicted."""
    rows = max(1, sum(t.rows for t in cell))
    mean = sum((t.cosine for t in cell[1:]), cell[0].cosine) / rows
    return [
        {"layer": layer, "head": head, "cosine": float(value)}
        for layer, of in enumerate(mean)
        for head, value in enumerate(of)
    ]
