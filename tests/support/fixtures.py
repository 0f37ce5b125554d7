"""Results of the released code on closed-form inputs (tests/data/methods_fixtures.json), and these inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

FIXTURES = json.loads((Path(__file__).parents[1] / "data" / "methods_fixtures.json").read_text())
BUDGET, WINDOW, TOTAL = 40, 8, 96


def _closed_form(name: str) -> torch.Tensor:
    """The recipe of the file: sines of the flat index in float64, then float32."""
    shape, seed = FIXTURES["_recipe"][name]["shape"], FIXTURES["_recipe"][name]["seed"]
    i = np.arange(np.prod(shape), dtype=np.float64)
    x = np.sin(1.7 * i + seed) * np.cos(0.37 * i * (seed + 1) + 0.5) + 0.5 * np.sin(0.0131 * i * i + seed)
    return torch.tensor(x.reshape(shape), dtype=torch.float32)


Q, K = _closed_form("Q"), _closed_form("K")  # [1, 8, 96, 16] queries, [1, 2, 96, 16] keys
