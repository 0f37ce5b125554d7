"""Every registered method in a size that small random models and budgets of 24 suit."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch

from kvbench import registry
from kvbench.engine.model import LoadedModel
from kvbench.engine.weights import save_weights
from kvbench.eviction.api import Method
from kvbench.eviction.choose import make

SMALL = {
    "snapkv": {"window": 8},
    "pyramidkv": {"window": 8},
    "ada-kv": {"base": "snapkv(window=8)"},
    "headkv": {"window": 8},
    "cake": {"window": 8},
    "morphkv": {"window": 8},
    "rpc": {"R": 8},
    "duo": {"sinks": 2, "recent": 6},
    "expected-attention": {"n_future": 32},
    "laq": {"n": 4, "w2": 4, "inner": "snapkv(window=8)"},
    "speckv": {"draft": "another", "n": 5, "window": 8},
}
VARIANTS = {
    "ada-kv while decoding": ("ada-kv", {"base": "snapkv-decode"}),
    "kvzip by head": ("kvzip", {"level": "head"}),
    "snapkv by query head": ("snapkv", {"window": 8, "heads": "query"}),
    "two methods": ("snapkv+gkv", {"snapkv.window": 8}),
    "two methods, uneven": ("kvzip+h2o", {}),
}
EVICTING = [name for name, cls in registry.methods.items() if cls.evicts]


def small(name: str) -> Method:
    """A registered method, or one of VARIANTS, with options for small budgets."""
    label, options = VARIANTS.get(name, (name, SMALL.get(name, {})))
    return make(label, options)


def with_tables(loaded: LoadedModel) -> LoadedModel:
    """The model with random tables for the methods that need some."""
    folder = Path(tempfile.mkdtemp())
    generator = torch.Generator().manual_seed(0)
    layers, g = len(loaded.geometry), loaded.geometry[0]
    importance = torch.rand(layers, g.query_heads, generator=generator) ** 4
    alpha = torch.rand(layers, g.kv_heads, generator=generator)
    for kind, tensors in (("headkv", {"importance": importance / importance.sum()}), ("duo", {"alpha": alpha})):
        save_weights(folder / f"{kind}.safetensors", kind, tensors, loaded.model.config, base_model="random", made={})
    return dataclasses.replace(loaded, folder=folder)
