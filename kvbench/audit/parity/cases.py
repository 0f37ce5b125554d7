"""Parity cases on disk: fixed inputs, and the decisions that published reference code made for them.

One case is ``<name>.json`` (hyperparameters, steps) with ``<name>.safetensors``: queries and keys, and for every step
the tokens in the reference's cache before the step and the tokens that it keeps. The format is ``kvbench-parity/1``; a
file whose format has a suffix holds no decisions, but other numbers that the reference code computed (see
`kvbench.audit.parity.values`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, quote
from kvbench.lazy import torch

FORMAT = "kvbench-parity/1"


@dataclass(frozen=True)
class Case:
    """One parity case: fixed inputs for L layers, H heads and T tokens, and the reference code's decisions for them.

    A unit is one head of one layer; each unit keeps a set of tokens. Lists of units are ordered by layer, then by head.
    """

    path: Path  # of the .json file
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.method}/{self.path.stem}"

    @property
    def method(self) -> str:
        return str(self.meta.get("method", self.path.parent.name))

    @property
    def variant(self) -> str:
        return str(self.meta.get("variant", "-"))

    @property
    def has_decisions(self) -> bool:
        return self.meta["format"] == FORMAT

    @property
    def hyper(self) -> dict[str, Any]:
        return dict(self.meta["hyper"])

    @property
    def layers(self) -> int:
        return int(self.meta["units"]["layers"])

    @property
    def heads(self) -> int:
        return int(self.meta["units"]["heads"])

    @property
    def seen(self) -> list[int]:
        """Return how many tokens the reference had read at each step that the file stores."""
        return [int(step["seen"]) for step in self.meta["steps"]]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.path.with_suffix(".safetensors"))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"cannot read the tensors of parity case {quote(self.path)} ({error}). Repair or remove the case."
            ) from None

    def slots(self, step: int) -> list[list[torch.Tensor]]:
        """Return the positions of the tokens in the reference's cache before a step, by layer and head. Each head's
        tokens are in the order in which the reference stores them."""
        units = [unit.long() for unit in self._split("cache", step)]
        return [units[start : start + self.heads] for start in range(0, len(units), self.heads)]

    def kept(self, step: int) -> list[set[int]]:
        """Return, for each unit, the set of tokens that the reference keeps after a step."""
        return [set(unit.tolist()) for unit in self._split("kept", step)]

    def scores(self, step: int) -> list[dict[int, float]] | None:
        """Return, for each unit, the reference's score of each token at a step. None if the file has no scores for the
        step."""
        return self.by_token("score", step) if f"score.{step}" in self.tensors else None

    def state(self, name: str, step: int) -> torch.Tensor | None:
        """Return values [L, H, n] that the reference stored under `name` before a step; None if the file has none. The
        values belong to the first n tokens in the reference's cache."""
        values = self.tensors.get(f"state.{name}.{step}")
        return None if values is None else values.float().view(self.layers, self.heads, -1)

    def by_token(self, name: str, step: int) -> list[dict[int, float]]:
        """Return, for each unit, the numbers that the file stores under `name` for the tokens at a step."""
        units = zip(self._split("cache", step), self._split(name, step))
        return [dict(zip(slots.tolist(), numbers.double().tolist())) for slots, numbers in units]

    def in_text_order(self, step: int) -> bool:
        """Return whether the reference's cache, before a step, holds each unit's tokens in the order of the text."""
        return all(bool((row.diff() > 0).all()) for layer in self.slots(step) for row in layer)

    def _split(self, name: str, step: int) -> list[torch.Tensor]:
        flat, offsets = self.tensors[f"{name}.{step}"], self.tensors[f"{name}_off.{step}"].tolist()
        return [flat[a:b] for a, b in pairwise(offsets)]


def load_cases(folder: Path) -> list[Case]:
    """Return all parity cases below a folder, sorted by path. Raises UserError if there is no folder or no case, or if
    the .json file of a case cannot be read or lacks a field. The tensors of a case are read later."""
    if not folder.is_dir():
        raise UserError(f"parity folder {quote(folder)} does not exist or is no folder; give another.")
    cases = [case for path in sorted(folder.rglob("*.json")) if (case := _load(path)) is not None]
    if not cases:
        raise UserError(f"parity folder {quote(folder)} holds no cases; expected NAME.json with NAME.safetensors.")
    return cases


def _load(path: Path) -> Case | None:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read parity case {quote(path)} ({error}). Repair or remove the case.") from None
    if not isinstance(meta, dict) or not str(meta.get("format", "")).startswith(FORMAT):
        return None  # some other JSON file
    missing = [key for key in ("method", "variant", "hyper", "units", "steps") if key not in meta]
    if missing and meta["format"] == FORMAT:
        raise UserError(f"parity case {quote(path)} lacks {', '.join(map(quote, missing))}. Repair or remove the case.")
    return Case(path, meta)
