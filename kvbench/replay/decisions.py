"""Records which tokens each method of a run kept at each eviction, by reading the run's stored answers again.

    recorder = Recorder(loaded=loaded, config=config, inputs=inputs, say=say, on_read=on_read)
    decisions = recorder.record(work, answers(folder, "walk", names))

While an answer is read, the method makes the same decisions as while the answer was generated, up to rounding
(`kvbench.replay.reader`). The answer's row belongs to a cell of the run's configuration. The method's options and the
budget come from this cell.

An answer is left out if the method's version, source or artefacts (weights, plug-ins, draft models) differ from those
in the row. It is also left out if the reading has another number of tokens or evictions, or another first eviction,
than the row states. A stored answer lacks its end token, so an eviction after the last token is not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvbench.config import plugins
from kvbench.config.run_config import Cell, MethodChoice, RunConfig
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError, UserError, quote
from kvbench.replay.choices import budget_of
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.traces import ForcedTrace, Notice, read_trace
from kvbench.runner.cell import MethodState
from kvbench.runner.inputs import Inputs
from kvbench.runner.workload import TaskWork, make_method
from kvbench.store import read_rows, read_texts
from kvbench.store.decisions import Decisions
from kvbench.store.schema import as_stored

MOST_LAYERS = 8  # layers that are recorded, evenly spread


def answers(folder: Path, task: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows, with their texts, whose evictions are to be recorded. For each cell whose method evicts and each
    question in `names`, this is the row of the first sample with the status "ok". A missing value in a row is None."""
    rows = read_rows(folder)
    mine = (rows["task"] == task) & rows["doc_id"].isin(names) & (rows["status"] == "ok")
    rows = rows[mine & rows["interval"].notna()].sort_values("sample", kind="stable")
    rows = rows.drop_duplicates(["doc_id", "method", "options", "budget_share", "budget", "interval"])
    found = rows.merge(read_texts(folder, keys=set(rows["row_key"])), on="row_key").astype(object)
    return list(found.where(found.notna(), None).to_dict("records"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder:
    """Reads answers of a run again, and records which tokens each head kept at each eviction, in at most MOST_LAYERS
    layers.

    say: called with a message for each answer that is left out. on_read: called after each answer, even if the answer
    is left out. Its arguments are the method and question as one text, the number 1 (one answer), and the number of
    tokens of the answer (0 if the answer cannot be read at all).
    """

    loaded: LoadedModel
    config: RunConfig
    inputs: Inputs
    say: Notice
    on_read: Callable[[str, int, int], None]
    _states: dict[MethodChoice, MethodState] = field(default_factory=dict)

    def record(self, work: TaskWork, rows: Sequence[dict[str, Any]]) -> list[Decisions]:
        """Read the answers in `rows` (from `answers`) again. Return an object per answer, layer and head, which states
        for each token the eviction that dropped it. Answers that are left out have no object."""
        prompts = {p.doc_id: p for p in work.prompts}
        longest = max((prompts[row["doc_id"]].max_tokens for row in rows if row["doc_id"] in prompts), default=1)
        found: list[Decisions] = []
        for row in rows:
            label = f"{row['method']} {row['doc_id']}"
            prompt = prompts.get(row["doc_id"])
            trace = read_trace(row, prompt, work, self.loaded.tokenizer, self.loaded.context, self.config.seed)
            try:
                found += self._read(row, trace, longest)
            except (UserError, SetupError) as error:
                self.say(f"{label}: not recorded: {error}")
            except Exception as error:
                if (fault := plugins.failure(error)) is None:
                    raise
                self.say(f"{label}: not recorded: {fault}.")
            self.on_read(label, 1, 0 if trace is None else len(trace.answer))
        return found

    def _read(self, row: dict[str, Any], trace: ForcedTrace | None, longest: int) -> list[Decisions]:
        """Read one answer again. Raises UserError if the answer cannot be read as in the run, or if its number of
        tokens or its evictions differ from the run's."""
        cell = cell_of(row, self.config)
        state = self._state(cell.method)
        check_method(row, state)
        if trace is None:
            raise UserError(
                "the stored answer is empty, the question has several turns, or its prompt has changed since the run."
            )
        log = _Log()
        reader = TraceReader(
            self.loaded,
            state.method,
            budget=cell.budget,
            interval=self.config.interval_of(cell),
            max_tokens=longest,
            log=log,
        )
        if reader.within is not None:
            raise UserError(
                "the method is an oracle: it needs the attention of later queries, which only 'kvbench replay' has."
            )
        reader.read([trace], log)
        seen = log.seen()
        if not seen or not _as_in_run(row, trace, seen):
            raise UserError("read again, the answer has another number of tokens or other evictions than in the run.")
        tokens = [self.loaded.tokenizer.decode([token]) for token in (*trace.prompt, *trace.answer)]
        return _decisions(row, len(trace.prompt), tokens, log)

    def _state(self, choice: MethodChoice) -> MethodState:
        if choice not in self._states:
            self._states[choice] = MethodState.of(choice, self.inputs.config, self.inputs.info)
        return self._states[choice]


def cell_of(row: dict[str, Any], config: RunConfig) -> Cell:
    """Return the cell of the run's grid to which a row belongs. Raises UserError if there is no such cell."""
    budget = budget_of(row)
    for cell in config.cells():
        same = cell.method.name == row["method"] and (type(cell.budget), cell.budget) == (type(budget), budget)
        same = same and row["interval"] in (None, config.interval_of(cell))
        if same and as_stored("options", make_method(cell).options()) == row["options"]:
            return cell
    raise UserError("the run's configuration has no cell with this row's method, options, budget and interval.")


def check_method(row: dict[str, Any], state: MethodState) -> None:
    """Raise UserError if the version, source or artefacts of the row's method have changed since the run."""
    used = state.used(row["task"])
    today = {"method_version": state.version, "method_source": state.source.hash, "artefacts": used}
    for column, value in today.items():
        if (was := row[column]) != (now := as_stored(column, value)):
            raise UserError(f"the method has changed: {column} was {quote(was)} in the run and is {quote(now)} now.")


def _decisions(row: dict[str, Any], prompt: int, tokens: list[str], log: _Log) -> list[Decisions]:
    """Return the logged decisions of every head, in at most MOST_LAYERS layers. prompt: tokens of the prompt."""
    seen = log.seen()
    return [
        Decisions(
            row_key=row["row_key"],
            task=row["task"],
            doc_id=row["doc_id"],
            layer=layer,
            head=head,
            prompt=prompt,
            tokens=tokens,
            seen=seen,
            dropped=_dropped(kept, seen, len(tokens)),
        )
        for layer, heads in _spread(log.kept)
        for head, kept in heads.items()
    ]


def _as_in_run(row: dict[str, Any], trace: ForcedTrace, seen: Sequence[int]) -> bool:
    """Return whether the reading had as many tokens and evictions as the row states, and the same first eviction.

    The end token, and an eviction after it, may be missing in the reading. seen: for each eviction of the reading, the
    number of tokens read before it.
    """
    if row["output_tokens"] is None or row["evictions"] is None:
        return False
    tokens, evictions = row["output_tokens"] - len(trace.answer), row["evictions"] - len(seen)
    return tokens in (0, 1) and evictions in (0, 1) and seen[0] == row["first_eviction"]


def _spread(layers: dict[int, Any]) -> list[tuple[int, Any]]:
    """Return all layers; if there are more than MOST_LAYERS, that many of them, evenly spread from first to last."""
    items = sorted(layers.items())
    if len(items) <= MOST_LAYERS:
        return items
    return [items[round(i * (len(items) - 1) / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]


def _dropped(kept: dict[int, set[int]], seen: Sequence[int], count: int) -> list[int]:
    """Return, for each token, the number of the eviction (1: the first) that dropped it from one head; 0 if none did.

    seen: for each eviction, how many tokens were read before it. kept: the positions that the head kept at an eviction,
    by the number of tokens read before the eviction. count: the number of tokens.
    """
    dropped = [0] * count
    for number, read in enumerate(seen, 1):
        left = kept.get(read, set(range(read)))  # no entry: the layer did not evict then
        for position in range(read):
            if dropped[position] == 0 and position not in left:
                dropped[position] = number
    return dropped


class _Log(Listener):
    """Collects the positions that each head kept at every eviction (`kvbench.engine.rules.KeptLog`)."""

    def __init__(self) -> None:
        # Kept positions by layer, then by head, then by the tokens read before the eviction.
        self.kept: dict[int, dict[int, dict[int, set[int]]]] = {}

    def __call__(self, noise_key: int, seen: int, layer: int, kept: list[torch.Tensor]) -> None:
        heads = self.kept.setdefault(layer, {})
        for head, positions in enumerate(kept):
            heads.setdefault(head, {})[seen] = set(positions.tolist())

    def seen(self) -> list[int]:
        return sorted({seen for heads in self.kept.values() for events in heads.values() for seen in events})
