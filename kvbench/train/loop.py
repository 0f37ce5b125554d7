"""The loop that trains every recipe: the weights of a learned method, or the model itself.

After a kill the same call continues from the last checkpoint and reaches the same losses. The number of steps may be
changed later, if each step taken so far keeps its learning rate. In the training's folder, `log.jsonl` has one line per
step, and `held_out.jsonl` has the held-out figures. Several processes (`kvbench.train.processes`) share each batch and
average their gradients and figures; only the first process writes files.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.model.weights import Base
from kvbench.errors import SetupError, UserError, quote, shown
from kvbench.sources.model_files import CHECKPOINT
from kvbench.train import checkpoint
from kvbench.train.lock import alone
from kvbench.train.optimiser import ShardedAdamW
from kvbench.train.processes import Processes, joined
from kvbench.train.recipe import Recipe, Settings

LOG, HELD_OUT = "log.jsonl", "held_out.jsonl"
OnStep = Callable[[int, dict[str, float]], None]  # called with the steps done, and the last step's loss and figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The result of a training: where its weights are, their card, and the held-out figures before and after it."""

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
    base: Base,
    revision: str | None = None,
    command: str = "",
    evaluate: int = 0,
    checkpoint_seconds: float = 30.0,
    on_step: OnStep | None = None,
) -> Trained:
    """Train a recipe to its last step, starting from the last checkpoint if there is one.

    Args:
        base: the model; revision: the commit of its files; command: the command line, for the card.
        evaluate: steps between two computations of the held-out figures; 0: only before and after the training.
        checkpoint_seconds: the least time between two checkpoints. If writing the previous checkpoint took more than 1
            second, this time is multiplied by the seconds that it took. The last step always ends with a checkpoint.
        on_step: called after every step with the step's figures. Once this call of `train` has computed the held-out
            figures after a step (see `evaluate`), the figures of every later step include the newest value of the main
            held-out figure.

    Raises:
        UserError: `out` holds a training with other settings, or the processes cannot divide the batch equally.
        RunInUseError: another training holds the folder.
        SetupError: a loss or gradient is not finite, the checkpoint cannot be read, or the weights cannot be written.
        OSError: the log or the checkpoint cannot be written.
    """
    with joined() as processes, alone(out):
        training = _Training(recipe, out, processes, base, revision)
        training.begin()
        saved, took, newest = time.monotonic(), 0.0, dict[str, float]()
        while training.step < recipe.settings.steps:
            if evaluate and training.step and training.step % evaluate == 0:
                newest = {f"held-out {recipe.figure}": training.held_out()[recipe.figure]}
            figures = training.advance()
            if on_step:
                on_step(training.step, figures | newest)
            due = time.monotonic() - saved >= checkpoint_seconds * max(1.0, took)
            if training.step == recipe.settings.steps or processes.first_says(due):
                began = time.monotonic()
                training.save()
                saved = time.monotonic()
                took = saved - began
        before, after = training.state["before"], training.held_out()
        made = {
            "recipe": recipe.name,
            "recipe_version": recipe.version,
            "command": command,
            "settings": asdict(recipe.settings) | {"more": dict(recipe.settings.more)},
            "base_revision": revision,
            "held_out_before": before,
            "held_out_after": after,
            "seconds": round(training.seconds, 1),
            "trained_at": {n: recipe.settings.more[n] for n in recipe.trained_at if n in recipe.settings.more},
            **recipe.card(),
        }
        path, card = recipe.write(out, base=base, made=made) if processes.first else (out, {})
        return Trained(path=path, card=card, before=before, after=after)


class _Training:
    """A training in its folder: the parameters, the optimiser, and the other contents of a checkpoint (`state`)."""

    def __init__(self, recipe: Recipe, out: Path, processes: Processes, base: Base, revision: str | None) -> None:
        settings = recipe.settings
        self.recipe, self.out, self.processes = recipe, out, processes
        self.share = processes.share(settings.batch)
        self.parameters = recipe.parameters()
        processes.copy_first(self.parameters.values())
        how = {"beta2": settings.beta2, "weight_decay": settings.weight_decay}
        self.optimiser = ShardedAdamW(self.parameters, processes, **how)
        model = {"base_model": base.name, "revision": revision, "fingerprint": base.fingerprint}
        about = {"recipe": recipe.name, "recipe_version": recipe.version}
        self.named = {**about, "settings": json.loads(json.dumps(asdict(settings))), **model}
        self.state: dict[str, Any] = {**self.named, "step": 0, "seconds": 0.0}
        self.step, self.seconds = 0, 0.0

    def begin(self) -> None:
        """Continue from the checkpoint in the training's folder. Without a checkpoint, delete the logs in the folder,
        and compute the held-out figures. Raises UserError when the checkpoint has other settings (see `_continues`)."""
        if (self.out / CHECKPOINT).exists():
            self._restore()
        elif self.processes.first:
            for name in (LOG, HELD_OUT):
                (self.out / name).unlink(missing_ok=True)
        self.step, self.seconds = int(self.state["step"]), float(self.state["seconds"])
        if "before" not in self.state:
            self.state["before"] = self.held_out()

    def advance(self) -> dict[str, float]:
        """Take one step: update the parameters and append a line to the log. Return the loss and the
        recipe's figures of the whole batch.

        Raises SetupError when the loss or the gradient is not finite.
        """
        started, lr = time.monotonic(), rate(self.recipe.settings, self.step)
        loss, figures = self._gradients()
        norm = self.optimiser.step(lr, self.recipe.settings.clip)
        self.recipe.after_step()
        self.step += 1
        self.seconds += time.monotonic() - started
        self._note(LOG, {"step": self.step, "loss": loss, "grad_norm": norm, "lr": lr, **figures})
        return {"loss": loss, **figures}

    def held_out(self) -> dict[str, float]:
        figures = self.recipe.held_out()
        self._note(HELD_OUT, {"step": self.step, **figures})
        return figures

    def save(self) -> None:
        self.state |= {"step": self.step, "seconds": self.seconds}
        checkpoint.save(self.out / CHECKPOINT, self.optimiser, self.state, self.processes)

    def _restore(self) -> None:
        path = self.out / CHECKPOINT
        self.state = {"recipe_version": 1} | checkpoint.state_of(path)  # older checkpoints have no version
        if not self._continues():
            raise UserError(
                f"{quote(self.out)} holds a training with other settings: {_differences(self.state, self.named)}. "
                "A training that has begun keeps its settings: choose another --out, or remove the folder. "
                "To train the weights of a finished training further, use --continue-from."
            )
        self.state |= self.named
        checkpoint.restore(path, self.optimiser, int(self.state["step"]))
        if self.processes.first:
            forget_after(int(self.state["step"]), self.out / LOG)
            forget_after(int(self.state["step"]) - 1, self.out / HELD_OUT)  # they are computed again at this step

    def _continues(self) -> bool:
        """Return whether this training can continue from the checkpoint: model, recipe, the recipe's version and all
        settings are equal. Only the number of steps may differ, if every step so far had the learning rate that this
        training gives it."""
        theirs = {name: self.state.get(name) for name in self.named}
        steps, settings = int((theirs["settings"] or {}).get("steps", 0)), self.recipe.settings
        if theirs != self.named | {"settings": self.named["settings"] | {"steps": steps}}:
            return False
        before, done = replace(settings, steps=steps), int(self.state["step"])
        return done <= settings.steps and all(rate(before, step) == rate(settings, step) for step in range(done))

    def _gradients(self) -> tuple[float, dict[str, float]]:
        """Compute the gradients of this process's part of the batch. Return the loss and the recipe's figures of the
        whole batch."""
        size = self.share.stop - self.share.start
        once = self.recipe.at_once or size
        loss, sums = 0.0, dict[str, tuple[float, float]]()
        for start in range(self.share.start, self.share.stop, once):
            part = slice(start, min(start + once, self.share.stop))
            items = part.stop - part.start
            weight = items / size
            value, shown = self.recipe.loss(self.step, part)
            (value * weight).backward()
            loss += weight * value.item()
            for name, figure in shown.items():
                total, count = figure if isinstance(figure, tuple) else (items * figure, items)
                before, counted = sums.get(name, (0.0, 0.0))
                sums[name] = before + total, counted + count
        sums = dict(sorted(sums.items()))  # in the same order in all processes
        table = torch.tensor([(loss, 1.0), *sums.values()], dtype=torch.float64)
        self.processes.average(table)
        loss, *figures = (total / (count or 1.0) for total, count in table.tolist())
        if not math.isfinite(loss):
            raise SetupError(f"the loss is {loss} at step {self.step + 1}; try a smaller --lr.")
        return loss, dict(zip(sums, figures))

    def _note(self, log: str, row: dict[str, Any]) -> None:
        if self.processes.first:
            with (self.out / log).open("a") as file:
                file.write(json.dumps(row) + "\n")


def steps_done(out: Path) -> int:
    """Return how many steps the training in a folder had done at its checkpoint; 0 without a checkpoint. Raises
    SetupError if the checkpoint is damaged."""
    path = out / CHECKPOINT
    return int(checkpoint.state_of(path)["step"]) if path.exists() else 0


def rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step.

    The rate rises linearly to its peak `lr` during the warm-up. After that, its course depends on the schedule:

    - cosine: it falls as a cosine to `floor` times the peak.
    - constant: it stays at the peak.
    - trapezoid: it stays at the peak, then falls linearly; the fall has as many steps as the warm-up and ends with the
      training. The rate is never below `floor` times the peak, not even during the warm-up.
    """
    warm = (step + 1) / settings.warmup if settings.warmup else 1.0
    if settings.schedule == "trapezoid":
        cold = (settings.steps - step) / settings.warmup if settings.warmup else 1.0
        return settings.lr * max(settings.floor, min(1.0, warm, cold))
    if step < settings.warmup or settings.schedule == "constant":
        return settings.lr * min(1.0, warm)
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * done)) / 2)


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return text that names each setting in which a checkpoint and this training differ: ``steps 200, now 400``.

    If the recipes differ, the text names only the recipes.

    theirs: settings in the checkpoint. ours: settings of this training.
    """

    def flat(named: Mapping[str, Any]) -> dict[str, Any]:
        settings = dict(named.get("settings") or {})
        more = settings.pop("more", {})
        names = ("recipe", "recipe_version", "base_model", "revision", "fingerprint")
        return {name: named.get(name) for name in names} | settings | more

    before, now = flat(theirs), flat(ours)
    if before["recipe"] != now["recipe"]:
        return f"recipe {before['recipe']}, now {now['recipe']}"
    other = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    return "; ".join(f"{name} {shown(before.get(name))}, now {shown(now.get(name))}" for name in sorted(other))


def forget_after(step: int, log: Path) -> None:
    """Delete the lines of a log that belong to steps after `step`, and a last line that a kill cut short. A training
    that continues from `step` repeats the later steps, and writes their lines again."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))
