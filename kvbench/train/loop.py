"""The loop that trains every learned method.

    done = train(recipe, out, base=Base(name="tiny", config=loaded.model.config))
    done.path                     # OUT/KIND.safetensors with its card, or a folder with a model

After a kill the same call continues from the last checkpoint and reaches the same losses. `OUT/log.jsonl` has one row
per step, `OUT/held_out.jsonl` the held-out figures. Several processes (`kvbench.train.processes`) share each batch and
average their gradients; the first process writes.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.model.weights import Base
from kvbench.errors import SetupError, UserError, quote
from kvbench.train import checkpoint
from kvbench.train.lock import alone
from kvbench.train.processes import Processes, joined
from kvbench.train.recipe import Recipe, Settings

CHECKPOINT, LOG, HELD_OUT = "checkpoint.safetensors", "log.jsonl", "held_out.jsonl"
Tick = Callable[[int, dict[str, float]], None]  # (steps done, the step's figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The weights that a training has written, and the held-out figures before and after."""

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
    checkpoint_seconds: float = 30.0,
    tick: Tick | None = None,
) -> Trained:
    """Train to the end, from the last checkpoint if there is one.

    Args:
        base: the model; `revision`: of its files.
        checkpoint_seconds: between two checkpoints, multiplied by n if writing a checkpoint takes n > 1 seconds. The
            last step always writes a checkpoint.

    Raises:
        UserError: `out` holds a training with other settings.
        RunInUseError: another training holds the folder.
        SetupError: a loss is not finite, or a file cannot be written or read.
    """
    settings = recipe.settings
    with joined() as processes, alone(out) if processes.first else nullcontext():
        share = processes.share(settings.batch)
        parameters = recipe.parameters()
        optimiser = torch.optim.AdamW(
            list(parameters.values()), lr=settings.lr, betas=(0.9, 0.98), weight_decay=settings.weight_decay
        )
        state = _begin(recipe, out, parameters, optimiser, processes, base, revision)
        processes.copy_first(parameters.values())
        step, seconds = int(state["step"]), float(state["seconds"])
        if "before" not in state:
            state["before"] = recipe.held_out()
            _note(out / HELD_OUT, {"step": 0, **state["before"]}, processes)
        saved, took = time.monotonic(), 0.0
        while step < settings.steps:
            started = time.monotonic()
            for group in optimiser.param_groups:
                group["lr"] = rate(settings, step)
            loss, figures = _gradients(recipe, parameters.values(), step, share, processes)
            norm = torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            recipe.after_step()
            step += 1
            seconds += time.monotonic() - started
            row = {"step": step, "loss": loss, "grad_norm": float(norm), "lr": rate(settings, step - 1), **figures}
            _note(out / LOG, row, processes)
            if tick:
                tick(step, {"loss": loss, **figures})
            if step == settings.steps or time.monotonic() - saved >= checkpoint_seconds * max(1.0, took):
                state |= {"step": step, "seconds": seconds}
                began = time.monotonic()
                if processes.first:
                    checkpoint.save(out / CHECKPOINT, parameters, optimiser, state)
                saved = time.monotonic()
                took = saved - began
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
            path, card = recipe.write(out, base=base, made=made)
        return Trained(path=path, card=card, before=state["before"], after=after)


def _gradients(
    recipe: Recipe, parameters: Iterable[torch.Tensor], step: int, share: slice, processes: Processes
) -> tuple[float, dict[str, float]]:
    """Put the gradient of the whole batch into every parameter. Returns the batch's loss, and this share's figures.

    Raises SetupError when the loss is not finite.
    """
    size = share.stop - share.start
    once = recipe.at_once or size
    loss, figures = 0.0, dict[str, float]()
    for start in range(share.start, share.stop, once):
        part = slice(start, min(start + once, share.stop))
        weight = (part.stop - part.start) / size
        value, shown = recipe.loss(step, part)
        (value * weight).backward()
        loss += weight * value.item()
        figures = {name: figures.get(name, 0.0) + weight * figure for name, figure in shown.items()}
    if not math.isfinite(loss := processes.mean(loss)):
        raise SetupError(f"the loss is {loss} at step {step}; try a smaller --lr.")
    gradients = []
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # all processes must average the same tensors
        gradients.append(p.grad)
    processes.average(gradients)
    return loss, figures


def steps_done(out: Path) -> int:
    """Return the steps done at a folder's checkpoint, 0 without one. Raises SetupError for a damaged checkpoint."""
    path = out / CHECKPOINT
    return int(checkpoint.state_of(path)["step"]) if path.exists() else 0


def rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to `floor` of the peak."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.lr * (settings.floor + (1 - settings.floor) * (1 + math.cos(math.pi * done)) / 2)


def _begin(
    recipe: Recipe,
    out: Path,
    parameters: dict[str, torch.Tensor],
    optimiser: torch.optim.AdamW,
    processes: Processes,
    base: Base,
    revision: str | None,
) -> dict[str, Any]:
    """Restore the checkpoint and return its state, or return a new state.

    Raises UserError when the checkpoint has other settings.
    """
    settings = json.loads(json.dumps(asdict(recipe.settings)))
    model = {"base_model": base.name, "revision": revision, "fingerprint": base.fingerprint}
    named = {"recipe": recipe.name, "settings": settings, **model}
    path = out / CHECKPOINT
    if not path.exists():
        if processes.first:
            for name in (LOG, HELD_OUT):
                (out / name).unlink(missing_ok=True)
        return {**named, "step": 0, "seconds": 0.0}
    state = checkpoint.state_of(path)
    if {name: state.get(name) for name in named} != named:
        raise UserError(
            f"{quote(out)} holds a training with other settings: {_differences(state, named)}. "
            "Choose another --out, or remove the folder; a training cannot be made longer."
        )
    checkpoint.restore(path, parameters, optimiser)
    if processes.first:
        forget_after(int(state["step"]), out / LOG)
        forget_after(int(state["step"]) - 1, out / HELD_OUT)  # the last figures are computed again
    return state


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """List the settings in which a checkpoint differs, as in ``steps 200, now 400``."""

    def flat(named: Mapping[str, Any]) -> dict[str, Any]:
        settings = dict(named.get("settings") or {})
        more = settings.pop("more", {})
        return {name: named.get(name) for name in ("recipe", "base_model", "revision", "fingerprint")} | settings | more

    before, now = flat(theirs), flat(ours)
    if before["recipe"] != now["recipe"]:
        return f"recipe {before['recipe']}, now {now['recipe']}"
    other = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    return "; ".join(f"{name} {before.get(name)}, now {now.get(name)}" for name in sorted(other))


def forget_after(step: int, log: Path) -> None:
    """Delete a log's rows after `step`: steps after the checkpoint run again."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    log.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))


def _note(log: Path, row: dict[str, Any], processes: Processes) -> None:
    if processes.first:
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
