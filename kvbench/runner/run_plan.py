"""The plan of a run, made before its weights are loaded, and its record in run.json.

Making the plan raises KVBenchError, for example if inputs are missing, if the engine cannot serve a method, or if the
model changed since the run began.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvbench.config import plugins
from kvbench.config.run_config import OPERATIONAL, MethodChoice, RunConfig
from kvbench.engine import memory
from kvbench.engine.attention.flash import check_attn
from kvbench.engine.attention.geometry import ProbeFailed
from kvbench.engine.model.division import Division, divide, with_parts
from kvbench.engine.model.load import LoadedModel, load, pick_device, pick_dtype
from kvbench.engine.model.shape import ModelShape, estimate_shape, known_shape, read_shape, use_threads
from kvbench.engine.plan import USABLE, measure
from kvbench.engine.slot_plan import SlotPlan
from kvbench.errors import quote
from kvbench.runner import env, same_run, trained_at
from kvbench.runner.cell import CellPlan, CellPlanner, MethodState, dtype_name
from kvbench.runner.inputs import Inputs, Notice, read_inputs
from kvbench.sources import adapters, model_weights, models, quantised
from kvbench.sources.quantised import Form
from kvbench.store import again
from kvbench.store.cells import CELL, cell_hash
from kvbench.store.schema import as_stored

ROWS_PER_WORKER = 1024  # with fewer rows of a small model, a second process hardly shortens the run
MOST_WORKERS = 4  # unless the user asks for more: a container may have fewer cores and less memory than it sees
PROCESS = 1 << 30  # bytes of a process beside the planned ones: libraries, prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run as it is planned before its weights are loaded: inputs, methods, cells, device."""

    config: RunConfig
    inputs: Inputs
    model: Mapping[str, Any]  # the record of the model, its files and the chat template
    methods: Mapping[MethodChoice, MethodState]
    shape: ModelShape
    cells: tuple[CellPlan, ...]
    device: torch.device
    dtype: torch.dtype
    threads: int  # number of torch's threads
    allowed: int  # number of threads that torch would use for a large model
    division: Division | None  # None: the model is not divided among GPUs
    early: list[LoadedModel]  # the model, if planning had to load it to learn its shape and `load` has not taken it yet

    @classmethod
    def make(
        cls,
        config: RunConfig,
        before: Mapping[str, Any],
        name: str,
        *,
        dry_run: bool,
        say: Notice,
        slots: Sequence[SlotPlan] | None = None,
    ) -> RunPlan:
        """Read all inputs and plan every cell.

        before: the record of the run to continue; empty for a new run. name: the run's name. slots: the coordinator's
        plan of slots for each cell, if a worker calls this; otherwise None. Raises KVBenchError.
        """
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        check_attn(config.attn, device, dtype)
        info = models.fetched(config.model_place, config.revision)
        adapter = adapters.find(config.adapter)
        model = same_run.model_record(config, models.state(info), adapter)
        same_run.check_model(name, before, model)
        form = _form(config, info, dtype, say, dry_run=dry_run)
        inputs = read_inputs(config, say, info, adapter, before)
        division = divide(inputs.config, config.device_map, config.device, dtype)
        if division is not None:
            say(division.line())
        loader = _loader(config, inputs, device, division)
        shape, early = (_plan_shape(inputs, say), None) if dry_run else known_shape(inputs.config, loader)
        shape = with_parts(shape, division)
        if form is not None and form.kept and info.folder is not None:
            shape = replace(shape, stored=quantised.stored_bytes(info.folder, dtype.itemsize))
            if shape.routed:
                quantised.refuse_experts(config.model, info.folder)
        allowed = torch.get_num_threads()
        threads = use_threads(shape, device)
        methods = {choice: MethodState.of(choice, inputs.config, info) for choice in config.methods}
        for text in trained_at.warnings(config, {choice: state.method for choice, state in methods.items()}, info):
            say(text)
        for choice, state in methods.items():
            for text in state.method.notes():
                say(f"method {quote(choice.label)}: {text}")
        cells = config.cells()
        planned: Sequence[SlotPlan | None] = [None] * len(cells) if slots is None else slots
        planner = CellPlanner(
            config=config,
            model=model["model"],
            context=inputs.context,
            shape=shape,
            machine=measure(device, dtype),
            device=device,
            dtype=dtype,
        )
        return cls(
            config=config,
            inputs=inputs,
            model=model,
            methods=methods,
            shape=shape,
            cells=tuple(
                planner.plan(cell, inputs.works[cell.task], methods[cell.method], known)
                for cell, known in zip(cells, planned, strict=True)
            ),
            device=device,
            dtype=dtype,
            threads=threads,
            allowed=allowed,
            division=division,
            early=[] if early is None else [early],
        )

    @property
    def rows(self) -> int:
        """The number of rows that the complete run has."""
        return sum(len(cell.rows) for cell in self.cells)

    def workers(self, missing: int) -> int:
        """Return how many processes should share the run's missing rows on a CPU. missing: number of these rows. The
        result is 1 for a model so large that a single process uses all threads of torch for it."""
        most = max((cell.plan.peak_bytes for cell in self.cells), default=0) + PROCESS
        fitting = int(memory.total(self.device) * USABLE[self.device.type]) // most
        return max(1, min(self.allowed // self.threads, missing // ROWS_PER_WORKER, fitting, MOST_WORKERS))

    def load(self) -> LoadedModel:
        """Return the model with its weights, which are loaded unless planning has loaded them. Raises KVBenchError."""
        return self.early.pop() if self.early else _loader(self.config, self.inputs, self.device, self.division)()

    def release(self) -> None:
        """Free the memory that planning took on the device: from now on only workers use the model."""
        self.early.clear()
        memory.release(self.device)

    def record(self, sources: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part `environment` of run.json. sources: for each setting, where the user gave it, such as a flag
        or a file."""
        return {
            **env.compared(),
            "versions": env.versions(),
            "git": env.git_commit(),
            "machine": env.machine(),
            "device": str(self.device),
            "dtype": dtype_name(self.dtype),
            "threads": self.threads,
            **{name: getattr(self.config, name) for name in OPERATIONAL},
            **dict.fromkeys(self._unused()),
            "data_variable": os.environ.get("KVBENCH_DATA"),
            "plugins": plugins.loaded(self.config.plugin),
            "sources": dict(sources),
            **self.model,
            **same_run.method_record(self.methods),
            "tasks": self.inputs.tasks(),
            "kv_cache": {  # bytes per entry, for `kvbench report --memory`
                "element_bytes": self.dtype.itemsize,
                "layers": [
                    {"kv_heads": g.kv_heads, "head_dim": g.head_dim, "value_dim": g.value_dim, "window": g.window}
                    for g in self.shape.geometry
                ],
            },
            "plans": [_cell_record(cell) for cell in self.cells],
        }

    def _unused(self) -> tuple[str, ...]:
        """Return the names of settings for judge and sandbox that no task of this run uses."""
        needs = {need for work in self.inputs.works.values() for need in work.task.needs}
        return (*(again.JUDGE if "judge" not in needs else ()), *(("unsafe_run_code",) if "code" not in needs else ()))


def _cell_record(cell: CellPlan) -> dict[str, Any]:
    """Return the part of a run's record about one cell: its name, its memory, its number of rows, and the `cell_hash`
    of these rows."""
    record: dict[str, Any] = {"cell": cell.cell.label, "plan": cell.plan.line(), "rows": len(cell.rows)}
    for row in cell.rows[:1]:
        record["hash"] = cell_hash({name: as_stored(name, row.identity[name]) for name in CELL})
    return record


def _form(config: RunConfig, info: models.ModelInfo, dtype: torch.dtype, say: Notice, *, dry_run: bool) -> Form | None:
    """Return the form of a model's quantised weights; None if they are not quantised. A dry run only warns of a missing
    package. Raises KVBenchError for weights that cannot be loaded."""
    form = quantised.form_of(info.config)
    if form is None:
        return None
    if not dry_run:
        form.require()
    elif text := form.missing():
        say(text)
    if not form.kept:
        say(f"model {quote(config.model)} stores its weights as {form.name}; in memory they are {dtype_name(dtype)}.")
    elif info.folder is None or model_weights.lacking(info.folder):
        say(
            f"the weights of {quote(config.model)} are not on this machine yet; the plan assumes that they are not "
            "quantised."
        )
    return form


def _loader(config: RunConfig, inputs: Inputs, device: torch.device, division: Division | None) -> partial[LoadedModel]:
    revision = inputs.info.commit or config.revision
    return partial(
        load,
        inputs.where,
        revision=revision,
        device=str(device),
        dtype=config.dtype,
        attn=config.attn,
        adapter=inputs.adapter,
        move=None if division is None else division.dispatch,
    )


def _plan_shape(inputs: Inputs, say: Notice) -> ModelShape:
    """Return the sizes that a plan needs, read from the model's configuration without weights. If the model's layers
    cannot be read without weights, estimate the sizes and tell the user so (`say`)."""
    try:
        return read_shape(inputs.config)
    except ProbeFailed:
        shape = estimate_shape(inputs.config)
    say(
        f"the layers of model type {quote(inputs.config.model_type)} can be read only from its weights; slots, "
        "memory and speed of this plan are estimated from its config.json."
    )
    return shape
