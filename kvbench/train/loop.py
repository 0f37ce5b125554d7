"""The loop that trains every learned method.

    done = train(recipe, out, base_model="tiny", config=loaded.model.config)
    done.path                     # what was made: OUT/KIND.safetensors with its card, or a folder with a model

After a kill the same call goes on from the last checkpoint and comes to the same losses. `OUT/log.jsonl` has one row a
step, `OUT/held_out.jsonl` the held-out figures. With several processes (accelerate, torchrun) each takes its share of
a batch and gradients are averaged; the first process writes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.errors import SetupError, UserError, show
from kvbench.train import checkpoint
from kvbench.train.recipe import Recipe, Settings

CHECKPOINT, LOG, HELD_OUT = "checkpoint.safetensors", "log.jsonl", "held_out.jsonl"
Tick = Callable[[int, dict[str, float]], None]  # (steps done, the step's figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Weights that were written, and the held-out figures before and after."""

    path: Path
    card: dict[str, Any]
    before: dict[str, float]
    after: dict[str, float]

    def improved(self, recipe: Recipe) -> bool:
        gain = self.after[recipe.figure] - self.before[recipe.figure]
        return gain > 0 if recipe.higher else gain < 0


def train(
    recipe: Recipe,
    out: Path,
    *,
    base_model: str,
    config: Any,
    revision: str | None = None,
    command: str = "",
    checkpoint_seconds: float = 30.0,
    tick: Tick | None = None,
) -> Trained:
    """Train to the end, from the last checkpoint where there is one.

    Args:
        config: the model's, for the card.
        checkpoint_seconds: between two checkpoints; the last step always makes one.

    Raises:
        UserError: `out` holds a training with other settings.
        SetupError: a loss is not finite, or a file cannot be written or read.
    """
    settings = recipe.settings
    processes = _Processes()
    parameters = recipe.parameters()
    optimiser = torch.optim.AdamW(
        list(parameters.values()), lr=settings.lr, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    state = _begin(recipe, out, parameters, optimiser, processes, base_model, revision)
    step, seconds = int(state["step"]), float(state["seconds"])
    if "before" not in state:
        state["before"] = recipe.held_out()
        _note(out / HELD_OUT, {"step": 0, **state["before"]}, processes)
    saved = time.monotonic()
    while step < settings.steps:
        started = time.monotonic()
        for group in optimiser.param_groups:
            group["lr"] = rate(settings, step)
        loss, figures = recipe.loss(step, processes.share(settings.batch))
        if not math.isfinite(value := processes.mean(loss.item())):
            raise SetupError(f"the loss is {value} at step {step}; try a smaller --lr.")
        loss.backward()
        processes.average(parameters.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        seconds += time.monotonic() - started
        row = {"step": step, "loss": value, "grad_norm": float(norm), "lr": rate(settings, step - 1), **figures}
        _note(out / LOG, row, processes)
        if tick:
            tick(step, {"loss": value, **figures})
        if step == settings.steps or time.monotonic() - saved >= checkpoint_seconds:
            state |= {"step": step, "seconds": seconds}
            if processes.first:
                checkpoint.save(out / CHECKPOINT, parameters, optimiser, state)
            saved = time.monotonic()
    after = recipe.held_out()
    _note(out / HELD_OUT, {"step": step, **after}, processes)
    made = {
        "recipe": recipe.name,
        "command": command,
        "settings": asdict(settings) | {"more": dict(settings.more)},
        "base_revision": revision,
        "held_out_before": state["before"],
        "held_out_after": after,
        "seconds": round(seconds, 1),
        **recipe.card(),
    }
    path: Path = out
    card: dict[str, Any] = {}
    if processes.first:
        path, card = recipe.write(out, config=config, base_model=base_model, made=made)
    return Trained(path=path, card=card, before=state["before"], after=after)


def rate(settings: Settings, step: int) -> float:
    """Learning rate of a step: linear warm-up, then a cosine down to `floor` of the peak."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * done)) / 2)


class _Processes:
    """This process among those of a training; alone unless torchrun or accelerate started several."""

    def __init__(self) -> None:
        self.count, self.rank, self._accelerator = 1, 0, None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            self._accelerator = Accelerator()
            self.count, self.rank = self._accelerator.num_processes, self._accelerator.process_index

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, batch: int) -> slice:
        """This process's samples of a batch."""
        if batch % self.count:
            raise UserError(f"a batch of {batch} cannot be shared equally by {self.count} processes.")
        size = batch // self.count
        return slice(self.rank * size, (self.rank + 1) * size)

    def average(self, parameters: Any) -> None:
        if self._accelerator is not None:
            for p in parameters:
                p.grad = self._accelerator.reduce(torch.zeros_like(p) if p.grad is None else p.grad, "mean")

    def mean(self, value: float) -> float:
        if self._accelerator is None:
            return value
        return float(self._accelerator.reduce(torch.tensor(value, device=self._accelerator.device), "mean"))


def _begin(
    recipe: Recipe,
    out: Path,
    parameters: dict[str, torch.Tensor],
    optimiser: torch.optim.AdamW,
    processes: _Processes,
    base_model: str,
    revision: str | None,
) -> dict[str, Any]:
    """State to go on from: that of the checkpoint, or a new one."""
    settings = json.loads(json.dumps(asdict(recipe.settings)))
    named = {"recipe": recipe.name, "settings": settings, "base_model": base_model, "revision": revision}
    path = out / CHECKPOINT
    if not path.exists():
        if processes.first:
            for name in (LOG, HELD_OUT):
                (out / name).unlink(missing_ok=True)
        return {**named, "step": 0, "seconds": 0.0}
    state = checkpoint.restore(path, parameters, optimiser)
    if {name: state.get(name) for name in named} != named:
        raise UserError(
            f"{show(out)} holds a training with other settings ({state.get('recipe')}); choose another --out."
        )
    if processes.first:
        forget_after(int(state["step"]), out / LOG)
        forget_after(int(state["step"]), out / HELD_OUT)
    return state


def forget_after(step: int, log: Path) -> None:
    """Drop the rows of steps that a kill undid; they will be run again."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))


def _note(log: Path, row: dict[str, Any], processes: _Processes) -> None:
    if processes.first:
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
