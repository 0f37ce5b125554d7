"""Checkpoints of a training: safetensors files whose header holds settings and progress as JSON; no pickle is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as dump

from kvbench.errors import SetupError, quote
from kvbench.store.files import replacing

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of AdamW


def save(
    path: Path, parameters: Mapping[str, torch.Tensor], optimiser: torch.optim.AdamW, state: Mapping[str, Any]
) -> None:
    """Replace the checkpoint file in one step, so that a kill leaves either the old or the new checkpoint whole."""
    tensors = {f"parameter/{name}": p.detach() for name, p in parameters.items()}
    for name, p in parameters.items():
        moments = optimiser.state.get(p, {})
        tensors |= {f"{moment}/{name}": torch.as_tensor(moments[moment]) for moment in _MOMENTS if moment in moments}
    contiguous = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    with replacing(path) as file:
        file.write(dump(contiguous, metadata={"state": json.dumps(dict(state))}))


def state_of(path: Path) -> dict[str, Any]:
    """Return what a checkpoint holds besides its tensors: settings, step, seconds and first held-out figures.

    Raises SetupError when the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["state"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _unusable(path, error) from None


def restore(path: Path, parameters: Mapping[str, torch.Tensor], optimiser: torch.optim.AdamW) -> None:
    """Load a checkpoint's tensors into the parameters and the optimiser. Raises SetupError if they do not fit."""
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            names = set(file.keys())
            for name, p in parameters.items():
                p.copy_(file.get_tensor(f"parameter/{name}"))
                moments = {m: file.get_tensor(f"{m}/{name}") for m in _MOMENTS if f"{m}/{name}" in names}
                if moments:
                    optimiser.state[p] = {m: t if m == "step" else t.to(p.device) for m, t in moments.items()}
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> SetupError:
    return SetupError(
        f"checkpoint {quote(path)} cannot be used: {error}. Remove it to begin anew, or choose another --out."
    )
