"""Runs a replay after its settings were checked: loads the model, gets each task's answers, and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvbench.config.run_config import RunConfig
from kvbench.console import terminal
from kvbench.engine.model.load import LoadedModel, pick_device
from kvbench.engine.model.shape import known_shape, use_threads
from kvbench.errors import UserError, quote
from kvbench.replay.analyses.api import Analysis, Row, Study
from kvbench.replay.batches import Result
from kvbench.replay.batches import replay as compare
from kvbench.replay.choices import Chosen, LeftOut, Target, plan
from kvbench.replay.correctness import Right, check_scorable, own_ratios, scored, stored_scores
from kvbench.replay.parts import Parts
from kvbench.replay.read_analyses import read
from kvbench.replay.traces import ForcedTrace, answer_with_full_cache, stored_answers
from kvbench.replay.work import Readings, Work
from kvbench.runner import env, same_run
from kvbench.runner.cell import MethodState
from kvbench.runner.inputs import Inputs
from kvbench.runner.workload import TaskWork
from kvbench.sources import models

Plans = dict[str, dict[int, list[Chosen]]]  # task -> interval -> methods and budgets


class Session:
    """One replay of all tasks. `run` stores `results` (for a comparison) or `rows` (for analyses), and in both cases
    `left_out`, the methods that cannot run.

    folder: the folder of the run whose answers are read; None: the model first answers the questions.

    Raises KVBenchError if the model, a task, or a method that the user names cannot be used.
    """

    def __init__(self, config: RunConfig, inputs: Inputs, work: Work, folder: Path | None, progress: Readings) -> None:
        self.config, self.inputs, self.work, self.folder, self.progress = config, inputs, work, folder, progress
        self.works = _with_sample(inputs.works, work.sample)
        self.scores = any(kind.scored for kind in work.kinds)
        for task in self.works.values() if self.scores and folder is None else ():
            check_scorable(task)
        self.longest = {name: max(p.max_tokens for p in task.prompts) for name, task in self.works.items()}
        self.results: list[Result] = []
        self.rows: dict[type[Analysis], list[Row]] = {kind: [] for kind in work.kinds}
        self.left_out: list[LeftOut] = []
        self.parts = Parts()
        self._right: dict[str, Right] = {}

    def run(self) -> None:
        """Read the answers of every task with every chosen method, and store the results in this object."""
        loaded, plans = self._load()
        if self.work.out is not None:
            self.parts = Parts(self.work.out, self._settings(loaded, plans))
        for name, task in self.works.items():
            traces = self._traces(name, task, loaded)
            self.progress.end()
            if self.work.kinds and not traces:
                raise UserError(
                    f"task {quote(name)} has no answer to analyse. Give the id of another question (--sample ID), "
                    "or take more questions (--limit N)."
                )
            for interval, chosen in plans[name].items():
                readings = len(traces) * (len(chosen) * self.work.methods + self.work.attention)
                self.progress.task(name, readings, "readings")
                if self.work.kinds:
                    self._analyse(name, task, traces, loaded, interval, chosen)
                else:
                    result = compare(
                        loaded,
                        name,
                        traces,
                        chosen,
                        interval=interval,
                        max_tokens=self.longest[name],
                        on_read=self.progress.next,
                        parts=self.parts,
                        on_kept=self.progress.skip,
                    )
                    self.results.append(result)
                self.progress.end()

    def _load(self) -> tuple[LoadedModel, Plans]:
        """Load the model. Return it, and the methods and budgets to replay on each task at each interval. Raises
        KVBenchError if a method that the user names cannot run; if possible, before the model is loaded."""
        config, inputs = self.config, self.inputs
        load_model = partial(inputs.load_model, config)
        shape, early = known_shape(inputs.config, load_model)
        images = any(prompt.images for task in self.works.values() for prompt in task.prompts)
        longest = max(self.longest.values())
        target = Target(shape.geometry, inputs.config, inputs.info.folder, longest, images=images)
        self._plans(target)
        use_threads(shape, pick_device(config.device))
        loaded = early or load_model()
        return loaded, self._plans(replace(target, fingerprint=loaded.fingerprint))

    def _settings(self, loaded: LoadedModel, plans: Plans) -> dict[str, Any]:
        """Return everything on which all answers and figures of this replay depend, as a JSON value."""
        config, inputs = self.config, self.inputs
        choices = dict.fromkeys(c.method for of in plans.values() for chosen in of.values() for c in chosen)
        states = {choice: MethodState.of(choice, inputs.config, inputs.info) for choice in choices}
        return {
            "config": config.to_dict(),
            "tasks": inputs.tasks(),
            **same_run.model_record(config, models.state(inputs.info), inputs.adapter),
            **same_run.method_record(states),
            "dtype": str(loaded.dtype),
            "device": env.device_name(loaded.device, len(loaded.devices) if loaded.divided else 0),
            "processor": env.processor() if loaded.device.type == "cpu" else None,
            "threads": torch.get_num_threads(),
            "versions": env.versions(),
            "code": env.code_hash(),
        }

    def _plans(self, target: Target) -> Plans:
        """Return the methods and budgets to replay, from all grids of the configuration, and store the methods that
        cannot run in `left_out`."""
        plans: Plans = {name: {} for name in self.works}
        left_out: list[LeftOut] = []
        for grid in self.config.grids:
            named = [method for method in grid.methods if method in self.work.named]
            chosen, left = plan(named, [m for m in grid.methods if m not in named], grid.budgets, target)
            left_out += left
            for name in (name for name in grid.tasks if name in plans):
                # Without readings by methods, the interval has no effect: one reading per task.
                intervals = grid.intervals if self.work.methods else ()
                for interval in intervals or (self.config.interval,):
                    earlier = plans[name].get(interval, [])
                    plans[name][interval] = list(dict.fromkeys([*earlier, *chosen]))
        self.left_out = list(dict.fromkeys(left_out))
        return plans

    def _traces(self, name: str, task: TaskWork, loaded: LoadedModel) -> list[ForcedTrace]:
        sample, seed = self.work.sample, self.config.seed
        if self.folder is None:
            prompts = [p for p in task.prompts if sample in (None, p.doc_id)]
            self.progress.task(f"{name}, answering", len(prompts), "answers")
            asked = replace(task, prompts=prompts)
            return answer_with_full_cache(asked, loaded, seed, terminal.warning, self.progress.next, self.parts)
        traces = stored_answers(self.folder, task, loaded.tokenizer, self.inputs.context, seed, terminal.warning)
        return [t for t in traces if sample in (None, t.request.doc_id)][: self.work.most]

    def _rights(self, name: str, task: TaskWork, traces: list[ForcedTrace], loaded: LoadedModel) -> Right:
        """Return which answers are right. The answers are scored once for all intervals."""
        if name not in self._right:
            self._right[name] = (
                stored_scores(self.folder, name, traces, terminal.warning)
                if self.folder
                else scored(task, traces, loaded, terminal.warning)
            )
        return self._right[name]

    def _analyse(
        self,
        name: str,
        task: TaskWork,
        traces: list[ForcedTrace],
        loaded: LoadedModel,
        interval: int,
        chosen: Sequence[Chosen],
    ) -> None:
        right = self._rights(name, task, traces, loaded) if self.scores else {}
        decode = loaded.tokenizer.decode
        own = own_ratios(self.folder, name, chosen, interval) if self.scores and self.folder else {}
        study = Study(task=name, traces=traces, interval=interval, text=decode, right=right, own=own)
        analyses = [kind(study) for kind in self.work.kinds]
        read(loaded, study, analyses, chosen, max_tokens=self.longest[name], on_read=self.progress.next)
        for kind, analysis in zip(self.work.kinds, analyses):
            self.rows[kind] += (rows := analysis.rows())
            if not rows:
                terminal.warning(
                    f"analysis {kind.name} finds nothing in task {quote(name)}: the task's answers are too short. "
                    "Choose a task with longer answers, or a smaller --budget."
                )


def _with_sample(works: dict[str, TaskWork], sample: str | None) -> dict[str, TaskWork]:
    """Return the tasks that have a question with the id `sample`, or all tasks if `sample` is None. Raises UserError if
    no task has the question."""
    if sample is None:
        return works
    chosen = {name: work for name, work in works.items() if any(p.doc_id == sample for p in work.prompts)}
    if not chosen:
        raise UserError(
            f"--sample {quote(sample)}: no question of the tasks has this id; a larger --limit takes more questions."
        )
    return chosen
