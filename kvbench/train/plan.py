"""The plan of a training, made without weights: its data, its steps, and the memory that it takes on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from kvbench.console.faults import words
from kvbench.engine import memory
from kvbench.engine.model.load import pick_device, pick_dtype
from kvbench.errors import KVBenchError
from kvbench.sources import models
from kvbench.train.catalogue import entry_of, recipe_class
from kvbench.train.collection import Collection
from kvbench.train.entry import COUNTS, FLAGS, Entry
from kvbench.train.generation_memory import collecting
from kvbench.train.head_data import Example
from kvbench.train.memory import ROOM, Phase, Rehearsal
from kvbench.train.processes import Processes
from kvbench.train.recipe import Settings
from kvbench.train.rehearsal import Parts
from kvbench.train.traces import Question, Trace

PROMPT = 256  # tokens of a prompt whose length no setting limits
PREDICTED = 64  # positions of an example at which its answer is predicted
# Settings that lower the memory of a training, in the order in which a plan tries them.
SMALLER: Mapping[str, Any] = {"recompute": "on", "micro": 1, "precision": "bfloat16", "slots": 4, "lora": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that a plan is for: a GPU or a CPU, the bytes of its memory, and how many processes train, each on a
    device of its own."""

    gpu: bool
    total: int
    processes: int = 1

    @classmethod
    def of(cls, name: str, total: int | None, processes: int) -> Device:
        """Return the device.

        name: as in --device; not used if `total` is given. total: the memory, in bytes, of a GPU that need not exist.
        """
        if total is not None:
            return cls(gpu=True, total=total, processes=processes)
        device = pick_device(name)
        return cls(gpu=device.type == "cuda", total=memory.total(device), processes=processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The plan of a training on one device.

    Attributes:
        settings: the value of every setting by name, with samples, steps, lr, batch and seed.
        prompt, answer: tokens of the longest prompt and of its answer, for which memory is counted.
        known: whether a setting limits the length of prompts; if none does, `prompt` is an assumption.
        dtype: of the weights.
        items, held_out: the made-up items with which memory is counted.
        phases: the training's phases with the bytes at the peak of each.
        uncounted: why the recipe's own phases could not be counted; "" if they were.
    """

    name: str
    config: Any
    device: Device
    settings: Mapping[str, Any]
    prompt: int
    answer: int
    known: bool
    dtype: torch.dtype
    items: tuple[Any, ...]
    held_out: tuple[Any, ...]
    phases: tuple[Phase, ...]
    uncounted: str = ""

    @classmethod
    def make(cls, name: str, model: str, settings: Mapping[str, Any], device: Device) -> TrainingPlan:
        """Plan a training. Raises KVBenchError if the recipe refuses the settings, or the model cannot be read."""
        info = models.describe(model, weights=False)
        if info.folder is None:
            info = models.fetched(model)
        with models.reading(model, info.where):
            config = transformers.AutoConfig.from_pretrained(info.where, trust_remote_code=False)
        return cls.of(name, config, settings, device)

    @classmethod
    def of(cls, name: str, config: Any, settings: Mapping[str, Any], device: Device) -> TrainingPlan:
        """Plan a training of a model with this configuration."""
        entry = entry_of(name)
        Processes(device.processes).share(settings["batch"])
        context = int(getattr(config.get_text_config(), "max_position_embeddings", 1 << 20))
        prompt, answer, known = _lengths(settings, context)
        dtype = pick_dtype(entry.dtype_for(settings), torch.device("cuda" if device.gpu else "cpu"))
        several = min(settings["batch"] // device.processes, max(2, ROOM // (prompt + answer)))
        held_out = max(1, min(entry.held_out, ROOM // (prompt + answer)))
        tested_on = "questions" if entry.tested_on == "questions" else entry.learns_from
        items = tuple(longest_item(entry.learns_from, i, prompt, answer) for i in range(several))
        tests = tuple(longest_item(tested_on, i, prompt, answer) for i in range(held_out))
        rehearsal = Rehearsal(
            recipe=recipe_class(name),
            config=config,
            settings=recipe_settings(settings),
            items=items,
            held_out=tests,
            count=settings["samples"] + entry.held_out,
            longest=prompt + answer,
            dtype=dtype,
            gpu=device.gpu,
            total=device.total,
            processes=device.processes,
        )
        phases, why = _collecting(entry, settings, context, rehearsal), ""
        try:
            phases += rehearsal.phases()
        except KVBenchError:
            raise
        except Exception as error:  # a plug-in's code may ask for values that meta tensors lack
            why = (words(error).strip().splitlines() or [type(error).__name__])[0]
        return cls(
            name=name,
            config=config,
            device=device,
            settings=settings,
            prompt=prompt,
            answer=answer,
            known=known,
            dtype=dtype,
            items=items,
            held_out=tests,
            phases=tuple(phases),
            uncounted=why,
        )

    @property
    def peak(self) -> Phase:
        """The phase that takes most memory; one without bytes if no phase could be counted."""
        return max(self.phases, key=lambda phase: phase.bytes, default=Phase("not counted", Parts()))

    @property
    def fits(self) -> bool:
        return bool(self.phases) and self.peak.bytes <= self.device.total

    def smaller(self) -> tuple[dict[str, Any], TrainingPlan]:
        """Return settings, by name, with which the training takes less memory, and the plan with these settings.

        The changes in `SMALLER` are added one by one until the training fits; with all of them it may still not fit. A
        change is left out if the recipe refuses it, or if its steps cannot be counted with it.
        """
        plan, changes = self, dict[str, Any]()
        for name, value in SMALLER.items():
            if not plan.fits and plan.settings.get(name, value) != value:
                changed = {**plan.settings, name: value}
                try:
                    tried = TrainingPlan.of(self.name, self.config, changed, self.device)
                except KVBenchError:
                    continue
                if not tried.uncounted and tried.peak.bytes < plan.peak.bytes:
                    plan, changes[name] = tried, value
        return changes, plan


def recipe_settings(values: Mapping[str, Any]) -> Settings:
    """Return a training's settings as the recipe gets them. values: the value of every setting by name."""
    numbers = {name: values[name] for name in (*COUNTS, "seed") if name in values and name != "samples"}
    return Settings.of({name: value for name, value in values.items() if name not in (*FLAGS, "seed")}, **numbers)


def _lengths(settings: Mapping[str, Any], context: int) -> tuple[int, int, bool]:
    """Return the tokens of the longest prompt and of the longest answer that a training reads, and whether a setting
    limits the prompts. context: most tokens that the model reads."""
    if "max_tokens" not in settings:  # examples: a text whose last tokens are the answer
        total = min(int(settings["tokens"]), context)
        predicted = min(PREDICTED, total - 1)
        return total - predicted, predicted, True
    answer = int(settings.get("truncate") or settings["max_tokens"])
    prompt = int(settings.get("max_prompt") or PROMPT)
    if prompt + answer > context:
        answer = max(1, context - prompt)
    return prompt, answer, bool(settings.get("max_prompt"))


def longest_item(kind: str, number: int, prompt: int, answer: int) -> Any:
    """Return a made-up item whose prompt and answer have these many tokens, all with the id 0.

    kind: what the recipe learns from (`Entry.learns_from`). number: becomes the item's name.
    """
    ids, more = (0,) * prompt, (0,) * answer
    if kind == "examples":
        rows = tuple(range(prompt - 1, prompt + answer - 1))
        return Example((*ids, *more), rows, ((0,),) * answer)
    if kind == "questions":
        return Question(name=str(number), ids=ids, max_new_tokens=answer, judge=bool)
    return Trace(name=str(number), prompt=ids, answer=more)


def _collecting(entry: Entry, settings: Mapping[str, Any], context: int, rehearsal: Rehearsal) -> list[Phase]:
    """Return the phase in which the model answers the questions, if the recipe learns from answers."""
    if entry.learns_from != "answers":
        return []
    longest = min(context, rehearsal.longest - len(rehearsal.items[0].answer) + Collection.of(settings).max_tokens)
    return [rehearsal.collecting(collecting(longest, int(settings["samples"]) + entry.held_out))]
