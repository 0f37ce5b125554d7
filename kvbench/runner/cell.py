"""Plans one cell of a run: its rows, its number of slots, and hashes of its method's source, weights and plug-ins."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from kvbench.config import plugins
from kvbench.config.run_config import Cell, MethodChoice, RunConfig
from kvbench.engine.attention.geometry import largest_group
from kvbench.engine.cache.layout import check_prefill, fit, layer_by_layer
from kvbench.engine.images import joined
from kvbench.engine.model.layer_weights import refuse_quantised
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import ModelShape
from kvbench.engine.model.weights import find, load_weights
from kvbench.engine.plan import Machine, plan_cell
from kvbench.engine.probes import check_probes
from kvbench.engine.slot_plan import SlotPlan
from kvbench.errors import SetupError, quote
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.modality import check_images
from kvbench.records import Sampling
from kvbench.runner.method_source import Source, source_of
from kvbench.runner.prompt import Prompt
from kvbench.runner.workload import PlannedRow, TaskWork, make_method, version
from kvbench.sources import models
from kvbench.taskkit.names import base_name


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodState:
    """A method with its options, and what identifies its behaviour: version, hash of its source, and artefacts.

    artefacts: hashes and revisions of its weights, plug-ins and draft models, see the function `artefacts`.
    """

    method: Method
    version: str
    source: Source
    artefacts: dict[str, str] | None

    @classmethod
    def of(cls, choice: MethodChoice, model_config: Any, info: models.ModelInfo) -> MethodState:
        """Make the method that the user chose, and find its version, source and artefacts. Raises KVBenchError like
        `artefacts`, and UserError if the method reads matrices of the model that stay quantised in memory, or learned
        tokens that the model does not support."""
        method = choose.make(choice.name, dict(choice.options))
        refuse_quantised(choice.label, method, model_config)
        check_probes(method, model_config)
        return cls(
            method=method,
            version=version(choice.name),
            source=source_of(method),
            artefacts=artefacts(method, model_config, choice.name.split("+"), info),
        )

    def used(self, task: str) -> dict[str, str] | None:
        """Return what the rows of a task store about artefacts; None if there is nothing to store.

        The result has the hashes and revisions of the method's artefacts. If a plug-in defines the task, the result has
        the plug-in's hash too.
        """
        return (self.artefacts or {}) | _plug_ins([base_name(task)]) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """The plan of one cell: its rows, its number of slots, and the largest token counts of prompts and answers."""

    cell: Cell
    interval: int
    rows: list[PlannedRow]
    plan: SlotPlan
    planned_slots: int  # number of slots before memory ran out
    plan_with: Callable[[int], SlotPlan]  # makes the plan with a given number of slots
    max_tokens: int  # of prompt and output together
    max_output: int
    tail: int  # largest number of prompt tokens after the context
    source: str  # hash of the method's source
    oom_retries: int = 0  # how often memory ran out until now

    def after_lack_of_memory(self, slots: int, retries: int) -> CellPlan:
        """Return the plan of the same cell with other slots, after memory ran out. slots: the new number of slots.
        retries: how often memory has run out in this cell."""
        return replace(self, plan=self.plan_with(slots), oom_retries=retries)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlanner:
    """Plans cells of a run. Its fields hold for all cells: configuration, model, machine, device."""

    config: RunConfig
    model: Mapping[str, Any]  # name and revision, as every row has them
    context: int  # tokens
    shape: ModelShape
    machine: Machine
    device: torch.device
    dtype: torch.dtype
    _towers: dict[tuple[str, bool], tuple[int, int]] = field(default_factory=dict)  # see `_images`

    def plan(self, cell: Cell, work: TaskWork, state: MethodState, slots: SlotPlan | None) -> CellPlan:
        """Plan a cell: its rows, and the slots and lengths for the engine.

        slots: the plan of slots that the coordinator made; None: make one here, which may take seconds. Raises
        KVBenchError if the engine cannot serve the method, or if the device has less memory than the coordinator's plan
        needs.
        """
        config, context = self.config, self.context
        check_prefill(state.method, config.prefill, cell.method.label)
        if any(prompt.pictures for prompt in work.prompts):
            check_images(cell.method.label, state.method)
        group = largest_group(self.shape.geometry)
        rows = work.rows(
            cell, config, {**self.model, "artefacts": state.used(cell.task)}, dtype_name(self.dtype), group
        )
        fitting = [p for p in work.prompts if p.max_tokens <= context and len(p.ids) < context]  # others get rows too
        longest = max((picture["tokens"] for p in fitting for picture in p.pictures), default=0)
        lengths = {
            "max_tokens": max((p.max_tokens for p in fitting), default=1),
            "max_output": max((p.max_tokens - len(p.ids) for p in fitting), default=1),
            "tail": max((len(p.ids) - (p.compress_at or len(p.ids)) for p in fitting), default=0),
        }
        plan_with = partial(
            plan_cell,
            self.shape,
            self.machine,
            state.method,
            budget=cell.budget,
            interval=config.interval_of(cell),
            sequences=max(1, len(rows)),
            device=self.device,
            dtype=self.dtype,
            prefill_chunk=max(config.prefill_chunk, longest),  # no pass splits an image
            prefill=config.prefill,
            backend=config.decode_attn,
            samplings={Sampling.of(p.spec) for p in fitting},
            images=self._images(
                work.task.name,
                fitting,
                layer_by_layer(state.method, config.prefill, states=bool(self.shape.states)),
            ),
            max_prompt=max((p.max_tokens if p.talk else len(p.ids) for p in fitting), default=1),
            **lengths,
        )
        if slots is not None and slots.peak_bytes > self.machine.memory:
            raise SetupError(
                f"a worker's device has {self.machine.memory / 2**30:.3g} GiB, but {quote(cell.label)} is planned with "
                f"{slots.peak_bytes / 2**30:.3g} GiB. Use workers with devices of one kind, or fewer --slots."
            )
        plan = slots or plan_with(slots=config.slots)
        return CellPlan(
            cell=cell,
            interval=config.interval_of(cell),
            rows=rows,
            plan=plan,
            planned_slots=plan.slots,
            plan_with=lambda slots: plan_with(slots=slots),
            source=state.source.hash,
            **lengths,
        )

    def _images(self, task: str, prompts: Sequence[Prompt], whole: bool) -> tuple[int, int]:
        """Return the bytes that the model's vision part holds in a forward pass with images, as (peak, remaining).

        peak: the most bytes during the pass. remaining: the bytes still held after the pass. Both are for the prompt
        with the most image tokens; (0, 0) if no prompt has images. whole: whether one pass reads a whole prompt.
        Otherwise a pass reads the images of one chunk, or a single image that has more tokens than a chunk.
        """
        shown = max(prompts, key=lambda p: sum(picture["tokens"] for picture in p.pictures), default=None)
        if shown is None or not shown.pictures:
            return 0, 0
        if (task, whole) not in self._towers:
            tokens = [picture["tokens"] for picture in shown.pictures]
            room = sum(tokens) if whole else max(self.config.prefill_chunk, *tokens)
            assert shown.read_pictures is not None
            assert self.shape.images is not None
            read = shown.read_pictures()
            largest = sorted(range(len(read)), key=lambda i: -tokens[i])
            together = [read[i] for i, seen in zip(largest, accumulate(tokens[i] for i in largest)) if seen <= room]
            # On a CPU, the pixel values of each image stay in memory while the pass reads a tensor that joins them.
            host = sum(value.nbytes for one in read for value in one.values()) if self.device.type == "cpu" else 0
            peak, left = self.shape.images(joined(together), self.dtype)
            self._towers[task, whole] = host + peak, host + left
        return self._towers[task, whole]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a number type: ``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def check_weights(plans: Iterable[CellPlan], loaded: LoadedModel) -> None:
    """Raise SetupError if the weights of a method were made for a model with other parameters than the loaded model,
    UserError if they are untrained in a layer that the method will evict."""
    cells = {(plan.cell.method, plan.max_tokens): plan.cell for plan in plans}
    methods = {choice: make_method(cell) for (choice, _), cell in cells.items()}
    for choice, method in methods.items():
        if (needed := method.weights()) is not None:
            lengths = [longest for other, longest in cells if other == choice]
            layers = {g.index for longest in lengths for g in fit(loaded.geometry, method, longest) if g.evicts}
            load_weights(needed, loaded.folder, loaded.model.config, "cpu", loaded.fingerprint, layers)


def artefacts(method: Method, model_config: Any, names: Sequence[str], info: models.ModelInfo) -> dict[str, str] | None:
    """Return hashes of a method's weights and plug-ins, and revisions of its draft models; None if it has none of them.

    names: the method's name, or the names of its two parts. Raises KVBenchError when weights or a draft model are
    missing, damaged or made for another model.
    """
    used = _plug_ins(names)
    if (needed := method.weights()) is not None:
        load_weights(needed, info.folder, model_config, "cpu")
        path = find(needed, info.folder, info.name)
        used[needed.kind] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    for name in method.drafts():
        draft = models.fetched(name)
        used[f"draft {name}"] = models.revision(draft) or "?"
    return used or None


def _plug_ins(names: Iterable[str]) -> dict[str, str]:
    """Return the hashes of the plug-ins that define methods or tasks of these names."""
    hashes = {name: plugins.hash_of(name, "method", "task") for name in names}
    return {f"plug-in {name}": sha256[:16] for name, sha256 in hashes.items() if sha256 is not None}
