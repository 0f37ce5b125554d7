"""Estimates the tables (numbers per head) that some methods need. A model reads texts, and its attention or its queries
give the numbers. Nothing is trained; a CPU is enough.

`kvbench.train.catalogue.TABLES` lists the tables, and for each the function that estimates it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel, load, refuse_training
from kvbench.engine.model.weights import Base, save_weights
from kvbench.sources.models import describe
from kvbench.train.catalogue import TABLES

OnExample = Callable[[int], None]  # called with the number of texts read so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The result of an estimate: the tensors of a table, and facts for its card (`made`).

    heads: the numbers to print, one per query head, [layers, query heads]. what: the name of these numbers.
    """

    tensors: Mapping[str, torch.Tensor]
    made: Mapping[str, Any]
    heads: torch.Tensor
    what: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table that was written: the path of its file, the estimate, and the card."""

    path: Path
    estimate: Estimate
    card: dict[str, Any]


Estimator = Callable[[LoadedModel, int, int, OnExample | None], Estimate]  # model, samples, seed


def make(
    kind: str,
    model: str,
    out: Path,
    *,
    samples: int,
    seed: int,
    device: str,
    on_example: OnExample | None = None,
) -> Table:
    """Estimate a table of a model ("tiny", a folder or a hub name), and write it to the folder `out`.

    samples: how many texts the model reads. on_example: called with the number of texts read so far. Raises SetupError
    or UserError when the model cannot be loaded, when this table cannot be estimated for this model, or when a file
    cannot be written.
    """
    loaded = load(describe(model).where, device=device)
    refuse_training(loaded)
    estimator: Estimator = resolve_name(TABLES[kind])
    estimate = estimator(loaded, samples, seed, on_example)
    how: dict[str, Any] = {
        **estimate.made,
        "command": f"kvbench train {kind} --model {model} --samples {samples} --seed {seed} --out DIR",
        "samples": samples,
        "seed": seed,
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    path = out / f"{kind}.safetensors"
    base = Base(name=model, config=loaded.model.config, fingerprint=loaded.fingerprint)
    return Table(path, estimate, save_weights(path, kind, estimate.tensors, base, made=how))
