"""Plans a training without loading weights: its settings, and the memory that each phase takes on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from kvbench.console.faults import words
from kvbench.engine.attention.geometry import read_layers
from kvbench.engine.model.load import pick_dtype
from kvbench.engine.model.shape import on_meta
from kvbench.errors import KVBenchError, UserError
from kvbench.sources import models
from kvbench.train.catalogue import entry_of, recipe_class
from kvbench.train.collection import Collection
from kvbench.train.entry import FLAGS, Entry
from kvbench.train.generation_memory import collecting
from kvbench.train.head_data import Example
from kvbench.train.memory import ROOM, Device, Phase, Rehearsal
from kvbench.train.processes import Processes
from kvbench.train.recipe import Settings
from kvbench.train.rehearsal import Parts
from kvbench.train.traces import Question, Trace

PROMPT = 256  # assumed tokens of a prompt, if no setting limits prompts
PREDICTED = 64  # assumed answer tokens of an example
# Values of settings that lower the memory of a training, in the order in which a plan tries them.
SMALLER: Mapping[str, Any] = {"recompute": "on", "micro": 1, "precision": "bfloat16", "slots": 4, "lora": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The plan of a training on one device.

    Attributes:
        settings: the value of every setting by name, including samples, steps, lr, batch and seed.
        prompt, answer: tokens of the longest prompt and of its answer; the plan counts memory for this length.
        generated: tokens of the longest answer that the model generates; `answer` may be shorter, because recipes cut
            answers. 0 for a recipe that learns from examples.
        known: whether a setting limits the length of prompts; if none does, `prompt` is an assumption.
        dtype: dtype of the loaded weights.
        items, held_out: the made-up items with which the plan counts memory.
        phases: the training's phases with the bytes at the peak of each.
        uncounted: why the memory of the recipe's own phases could not be counted; "" if it was counted.
        window: tokens of the sliding window into which every text is assumed to fit; None without this assumption.
    """

    name: str
    config: Any
    device: Device
    settings: Mapping[str, Any]
    prompt: int
    answer: int
    generated: int
    known: bool
    dtype: torch.dtype
    items: tuple[Any, ...]
    held_out: tuple[Any, ...]
    phases: tuple[Phase, ...]
    uncounted: str = ""
    window: int | None = None

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
        """Plan a training of a model with this configuration.

        If every layer of the model has a sliding window, and the recipe refuses texts as long as the settings allow,
        the plan assumes that every text fits into the largest window.
        """
        Processes(device.processes).share(settings["batch"])
        context = models.context_of(config)
        try:
            return cls._with_context(name, config, settings, device, context)
        except UserError:
            window = _window(config) if "max_tokens" in settings else None  # else the recipe sets the length of texts
            if window is None or window >= context:
                raise
            return replace(cls._with_context(name, config, settings, device, window), window=window)

    @classmethod
    def _with_context(
        cls, name: str, config: Any, settings: Mapping[str, Any], device: Device, context: int
    ) -> TrainingPlan:
        """Plan a training whose texts, with their answers, have at most `context` tokens."""
        entry = entry_of(name)
        prompt, answer, known = _lengths(settings, context)
        dtype = pick_dtype(entry.dtype_for(settings), device.torch_device)
        several = min(settings["batch"] // device.processes, max(2, ROOM // (prompt + answer)))
        tested_on = "questions" if entry.tested_on == "questions" else entry.learns_from
        # neither collected answers nor those to held-out questions are truncated
        generated = min(int(settings.get("max_tokens", 0)), context - prompt)
        tested = generated if tested_on == "questions" else answer
        held_out = max(1, min(entry.held_out, ROOM // (prompt + tested)))
        items = tuple(longest_item(entry.learns_from, i, prompt, answer) for i in range(several))
        tests = tuple(longest_item(tested_on, i, prompt, tested) for i in range(held_out))
        rehearsal = Rehearsal(
            recipe=recipe_class(name),
            config=config,
            settings=recipe_settings(settings),
            items=items,
            held_out=tests,
            count=settings["samples"] + entry.held_out,
            longest=prompt + answer,
            dtype=dtype,
            device=device,
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
            generated=generated,
            known=known,
            dtype=dtype,
            items=items,
            held_out=tests,
            phases=tuple(phases),
            uncounted=why,
        )

    @property
    def tokens(self) -> dict[str, int]:
        """The most tokens in the texts of one step and of all steps, over all processes, and the most tokens that the
        model generates before the first step and in all steps. Held-out figures are not counted.

        A text counts each time it is drawn, however many passes over it the recipe makes. A question of a recipe that
        learns from questions counts with all its answers, of which the setting `group` gives the number.
        """
        entry, settings = entry_of(self.name), self.settings
        asks = entry.learns_from == "questions"
        texts = settings["batch"] * (settings.get("group", 1) if asks else 1)
        answers = settings["samples"] + (entry.held_out if entry.tested_on == "answers" else 0)
        return {
            "step": texts * (self.prompt + self.answer),
            "all_steps": settings["steps"] * texts * (self.prompt + self.answer),
            "generated_before": answers * self.generated if entry.learns_from == "answers" else 0,
            "generated_in_steps": settings["steps"] * texts * self.generated if asks else 0,
        }

    @property
    def peak(self) -> Phase:
        """The phase that takes most memory; if no phase could be counted, a phase with 0 bytes."""
        return max(self.phases, key=lambda phase: phase.bytes, default=Phase("not counted", Parts()))

    @property
    def fits(self) -> bool | None:
        """Whether the training fits the device; None if all counted phases fit, but others could not be counted."""
        if self.peak.bytes > self.device.total:
            return False
        return None if self.uncounted else True

    def smaller(self) -> tuple[dict[str, Any], TrainingPlan]:
        """Return changes of settings, by name, that lower the training's memory, and the plan with these changes.

        The values in `SMALLER` are tried one after another until the training fits. Only values that lower the memory
        become changes. The training may not fit even with all changes.
        """
        plan, changes = self, dict[str, Any]()
        for name, value in SMALLER.items():
            if plan.fits is False and plan.settings.get(name, value) != value:
                changed = {**plan.settings, name: value}
                try:
                    tried = TrainingPlan.of(self.name, self.config, changed, self.device)
                except KVBenchError:
                    continue
                if not tried.uncounted and tried.peak.bytes < plan.peak.bytes:
                    plan, changes[name] = tried, value
        return changes, plan


def recipe_settings(values: Mapping[str, Any]) -> Settings:
    """Convert the values of all settings, by name, into the `Settings` that the recipe gets."""
    numbers = {name: values[name] for name in ("steps", "lr", "batch", "seed")}
    return Settings.of({name: value for name, value in values.items() if name not in (*FLAGS, "seed")}, **numbers)


def _window(config: Any) -> int | None:
    """Return the tokens of the largest sliding window; None if a layer of the model has no sliding window."""
    windows = [layer.window or 0 for layer in read_layers(on_meta(config))[0]]
    return max(windows) if all(windows) else None


def _lengths(settings: Mapping[str, Any], context: int) -> tuple[int, int, bool]:
    """Return the tokens of the longest prompt and of the longest answer, and whether a setting limits prompts. context:
    most tokens that the model can read."""
    if "max_tokens" not in settings:  # the recipe trains on examples: texts that end with the answer
        total = min(int(settings["tokens"]), context)
        predicted = min(PREDICTED, total - 1)
        return total - predicted, predicted, True
    answer = int(settings.get("truncate") or settings["max_tokens"])
    prompt = max(1, min(int(settings.get("max_prompt") or PROMPT), context - min(answer, context // 2)))
    if prompt + answer > context:
        answer = max(1, context - prompt)
    return prompt, answer, bool(settings.get("max_prompt"))


def longest_item(kind: str, number: int, prompt: int, answer: int) -> Any:
    """Return a made-up item with `prompt` prompt tokens and `answer` answer tokens, all with the id 0.

    kind: which kind of item the recipe needs (`Entry.learns_from`). A question has no answer, only room for `answer`
    tokens. number: becomes the item's name; an example has none.
    """
    ids, more = (0,) * prompt, (0,) * answer
    if kind == "examples":
        rows = tuple(range(prompt - 1, prompt + answer - 1))
        return Example((*ids, *more), rows, ((0,),) * answer)
    if kind == "questions":
        return Question(name=str(number), ids=ids, max_new_tokens=answer, judge=bool)
    return Trace(name=str(number), prompt=ids, answer=more)


def _collecting(entry: Entry, settings: Mapping[str, Any], context: int, rehearsal: Rehearsal) -> list[Phase]:
    """Return, in a list, the phase in which answers are collected; [] if the recipe does not learn from answers."""
    if entry.learns_from != "answers":
        return []
    collection, questions = Collection.of(settings), int(settings["samples"]) + entry.held_out
    longest = min(context, rehearsal.longest - len(rehearsal.items[0].answer) + collection.max_tokens)
    return [rehearsal.collecting(collecting(longest, questions, collection.sampling))]
