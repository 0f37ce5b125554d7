"""Measures the peak memory of training steps on the CPU, beside what a plan counts. Run as a script; prints CSV.

    cd tests && OMP_NUM_THREADS=1 python -m support.training_memory > ../results/training/memory.csv

A recipe computes its held-out figures, takes one step of its loss, its gradients and the optimiser, and computes the
figures again, on a random model and random tokens. torch's profiler records every allocation of the CPU's allocator.
"""

from __future__ import annotations

import csv
import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch.autograd.profiler import profile, record_function

from kvbench.engine.model.load import prepare
from kvbench.engine.model.weights import model_fields
from kvbench.eviction.terms.foresight import scorer_shapes
from kvbench.train.catalogue import entry_of, recipe_class
from kvbench.train.memory import HELD_OUT, STEP, UPDATE
from kvbench.train.optimiser import ShardedAdamW
from kvbench.train.plan import Device, TrainingPlan, recipe_settings
from kvbench.train.processes import Processes
from kvbench.train.recipes import foresightkv_grpo, gkv_rl
from support.models import Words
from support.recipes import change

PHASES = (STEP, UPDATE, HELD_OUT)
TOKENS = 1000  # of the random texts
CPU = Device(gpu=False, total=64 * 10**9)
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True}
_GKV: dict[str, Any] = {"budget": 128, "interval": 64, "max_tokens": 800, "batch": 2, "truncate": 0}
_SCORER: dict[str, Any] = {"budget": 128, "interval": 64, "max_tokens": 800, "batch": 2}
# What makes a recipe small; all else as in the paper's preset.
SMALL: dict[str, dict[str, Any]] = {
    "lookaheadkv": {"max_prompt": 800, "max_tokens": 200, "batch": 2},
    "trimkv": {"max_tokens": 800, "budget": 128, "interval": 64, "batch": 2},
    "retention": {"max_tokens": 800, "budget": 128, "interval": 64, "batch": 2},
    "kvzap": {"max_tokens": 800, "tokens": 1000, "batch": 2},
    "duo": {"sinks": 16, "recent": 64, "tokens": 1000, "batch": 2},
    "foresightkv": _SCORER | {"min_tokens": 0},
    "foresightkv-grpo": _SCORER | {"min_tokens": 0, "long": 0, "group": 2},
    "gkv-distill": _GKV | {"recompute": "on"},
    "gkv-rl": _GKV | {"group": 2, "slots": 4},
}


def config(layers: int, kind: Any = transformers.Qwen3Config, **sizes: Any) -> Any:
    return kind(num_hidden_layers=layers, **SIZES | sizes)


def plan(name: str, config: Any, device: Device = CPU, **changes: Any) -> TrainingPlan:
    """Return the plan of a small training with two items and two held-out ones. changes: of its settings."""
    with pytest.MonkeyPatch.context() as patched:
        change(patched, name, held_out=2)
        settings = entry_of(name).settings("model", "paper") | SMALL[name] | {"samples": 2, "seed": 0} | changes
        return TrainingPlan.of(name, config, settings, device)


def measured(planned: TrainingPlan) -> dict[str, int]:
    """Return the peak of allocated bytes in the phases of a step of the planned training.

    The set-up is left out: it draws random numbers on the CPU, which is not the device that a plan is for.
    """
    settings = recipe_settings(planned.settings)
    train, test = _drawn(planned.items, 0), _drawn(planned.held_out, 1)
    gc.collect()  # What was allocated before the record must not be freed in it.
    with profile(profile_memory=True) as record, _stand_ins():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(planned.config).eval().to(planned.dtype)
        loaded = replace(prepare(model, None), tokenizer=Words(), stop_ids=frozenset({TOKENS}))
        recipe = recipe_class(planned.name)(loaded, settings, train, test)
        decays = {"beta2": settings.beta2, "weight_decay": settings.weight_decay}
        optimiser = ShardedAdamW(recipe.parameters(), Processes(), **decays)
        if not recipe.generations():
            recipe.held_out()  # as a training does before its first step
        gc.collect()
        with record_function(STEP):
            once = recipe.at_once or settings.batch
            for first in range(0, settings.batch, once):
                recipe.loss(0, slice(first, first + once))[0].backward()
        with record_function(UPDATE):
            optimiser.step(settings.lr, settings.clip)
        if not recipe.generations():
            with record_function(HELD_OUT):
                recipe.held_out()
    return peaks(record)


def peaks(record: Any) -> dict[str, int]:
    """Return the peak of allocated bytes in every phase that a profile recorded."""
    events = sorted(record.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = list(accumulate(size for _, size in changes))
    found = {}
    for event in events:
        if event.name() in PHASES:
            first, last = event.start_ns(), event.start_ns() + event.duration_ns()
            found[event.name()] = max(now for (time, _), now in zip(changes, held) if first <= time <= last)
    return found


def _drawn(items: Iterable[Any], seed: int) -> list[Any]:
    """Return the items with random tokens in the place of their tokens."""
    draws, most, made = torch.Generator().manual_seed(seed), TOKENS, []
    for item in items:
        names = [name for name in ("ids", "prompt", "answer") if name in item.__dataclass_fields__]
        drawn = {n: torch.randint(most, (len(getattr(item, n)),), generator=draws) for n in names}
        new: dict[str, Any] = {name: tuple(ids.tolist()) for name, ids in drawn.items()}
        if hasattr(item, "name"):
            new["name"] = f"{item.name} of {seed}"
        made.append(replace(item, **new))
    return made


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Begin `foresightkv-grpo` with a random scorer, and let `gkv-rl` learn from every answer."""

    def scorer(loaded: Any, location: str, features: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        shapes = scorer_shapes(features, model_fields(loaded.model.config))
        return {name: torch.randn(shape) for name, shape in shapes.items()}, {"sha256": ""}

    def equal(rewards: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(rewards)

    with patch.object(foresightkv_grpo, "_initial", scorer), patch.object(gkv_rl, "advantages", equal):
        yield


def markdown(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with a row per recipe: counted over measured bytes in every phase."""
    ratios: dict[str, dict[str, str]] = {}
    for row in rows:
        ratios.setdefault(row["recipe"], {})[row["phase"]] = row["ratio"]
    lines = [f"| recipe | {' | '.join(PHASES)} |", f"| --- |{' ---: |' * len(PHASES)}"]
    return lines + [f"| `{n}` | {' | '.join(own.get(p, '') for p in PHASES)} |" for n, own in ratios.items()]


def main() -> None:
    """Print the counted and measured peak of every recipe."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["recipe", "layers", "prompt", "answer", "phase", "counted_bytes", "measured_bytes", "ratio"])
    for name in sys.argv[1:] or SMALL:
        planned = plan(name, config(8))
        if planned.uncounted:
            print(name, planned.uncounted, file=sys.stderr)
        counted = {phase.name: phase.bytes for phase in planned.phases}
        for phase, size in measured(planned).items():
            ratio = f"{counted[phase] / size:.3f}"
            table.writerow([name, 8, planned.prompt, planned.answer, phase, counted[phase], size, ratio])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
