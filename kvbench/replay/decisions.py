"""Records which tokens each method keeps at each eviction, while it reads its own stored answers again.

    rows = record(loaded, work, answers(folder, "walk", names), config, say, tick)

Reading decides as generation did, up to rounding (`kvbench.replay.reader`). A recording must also agree with what the
run measured: as many tokens, as many evictions, the first after as many tokens. Otherwise the answer is left out.
A stored answer lacks its end token, so an eviction after the last token, which nothing reads, is not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvbench.config.run_config import RunConfig
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError
from kvbench.eviction import choose
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.traces import ForcedTrace, read_trace
from kvbench.runner.workload import TaskWork
from kvbench.store import read_rows, read_texts
from kvbench.store.decisions import Decisions

MOST_LAYERS = 8  # evenly spread
Notice = Callable[[str], None]


def check(config: RunConfig) -> None:
    """Raise UserError for a run whose evictions a reading does not repeat."""
    for name, value, usual in (
        ("compress", config.compress, "query-aware"),
        ("prefill", config.prefill, "full"),
    ):
        if value != usual:
            raise UserError(f"the run has --{name} {value}; decisions can be recorded of --{name} {usual} only.")


def answers(folder: Path, task: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows to record, with their texts: the first sample of every cell that evicts, for the questions `names`."""
    rows = read_rows(folder)
    mine = (rows["task"] == task) & rows["doc_id"].isin(names) & (rows["status"] == "ok")
    rows = rows[mine & rows["interval"].notna()].sort_values("sample", kind="stable")
    rows = rows.drop_duplicates(["doc_id", "method", "options", "budget_share", "budget"])
    return list(rows.merge(read_texts(folder, keys=set(rows["row_key"])), on="row_key").to_dict("records"))


def record(
    loaded: LoadedModel,
    work: TaskWork,
    rows: Sequence[dict[str, Any]],
    config: RunConfig,
    say: Notice,
    tick: Callable[[str, int, int], None],
) -> list[Decisions]:
    """Read the answers of `answers`; return their decisions.

    tick: called per answer as (method and question, 1, tokens of the answer).
    """
    prompts = {p.doc.doc_id: p for p in work.prompts}
    longest = max((prompts[row["doc_id"]].max_tokens for row in rows if row["doc_id"] in prompts), default=1)
    found: list[Decisions] = []
    for row in rows:
        label = f"{row['method']} {row['doc_id']}"
        trace = read_trace(row, prompts.get(row["doc_id"]), work, loaded.tokenizer, loaded.context, config.seed)
        decisions = None if trace is None else _read(loaded, row, trace, config.interval, longest)
        if decisions is None:
            say(f"{label}: not recorded, since a reading of its answer does not repeat the run's evictions.")
        found += decisions or []
        tick(label, 1, 0 if trace is None else len(trace.answer))
    return found


def _read(
    loaded: LoadedModel, row: dict[str, Any], trace: ForcedTrace, interval: int, longest: int
) -> list[Decisions] | None:
    """The decisions on one answer; None where they are not the run's."""
    method = choose.make(row["method"], json.loads(row["options"]))
    share = row["budget_share"]
    log = _Log()
    reader = TraceReader(
        loaded,
        method,
        budget=float(share) if share == share else int(row["budget"]),
        interval=interval,
        max_tokens=longest,
        log=log,
    )
    if reader.within is not None:  # an oracle decides with a future that only a comparison knows
        return None
    reader.read([trace], log)
    seen = log.seen()
    if not seen or not _as_in_run(row, trace, seen):
        return None
    tokens = [loaded.tokenizer.decode([token]) for token in (*trace.prompt, *trace.answer)]
    return [
        Decisions(
            row_key=row["row_key"],
            task=row["task"],
            doc_id=row["doc_id"],
            layer=layer,
            head=head,
            prompt=len(trace.prompt),
            tokens=tokens,
            seen=seen,
            dropped=_dropped(kept, seen, len(tokens)),
        )
        for layer, kept_by_head in _spread(log.heads())
        for head, kept in enumerate(kept_by_head)
    ]


def _as_in_run(row: dict[str, Any], trace: ForcedTrace, seen: Sequence[int]) -> bool:
    """Whether tokens and evictions are the run's, but for the end token and an eviction at the end."""
    tokens, evictions = row["output_tokens"] - len(trace.answer), row["evictions"] - len(seen)
    return tokens in (0, 1) and evictions in (0, 1) and seen[0] == row["first_eviction"]


def _spread(layers: dict[int, Any]) -> list[tuple[int, Any]]:
    """At most MOST_LAYERS layers, the first and the last among them."""
    items = sorted(layers.items())
    if len(items) <= MOST_LAYERS:
        return items
    return [items[round(i * (len(items) - 1) / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]


def _dropped(kept: dict[int, set[int]], seen: Sequence[int], count: int) -> list[int]:
    """The number of the eviction that dropped each token. kept: tokens seen -> positions that a head kept."""
    dropped = [0] * count
    for number, read in enumerate(seen, 1):
        left = kept.get(read, set(range(read)))  # a layer whose turn it was not keeps all
        for position in range(read):
            if dropped[position] == 0 and position not in left:
                dropped[position] = number
    return dropped


class _Log(Listener):
    """Collects the kept positions of every eviction (`kvbench.engine.rules.KeptLog`)."""

    def __init__(self) -> None:
        self._events: dict[int, dict[int, list[set[int]]]] = {}  # layer -> tokens seen -> kept positions per head

    def __call__(self, noise_key: int, seen: int, layer: int, kept: list[torch.Tensor]) -> None:
        self._events.setdefault(layer, {})[seen] = [set(positions.tolist()) for positions in kept]

    def seen(self) -> list[int]:
        return sorted({seen for events in self._events.values() for seen in events})

    def heads(self) -> dict[int, list[dict[int, set[int]]]]:
        """Layer -> for each head, tokens seen -> kept positions."""
        return {
            layer: [
                {seen: kept[head] for seen, kept in events.items()} for head in range(len(next(iter(events.values()))))
            ]
            for layer, events in self._events.items()
        }
