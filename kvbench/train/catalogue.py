"""The recipes of ``kvbench train`` with their defaults. Imports no torch, because `--help` reads this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recipe of ``kvbench train`` and its defaults.

    Attributes:
        location: ``module:class`` of its `Recipe`; about: one line for ``--help``.
        tasks: built-in tasks whose problems are the questions when the user gives no --data.
        traces, held_out: how many questions or examples to train on, and how many to hold out.
        learns_from: what the recipe trains on: the model's answers to the questions, the questions alone, or examples
            with answers (`kvbench.train.head_data`).
        tested_on: what the held-out figures use: the model's answers to the held-out questions, collected before the
            training; or the questions alone, which the recipe lets the model answer whenever it computes the figures.
        dtype: of the loaded model; float32 where the model is trained, so that small steps are not rounded away.
        options: the recipe's settings and their defaults. `longest`: most new tokens of an answer to a question from
            --data.
        tiny, tiny_lr: the defaults that differ for the built-in model, whose texts are short.
    """

    location: str
    about: str
    tasks: tuple[str, ...]
    traces: int
    steps: int
    lr: float
    held_out: int = 32
    batch: int = 8
    learns_from: Literal["answers", "questions", "examples"] = "answers"
    tested_on: Literal["answers", "questions"] = "answers"
    dtype: Literal["auto", "float32"] = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    tiny_lr: float | None = None


_GATES: dict[str, Any] = dict(
    tasks=("chain", "walk", "lookup"),
    traces=1200,
    held_out=48,
    steps=1500,
    lr=2e-4,
    tiny_lr=5e-3,
    batch=6,
    tiny={"width": 128, "bias": 8.0, "budget": 32, "interval": 32},
)
_GATE_OPTIONS: dict[str, Any] = {"width": 512, "bias": 10.0, "form": "weight", "hinge": "released", "capacity": 1.0}
_GATE_OPTIONS |= {"budget": 128, "interval": 128, "longest": 4096}
_EVICTION = {"budget": 48, "interval": 32}
_OWN_CACHE: dict[str, Any] = {"method": "gkv", "budget": 2048, "interval": 128, "temperature": 0.6, "longest": 4096}
_OWN_CACHE |= {"slots": 16, "micro": 1, "recompute": "auto"}
_OWN_CACHE_TINY = {"budget": 96, "interval": 32, "slots": 64, "micro": 16}
_SCORER: dict[str, Any] = {"budget": 1024, "interval": 256, "features": "paper6", "longest": 4096}
RECIPES: dict[str, Entry] = {
    "lookaheadkv": Entry(
        location="kvbench.train.recipes.lookaheadkv:LookaheadRecipe",
        about="learned tokens after a prompt, and an adapter, which foresee what its answer attends to",
        tasks=("lookup", "lookup/lookup-1", "chain", "walk"),
        traces=1200,
        steps=1500,
        lr=5e-3,
        options={"rows": 32, "rank": 8, "alpha": 32.0, "budget": 64, "longest": 512},
        tiny={"rows": 16, "rank": 16},
    ),
    "trimkv": Entry(
        location="kvbench.train.recipes.gates:TrimKVRecipe",
        about="gates that predict how slowly an entry loses its worth, with a budget per head",
        options={"gate": "rg", "tie": "none"} | _GATE_OPTIONS,
        **_GATES,
    ),
    "retention": Entry(
        location="kvbench.train.recipes.gates:RetentionRecipe",
        about="retention gates, with one budget for all layers and heads",
        options={"gate": "rg10", "tie": "layers"} | _GATE_OPTIONS,
        **_GATES,
    ),
    "duo": Entry(
        location="kvbench.train.recipes.duo:DuoRecipe",
        about="a number per KV head: how much the head needs tokens other than the first and the newest",
        tasks=(),
        traces=512,
        steps=2000,
        lr=0.02,
        learns_from="examples",
        options={"sinks": 128, "recent": 256, "reg": 0.05, "tokens": 4096},
        tiny={"sinks": 4, "recent": 32},
    ),
    "foresightkv": Entry(
        location="kvbench.train.recipes.foresightkv:ForesightRecipe",
        about="a scorer that ranks entries as the oracle of golden eviction does",
        tasks=("walk", "chain"),
        traces=800,
        steps=1000,
        lr=1e-2,
        options=_SCORER | {"hidden": 16, "within": "mean", "margin": 0.01},
        tiny=_EVICTION | {"hidden": 32, "within": "max", "margin": 5.0},
    ),
    "foresightkv-grpo": Entry(
        location="kvbench.train.recipes.foresightkv_grpo:PolicyRecipe",
        about="foresightkv's second stage: the scorer draws evictions, and is rewarded if they add little loss",
        tasks=("walk", "chain"),
        traces=400,
        steps=200,
        lr=3e-4,
        options=_SCORER | {"init": "auto", "group": 8, "reward": "squared", "clip": 0.2, "kl": 0.01},
        tiny=_EVICTION,
    ),
    "gkv-distill": Entry(
        location="kvbench.train.recipes.gkv_distill:DistillRecipe",
        about="the model itself: it learns to predict with an evicted cache as it did with a full one",
        traces=1000,
        held_out=128,
        steps=500,
        lr=1e-6,
        batch=16,
        tested_on="questions",
        dtype="float32",
        options=_OWN_CACHE,
        tiny=_OWN_CACHE_TINY,
        tiny_lr=3e-4,
        tasks=("chain",),
    ),
    "gkv-rl": Entry(
        location="kvbench.train.recipes.gkv_rl:RLRecipe",
        about="the model itself: it learns from rewards for answers that it writes with an evicted cache",
        traces=1000,
        held_out=128,
        steps=150,
        lr=1e-6,
        batch=16,
        learns_from="questions",
        dtype="float32",
        options=_OWN_CACHE | {"group": 8},
        tiny=_OWN_CACHE_TINY | {"budget": 128, "temperature": 2.0},
        tiny_lr=2e-4,
        tasks=("chain",),
    ),
}
TABLES = {"headkv": "importance of every query head"}
