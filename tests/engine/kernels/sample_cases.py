"""Random draws by the Triton kernels and by the CPU's sampler: `sample_cases.py 60 cpu` prints a JSON object each."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from kvbench.engine import sampler
from kvbench.engine.kernels import sample
from kvbench.records import Sampling

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_p=0.95),
    Sampling(temperature=0.6, top_p=0.95, top_k=20),
    Sampling(temperature=1.3, min_p=0.1),
    Sampling(temperature=2.0, top_p=0.5, min_p=0.01),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.7, top_k=50, min_p=0.05),
    Sampling(temperature=1.0, top_p=1e-6),
]


def check(seed: int, device: str) -> dict[str, Any]:
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, vocabulary, sampling = r.choice([1, 3, 5]), r.choice([17, 300, 1024, 5000, 20_000]), SAMPLINGS[seed % 9]
    logits = torch.randn(rows, vocabulary, generator=g) * r.choice([0.01, 1.0, 4.0, 30.0])
    logits[0, : vocabulary // 3] = float("-inf")  # banned tokens
    tied, nan = seed % 2 == 1 and SAMPLINGS[seed % 9].temperature > 0, r.random() < 0.3
    if tied:  # bfloat16 leaves few different logits
        logits, nan = logits.bfloat16(), False
    if nan:
        logits[-1, r.randrange(vocabulary)] = float("nan")
    keys = torch.randint(-(2**63), 2**63 - 1, (rows, 2), generator=g)[:, 0]  # strided, as a column of a table
    steps = torch.randint(0, 40_000, (rows, 3), generator=g)[:, 1]
    want = sampler.draw(logits, keys, steps, sampling)
    got = sample.draw(logits.to(device), keys.to(device), steps.to(device), sampling).cpu()
    return {
        "seed": seed,
        "sampling": str(sampling),
        "got": got.tolist(),
        "want": want.tolist(),
        "nan": nan,
        "tied": tied,
    }


for seed in range(int(sys.argv[1])):
    print(json.dumps(check(seed, sys.argv[2])))
