"""Checkpoints of a training: safetensors files whose header holds settings and progress as JSON; no pickle is read.

For each parameter, a checkpoint holds the values and the optimiser's two moments, as whole tensors in float32. So a
training may go on with another number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvbench.errors import SetupError, quote
from kvbench.store.files import replacing
from kvbench.train.optimiser import ShardedAdamW
from kvbench.train.processes import Processes


def save(path: Path, optimiser: ShardedAdamW, state: Mapping[str, Any], processes: Processes) -> None:
    """Replace the checkpoint file in one step, so that a kill leaves either the old or the new checkpoint whole. All
    processes call this. The first process writes the file; for this it holds one whole tensor in memory at a time."""
    with replacing(path) if processes.first else nullcontext() as file:
        if file is not None:
            file.write(_header({name: shape for name, shape, _ in optimiser.stored()}, state))
        for _, shape, own in optimiser.stored():
            row = processes.gather(own, shape.numel())
            if file is not None:
                file.write(row.cpu().numpy().data)


def _header(shapes: Mapping[str, torch.Size], state: Mapping[str, Any]) -> bytes:
    """Return the header of a safetensors file whose float32 tensors have these names and shapes, in this order."""
    header: dict[str, Any] = {"__metadata__": {"state": json.dumps(dict(state))}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def state_of(path: Path) -> dict[str, Any]:
    """Return the settings and the progress in a checkpoint's header.

    The dictionary has the recipe's name and version; the model's name, revision and fingerprint; the settings; the
    step; the seconds of training so far; and the held-out figures before the training.

    Raises SetupError when the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["state"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _unusable(path, error) from None


def restore(path: Path, optimiser: ShardedAdamW, steps: int) -> None:
    """Load a checkpoint's tensors into the optimiser and its parameters. Raises SetupError if the file cannot be read,
    or if its tensors do not fit."""
    try:
        with safe_open(path, framework="pt") as file:
            optimiser.restore(file.get_tensor, steps)
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> SetupError:
    return SetupError(
        f"checkpoint {quote(path)} cannot be used: {error}. Remove it to begin anew, or choose another --out."
    )
