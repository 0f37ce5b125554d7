"""Generates the rows of one job, and handles running out of memory and NaN logits.

When memory runs out, the cell is planned again with half the slots and continues with the rows that are not written
yet. Each row states with how many slots it was generated, how many slots the first plan had, and how often memory ran
out. A sequence that does not fit even with one slot becomes a row with status `oom`. Every cell starts with the slots
of its own plan, even if memory ran out in an earlier cell: otherwise a resumed run would generate other rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvbench.config.run_config import RunConfig
from kvbench.console import faults
from kvbench.engine import memory
from kvbench.engine.loop import Engine, Snapshot
from kvbench.engine.memory import OutOfMemory
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import counted
from kvbench.records import Generation
from kvbench.runner.cell import CellPlan, dtype_name
from kvbench.runner.inputs import Notice
from kvbench.runner.row_writer import RowWriter
from kvbench.runner.workload import PlannedRow, TaskWork, make_method
from kvbench.store import FINAL

NOT_NUMBERS = 5  # the cell ends after this many successive rows with NaN or infinite logits
OTHER_DTYPE = {"float32": "bfloat16"}  # number type -> the type that a message advises; for other types float32

Key = tuple[str, int]  # document, sample


@dataclass(slots=True, kw_only=True)
class CellRun:
    """Generates the rows of one job: rows of one cell that are not written yet. missing: the rows of the job that have
    no result yet. on_step: see `Engine`. say: receives warnings of one line."""

    loaded: LoadedModel
    cell_plan: CellPlan
    missing: dict[Key, PlannedRow]
    work: TaskWork
    config: RunConfig
    writer: RowWriter
    on_step: Snapshot
    say: Notice
    not_numbers: int = 0  # how many successive rows, up to the newest, have NaN or infinite logits

    @property
    def ended_early(self) -> bool:
        """Whether the cell ended because NOT_NUMBERS successive rows had NaN or infinite logits."""
        return self.not_numbers >= NOT_NUMBERS

    def run(self) -> None:
        """Generate until no row is missing, the cell ends early (`ended_early`), or no more rows can be scored
        (`RowWriter.refused`)."""
        memory.reset_peak(*self.loaded.devices)
        while True:
            try:
                self._generate()
                return
            except OutOfMemory as error:
                under_way, cause = error.under_way, error.cause  # drop the traceback: it holds the engine
            memory.release(self.loaded.device)
            self.cell_plan = replace(self.cell_plan, oom_retries=self.cell_plan.oom_retries + 1)
            self._make_smaller(under_way, cause)

    def _generate(self) -> None:
        """Generate the missing rows with one new engine. Raises OutOfMemory."""
        if not self.missing:
            return
        engine, seed = self._engine(), self.config.seed
        for batch in self.work.batches(list(self.missing.values()), seed):
            with contextlib.closing(engine.generate(batch)) as answers:
                for answer in answers:
                    row = self.missing.pop((answer.request.doc_id, answer.sample))
                    self.writer.add(row, answer, self.cell_plan, memory.peak(*self.loaded.devices))
                    if self.writer.refused is not None or self._numbers_fail(answer):
                        return

    def _engine(self) -> Engine:
        """Make an engine with the planned slots. Raises OutOfMemory."""
        plan, config = self.cell_plan, self.config
        try:
            return Engine(
                self.loaded,
                make_method(plan.cell),
                budget=plan.cell.budget,
                interval=plan.interval,
                slots=plan.plan.slots,
                max_tokens=plan.max_tokens,
                max_output=plan.max_output,
                tail=plan.tail,
                prefill_chunk=config.prefill_chunk,
                prefill=config.prefill,
                on_step=self.on_step,
                backend=config.decode_attn,
                compiled=not config.no_compile,
                program=bool(config.compile_cpu),
                notice=lambda text: self.say(f"{plan.cell.label}: {text}"),
            )
        except Exception as error:
            if not faults.out_of_memory(error):
                raise
            raise OutOfMemory(error) from error

    def _make_smaller(self, under_way: Iterable[Key], cause: str) -> None:
        """After memory ran out, halve the slots. With only one slot left, give up rows, which get status `oom`.

        The cell gives up the rows in `under_way` that have no result yet. If there is no such row, for example because
        no row was begun, the cell gives up the longest of all rows without a result.
        """
        plan, label = self.cell_plan.plan, self.cell_plan.cell.label
        if plan.slots > 1:
            self.cell_plan = self.cell_plan.after_lack_of_memory(plan.slots // 2, self.cell_plan.oom_retries)
            left = self.cell_plan.plan.slots
            self.say(f"{label}: out of memory with {plan.slots} slots; going on with {left} ({cause}).")
            return
        lost = [key for key in under_way if key in self.missing]
        for key in lost or self._longest():
            self._give_up(self.missing.pop(key), cause)
        if not lost:  # memory ran out before any row was begun: the engine itself was too large
            self._fit_to_missing()
        self.say(f"{label}: out of memory with 1 slot; rows that do not fit get status 'oom' ({cause}).")

    def _give_up(self, row: PlannedRow, cause: str) -> None:
        [[request]] = self.work.batches([row], self.config.seed)
        note = f"one sequence does not fit into memory: {cause}"
        failed = Generation.failed(request, row.sample, "oom", note)
        self.writer.add(row, failed, self.cell_plan, memory.peak(*self.loaded.devices))

    def _longest(self) -> list[Key]:
        """Return the keys of the longest missing rows, whose length determines the engine's size. Rows that are too
        long for the model count only if all missing rows are too long."""
        lengths = {key: row.prompt.max_tokens for key, row in self.missing.items()}
        fitting = [length for length in lengths.values() if length <= self.cell_plan.max_tokens]
        most = max(fitting or lengths.values())
        return [key for key, length in lengths.items() if length == most]

    def _fit_to_missing(self) -> None:
        """Make the engine as large as the longest missing row needs; rows too long for the model do not count."""
        prompts = [row.prompt for row in self.missing.values() if row.prompt.max_tokens <= self.cell_plan.max_tokens]
        self.cell_plan = replace(
            self.cell_plan,
            max_tokens=max((p.max_tokens for p in prompts), default=1),
            max_output=max((p.max_tokens - len(p.ids) for p in prompts), default=1),
        )

    def _numbers_fail(self, answer: Generation) -> bool:
        """Return whether the last NOT_NUMBERS answers all had NaN or infinite logits. Answers with a status in `FINAL`
        do not count. If the result is True, warn that the cell ends here."""
        if answer.status in FINAL:  # the model did not read this prompt, so there were no logits
            return False
        self.not_numbers = self.not_numbers + 1 if answer.status == "nan_logits" else 0
        if self.not_numbers < NOT_NUMBERS:
            return False
        dtype = dtype_name(self.loaded.dtype)
        self.say(
            f"{self.cell_plan.cell.label}: logits were NaN or infinite in {NOT_NUMBERS} successive rows; "
            f"the cell ends here ({counted(len(self.missing), 'row')} not run). "
            f"Try another number type than {dtype}: --dtype {OTHER_DTYPE.get(dtype, 'float32')}. If that does not "
            "help, the model's weights may be damaged."
        )
        return True
