"""Every registered method in a size that small random models and budgets of 24 suit."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import tempfile
from pathlib import Path

from kvbench import registry
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.random_weights import draw
from kvbench.engine.model.weights import Base, save_weights
from kvbench.eviction.api import Method
from kvbench.eviction.choose import make

SMALL = {
    "snapkv": {"window": 8},
    "pyramidkv": {"window": 8},
    "pyramidinfer": {"window": 8},
    "ada-kv": {"base": "snapkv(window=8)"},
    "headkv": {"window": 8},
    "cake": {"window": 8},
    "morphkv": {"window": 8},
    "rpc": {"R": 8},
    "duo": {"sinks": 2, "recent": 6},
    "expected-attention": {"n_future": 32},
    "laq": {"n": 4, "w2": 4, "inner": "snapkv(window=8)"},
    "speckv": {"draft": "another", "n": 5, "window": 8},
    "lagkv": {"sinks": 2, "lag": 6},
    "criticalkv": {"base": "snapkv(window=8)"},
    "chunkkv": {"base": "snapkv(window=8)", "chunk": 4},
    "kvzap": {"recent": 8},
    "locret": {"recent": 8},
    "defensivekv": {"window": 8},
    "caote": {"window": 8},
    "sepllm": {"sinks": 2, "recent": 8, "marks": "0123"},  # the tokens of `models.Words` are numbers
    "scope": {"base": "snapkv(window=8)", "recent": 3},
    "vase": {"window": 8, "draw": False},
    "foresightkv": {"sampling": False},  # noise is named after the task, which `generate` does not have
}
VARIANTS = {
    "ada-kv while decoding": ("ada-kv", {"base": "snapkv-decode"}),
    "kvzip by head": ("kvzip", {"level": "head"}),
    "snapkv by query head": ("snapkv", {"window": 8, "heads": "query"}),
    "two methods": ("snapkv+gkv", {"snapkv.window": 8}),
    "two methods, uneven": ("kvzip+h2o", {}),
    "two methods, one with gates": ("snapkv+trimkv", {"snapkv.window": 8}),
    "retention by layer": ("retention", {"level": "layer"}),
    "criticalkv, uneven": ("criticalkv", {"base": "gkv", "ada": True}),
}
EVICTING = [name for name, cls in registry.methods.items() if cls.evicts and not cls.oracle]


def small(name: str) -> Method:
    """A registered method, or one of VARIANTS, with options for small budgets."""
    label, options = VARIANTS.get(name, (name, SMALL.get(name, {})))
    return make(label, options)


def with_tables(loaded: LoadedModel) -> LoadedModel:
    """The model with random tables and weights for the methods that need some."""
    folder, config = Path(tempfile.mkdtemp(prefix="kvbench-test-")), loaded.model.config
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for weights in (cls().weights() for _, cls in registry.methods.items()):
        if weights is not None:
            tensors, path = draw(weights, loaded.model), folder / f"{weights.kind}.safetensors"
            save_weights(path, weights.kind, tensors, Base(name="random", config=config), made={})
    return dataclasses.replace(loaded, folder=folder)
