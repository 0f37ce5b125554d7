"""Records decisions: which entries a method keeps in every layer, at every eviction, while it reads stored answers
again.

    side = decided(side, config, inputs)      # loads the model and replays
    first = first_decision(base, new)         # base, new: the cell on the two sides

The answers that two versions of a method generate may differ from some token on. All later decisions then differ
because the texts do. Decisions are therefore compared on texts that do not depend on the method: the first
answers of the full cache. Decisions are always recorded with the code that is installed now, so no comparison takes
them from a run's folder. `kvbench compare RUN --save FILE --replay` records them for a later comparison.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.compare.cell import MARK, Cell, Decisions, Side, mark
from kvbench.console import terminal
from kvbench.errors import UserError, bare, quote
from kvbench.report.cells import method_label
from kvbench.store.identity import canonical_json
from kvbench.store.schema import natural

if TYPE_CHECKING:
    import torch

    from kvbench.config.run_config import RunConfig
    from kvbench.engine.model.load import LoadedModel
    from kvbench.eviction.api import Method
    from kvbench.replay.traces import ForcedTrace
    from kvbench.runner.inputs import Inputs

MOST = 3  # number of answers per task that are read again


@dataclass(frozen=True, slots=True)
class FirstDecision:
    """The first eviction at which two versions of a method keep different entries.

    seen: the number of tokens read before this eviction. layer: the first layer in which the two versions keep
    different entries, counted from 0 among the layers that evict. None if the versions evict from different numbers of
    layers at this eviction, for example because only one of them evicts.
    """

    question: str
    seen: int
    layer: int | None

    @property
    def words(self) -> str:
        where = f"layer {self.layer} keeps other entries"
        if self.layer is None:
            where = "the two versions evict from different numbers of layers"
        return f"question {bare(self.question)}, after {self.seen} tokens: {where}"


def first_decision(base: Cell, new: Cell) -> FirstDecision | str | None:
    """Return the first eviction at which two cells keep different entries, in order of questions and then of tokens.

    Only questions for which both cells have decisions are compared. The result is None if all decisions on these
    questions are equal, and a text if the decisions cannot be compared; the text says why.
    """
    shared = sorted(base.decisions.keys() & new.decisions.keys(), key=natural)
    if not shared:
        return "no question has decisions on both sides"
    for question in shared:
        (text, old), (other, now) = base.decisions[question], new.decisions[question]
        if text != other:
            return f"the full cache's answers to {bare(question)} differ"
        for seen in sorted(old.keys() | now.keys()):
            mine, theirs = old.get(seen, ""), now.get(seen, "")
            if mine != theirs:
                layers = (i // MARK for i in range(0, len(mine), MARK) if mine[i : i + MARK] != theirs[i : i + MARK])
                both = len(mine) == len(theirs)
                return FirstDecision(question, seen, next(layers) if both else None)
    return None


def decided(side: Side, config: RunConfig, inputs: Inputs) -> Side:
    """Let the model read stored answers of the full cache again with each method of `config`.

    The answers are the first `MOST` of each task. Returns the side with the methods' decisions. A cell gets decisions
    if `config` has its task, method, budget and interval. All other cells, and cells without a budget, get none.
    inputs: the model and the prompts of `config`. Raises UserError, SetupError.
    """
    from kvbench.replay.traces import stored_answers
    from kvbench.runner.workload import make_method

    [folder] = side.folders
    again = f"Run {quote(folder.name)} again with the method full too."
    loaded = inputs.load_model(config)
    found: dict[tuple[str, str, Any, int | None], Mapping[str, Decisions]] = {}
    for task in config.tasks:
        work = inputs.works[task]
        say = terminal.warning
        traces = stored_answers(folder, work, loaded.tokenizer, inputs.context, config.seed, say, cure=again)[:MOST]
        longest = max(prompt.max_tokens for prompt in work.prompts)
        for cell in config.cells():
            if cell.task == task and cell.budget is not None:
                method, interval = make_method(cell), config.interval_of(cell)
                label = method_label(cell.method.name, canonical_json(method.options()))
                kept = _read(loaded, method, cell.budget, traces, interval, longest)
                found[task, label, cell.budget, interval] = kept
    cells = {
        key: replace(cell, decisions=found.get((key.task, key.method, key.budget, key.interval), {}))
        for key, cell in side.cells.items()
    }
    return replace(side, cells=cells)


def one_run(side: Side) -> None:
    """Raise UserError unless the side has exactly one run folder."""
    if len(side.folders) != 1:
        raise UserError(
            f"--replay reads the answers of one run again; {quote(side.name)} is not the folder of one run. Name one "
            "run's folder; BASE may also be a file that '--save FILE --replay' wrote."
        )


def _read(
    loaded: LoadedModel, method: Method, budget: float, traces: list[ForcedTrace], interval: int, longest: int
) -> dict[str, Decisions]:
    from kvbench.replay.reader import Listener, TraceReader

    kept: dict[int, dict[int, str]] = {}

    def log(_: int, seen: int, layer: int, positions: list[torch.Tensor]) -> None:
        digest = hashlib.sha256()
        for head in positions:
            digest.update(repr(sorted(head.tolist())).encode())
        kept.setdefault(seen, {})[layer] = mark(digest.hexdigest())

    reader = TraceReader(loaded, method, budget=budget, interval=interval, max_tokens=longest, log=log)
    decisions: dict[str, Decisions] = {}
    for trace in traces:
        kept.clear()
        reader.read([trace], Listener())
        text = hashlib.sha256(repr((tuple(trace.prompt), trace.answer)).encode()).hexdigest()[:12]
        ticks = {seen: "".join(layers[layer] for layer in sorted(layers)) for seen, layers in kept.items()}
        decisions.setdefault(trace.request.doc_id, (text, ticks))
    return decisions
