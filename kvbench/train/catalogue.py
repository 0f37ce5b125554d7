"""The built-in recipes of ``kvbench train``: their classes, defaults and presets.

Registers them in `kvbench.registry.recipes`. Imports no torch, because `--help` reads this module.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.registry import recipes
from kvbench.train import presets
from kvbench.train.entry import LORA, Entry
from kvbench.train.presets import tiny

_GATES: dict[str, Any] = dict(
    tasks=("chain", "walk", "lookup"),
    traces=1200,
    held_out=48,
    steps=1500,
    lr=2e-4,
    batch=6,
)
_GATES_TINY = tiny(lr=5e-3, width=128, bias=8.0, budget=32, interval=32)
_GATE_OPTIONS: dict[str, Any] = {"width": 512, "bias": 10.0, "form": "weight", "hinge": "released", "capacity": 1.0}
_GATE_OPTIONS |= {"budget": 128, "interval": 128, "horizon": 1, "recompute": "auto"}
_EVICTION: dict[str, Any] = {"budget": 48, "interval": 32}
_OWN_CACHE: dict[str, Any] = {"method": "gkv", "budget": 2048, "interval": 128}
_OWN_CACHE |= {"slots": 16, "micro": 1, "recompute": "auto", "precision": "float32", **LORA}
_OWN_CACHE_TINY: dict[str, Any] = {"budget": 96, "interval": 32, "slots": 64, "micro": 16}
_SCORER: dict[str, Any] = {"budget": 1024, "interval": 256, "long": 0, "long_budget": 2048, "long_interval": 512}
_SCORER |= {"features": "paper6"}
BUILT_IN: dict[str, Entry] = {
    "lookaheadkv": Entry(
        location="kvbench.train.recipes.lookaheadkv:LookaheadRecipe",
        about="learned tokens and an adapter that predict which of a prompt's tokens its answer will attend to",
        tasks=("lookup", "lookup/lookup-1", "chain", "walk"),
        traces=1200,
        steps=1500,
        lr=5e-3,  # tuned on the built-in model of 0.9 M parameters; the paper states no rate, batch or steps
        options={"rows": 32, "rank": 8, "alpha": 32.0, "places": "all", "budget": 64}
        | {"max_tokens": 512, "answers": "model"},
        presets={"tiny": tiny(rows=16, rank=16), "paper": presets.LOOKAHEADKV},
    ),
    "trimkv": Entry(
        location="kvbench.train.recipes.gates:TrimKVRecipe",
        about="gates that predict how slowly an entry loses its worth, with a budget per head",
        options={"gate": "rg", "tie": "none"} | _GATE_OPTIONS,
        presets={"tiny": _GATES_TINY} | presets.TRIMKV,
        **_GATES,
    ),
    "retention": Entry(
        location="kvbench.train.recipes.gates:RetentionRecipe",
        about="retention gates, with one budget for all layers and heads",
        options={"gate": "rg10", "tie": "layers"} | _GATE_OPTIONS,
        presets={"tiny": _GATES_TINY} | presets.RETENTION,
        **_GATES,
    ),
    "kvzap": Entry(
        location="kvbench.train.recipes.kvzap:ZapRecipe",
        about="networks that predict, from a token's hidden state, the scores that kvzip gives to its entries",
        tasks=("lookup", "chain", "walk"),
        traces=600,
        steps=800,
        lr=5e-3,
        options={"width": 512, "tokens": 1250, "target": "kvzip+"},
        presets={"tiny": tiny(samples=300, steps=400, batch=4, width=32), "paper": presets.KVZAP},
    ),
    "locret": Entry(
        location="kvbench.train.recipes.locret:LocretRecipe",
        about="retaining heads that predict the largest attention logit of an answer's queries to each prompt token",
        tasks=("lookup", "chain", "walk"),
        traces=600,
        steps=1000,
        lr=5e-4,
        options={"width": 1024, "tokens": 10_240, "smooth": 0.0025},
        presets={"tiny": tiny(samples=120, steps=400, lr=5e-3, batch=4, width=64), "paper": presets.LOCRET},
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
        presets={"tiny": tiny(sinks=4, recent=32), "paper": presets.DUO},
    ),
    "foresightkv": Entry(
        location="kvbench.train.recipes.foresightkv:ForesightRecipe",
        about="a scorer that ranks entries as the oracle of golden eviction does",
        tasks=("walk", "chain"),
        traces=800,
        steps=1000,
        lr=1e-2,
        options=_SCORER | {"hidden": 16, "within": "mean", "margin": 5.0},
        presets={"tiny": tiny(**_EVICTION, hidden=32, within="max"), "paper": presets.FORESIGHTKV},
    ),
    "foresightkv-grpo": Entry(
        location="kvbench.train.recipes.foresightkv_grpo:PolicyRecipe",
        about="foresightkv's second stage: the scorer draws evictions, and is rewarded if they add little loss",
        tasks=("walk", "chain"),
        traces=400,
        steps=200,
        lr=3e-4,
        options=_SCORER | {"init": "auto", "group": 8, "reward": "squared", "clip": 0.2, "kl": 0.01},
        presets={"tiny": tiny(**_EVICTION), "paper": presets.FORESIGHTKV_GRPO},
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
        options=_OWN_CACHE | {"kl_temperature": 0.6},
        presets={"tiny": tiny(lr=3e-4, **_OWN_CACHE_TINY), "paper": presets.GKV_DISTILL},
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
        options=_OWN_CACHE | {"group": 8, "temperature": 0.6},
        presets={
            "tiny": tiny(lr=2e-4, **_OWN_CACHE_TINY | {"budget": 128, "temperature": 2.0}),
            "paper": presets.GKV_RL,
        },
        tasks=("chain",),
    ),
}
TABLES = {  # tables are estimated, not trained: name -> module:function (`kvbench.train.tables`)
    "headkv": "kvbench.train.recipes.head_tables:estimate",
    "triattention": "kvbench.train.recipes.mean_queries:estimate",
}

for _name, _entry in BUILT_IN.items():
    recipes.register(_name, origin=_entry.location)(_entry)


def entry_of(name: str) -> Entry:
    """Return the `Entry` of a registered recipe. Raises UserError for an unknown name or a class without an `Entry`."""
    member = recipes.get(name)
    declared = member if isinstance(member, Entry) else getattr(member, "entry", None)
    if not isinstance(declared, Entry):
        raise UserError(f"recipe {quote(name)} declares no settings; give its class an attribute 'entry = Entry(...)'.")
    return declared


def recipe_class(name: str) -> Any:
    """Return the class of a registered recipe, a subclass of `Recipe`; imports the module of a built-in recipe. Raises
    UserError for an unknown name."""
    member = recipes.get(name)
    return resolve_name(member.location) if isinstance(member, Entry) else member
