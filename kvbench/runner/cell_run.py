"""One cell under way, and what it does when memory or numbers fail.

Out of memory, the cell goes on with half the slots and the rows that are not written yet; each row says with how many
slots it was made. A sequence that does not fit alone becomes a row with status `oom`. Every cell starts with its
planned slots: what another cell needed says little about it, and the slots of a row must not depend on the cells that
this process ran before, or a resumed run would make other rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvbench.config.run_config import RunConfig
from kvbench.console import faults
from kvbench.engine import memory
from kvbench.engine.loop import Engine, Snapshot
from kvbench.engine.memory import OutOfMemory
from kvbench.engine.model.load import LoadedModel
from kvbench.records import Generation
from kvbench.runner.cell import CellPlan
from kvbench.runner.row_writer import RowWriter
from kvbench.runner.workload import PlannedRow, TaskWork, make_method

NOT_NUMBERS = 5  # rows in a row whose logits are NaN or infinite end the cell
OTHER_DTYPE = {"float32": "bfloat16"}  # what else may help; float32 for all others

Key = tuple[str, int]  # document, sample


class CellRun:
    """Generates the missing rows of one cell.

    Args:
        on_step: see `Engine`.
        say: receives warnings, one line each.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cell_plan: CellPlan,
        missing: Iterable[PlannedRow],
        work: TaskWork,
        config: RunConfig,
        writer: RowWriter,
        on_step: Snapshot,
        say: Callable[[str], None],
    ) -> None:
        self.loaded, self.cell_plan, self.work, self.config = loaded, cell_plan, work, config
        self.writer, self.on_step, self.say = writer, on_step, say
        self.missing: dict[Key, PlannedRow] = {(row.prompt.doc.doc_id, row.sample): row for row in missing}
        self._not_numbers = 0

    def run(self) -> None:
        """Until every row is written, the numbers fail, or the rows cannot be scored."""
        while True:
            try:
                self._generate()
                return
            except OutOfMemory as error:
                under_way, cause = error.under_way, error.cause  # without the traceback, which holds the engine
            memory.release(self.loaded.device)
            self._make_smaller(under_way, cause)

    def _generate(self) -> None:
        """Generate the missing rows with one engine."""
        if not self.missing:
            return
        engine, seed = self._engine(), self.config.seed
        for batch in self.work.batches(list(self.missing.values()), seed):
            with contextlib.closing(engine.generate(batch)) as answers:
                for answer in answers:
                    row = self.missing.pop((answer.request.doc_id, answer.sample))
                    self.writer.add(row, answer, self.cell_plan)
                    if self.writer.refused is not None or self._numbers_fail(answer):
                        return

    def _engine(self) -> Engine:
        """An engine of the planned slots. Raises OutOfMemory."""
        plan, config = self.cell_plan, self.config
        try:
            return Engine(
                self.loaded,
                make_method(plan.cell),
                budget=plan.cell.budget,
                interval=config.interval,
                slots=plan.plan.slots,
                max_tokens=plan.max_tokens,
                max_output=plan.max_output,
                tail=plan.tail,
                prefill_chunk=config.prefill_chunk,
                prefill=config.prefill,
                on_step=self.on_step,
            )
        except Exception as error:
            if not faults.out_of_memory(error):
                raise
            raise OutOfMemory(error) from error

    def _make_smaller(self, under_way: Iterable[Key], cause: str) -> None:
        """Halve the slots; with one slot, give up the sequences that do not fit."""
        plan, label = self.cell_plan.plan, self.cell_plan.cell.label
        if plan.slots > 1:
            # The limit was computed for other slots; without it the rows have no share of it.
            smaller = replace(plan, slots=plan.slots // 2, limit=math.nan)
            self.cell_plan = replace(self.cell_plan, plan=smaller)
            self.say(f"{label}: out of memory with {plan.slots} slots; going on with {smaller.slots} ({cause}).")
            return
        lost = [key for key in under_way if key in self.missing]
        for key in lost or self._longest():
            self._give_up(self.missing.pop(key), cause)
        if not lost:  # not even an empty engine for the longest prompt could be made
            self._fit_to_missing()
        self.say(f"{label}: out of memory with 1 slot; what does not fit gets status 'oom' ({cause}).")

    def _give_up(self, row: PlannedRow, cause: str) -> None:
        [[request]] = self.work.batches([row], self.config.seed)
        note = f"one sequence does not fit into memory: {cause}"
        self.writer.add(row, Generation.failed(request, row.sample, "oom", note), self.cell_plan)

    def _longest(self) -> list[Key]:
        """The rows that the engine is sized for."""
        lengths = {key: row.prompt.max_tokens for key, row in self.missing.items()}
        fitting = [length for length in lengths.values() if length <= self.cell_plan.max_tokens]
        most = max(fitting or lengths.values())
        return [key for key, length in lengths.items() if length == most]

    def _fit_to_missing(self) -> None:
        """Size the next engine for the rows that are left. Prompts beyond the context size nothing."""
        prompts = [row.prompt for row in self.missing.values() if row.prompt.max_tokens <= self.cell_plan.max_tokens]
        self.cell_plan = replace(
            self.cell_plan,
            max_tokens=max((p.max_tokens for p in prompts), default=1),
            max_output=max((p.max_tokens - len(p.ids) for p in prompts), default=1),
        )

    def _numbers_fail(self, answer: Generation) -> bool:
        """Whether so many answers in a row ended with logits that are no numbers that the others will, too."""
        if answer.status == "prompt_too_long":
            return False
        self._not_numbers = self._not_numbers + 1 if answer.status == "nan_logits" else 0
        if self._not_numbers < NOT_NUMBERS:
            return False
        dtype = str(self.loaded.dtype).removeprefix("torch.")
        self.say(
            f"{self.cell_plan.cell.label}: logits were NaN or infinite in {NOT_NUMBERS} rows in a row; "
            f"the cell ends here ({len(self.missing)} rows not run). "
            f"Try another number type than {dtype}: --dtype {OTHER_DTYPE.get(dtype, 'float32')}."
        )
        return True
