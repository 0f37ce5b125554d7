"""What the graphs of training take, as docs/training.md counts it, against the peak memory of a process.

Letters: L layers, D hidden size, F of the feed-forward part, Hq and Hk heads, d their dimension, n tokens. A frozen
layer keeps for every token, in single precision: the input of two norms (2 D), queries and keys before and after
theirs (2 Hq d, 2 Hk d), values (Hk d), and three tensors of the feed-forward part (3 F). The growth from one number of
layers to another is measured: all else that a process holds drops out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

D, F, HQ, HK, HEAD, N, WIDTH = 256, 1024, 8, 2, 32, 700, 128
ROWS = 256
FEW, MANY = 6, 20  # with two layers, a step's peak is not yet that of its graph
GRAPH = 4 * N * (2 * D + 2 * HQ * HEAD + 3 * HK * HEAD + 3 * F)
RECOMPUTED = 4 * N * (D + HQ * HEAD + 2 * HK * HEAD)  # a layer's input, and what its blocks of queries start from
GATES = 4 * N * (D + 2 * WIDTH)
OCCUPANCY = 3 * 4 * HK * ROWS * N  # three tensors of a block of times, of all layers at once
FORMULAS = {"duo": GRAPH, "duo recomputed": RECOMPUTED, "trimkv": GRAPH + GATES + OCCUPANCY}

CHILD = """
import re, sys
import torch, transformers
from kvbench.engine.model.load import prepare
from kvbench.train.recipes import duo, gates
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.head_data import Example
from kvbench.train.recipe import Settings
from kvbench.train.traces import Trace

what = sys.argv[1]
d, f, hq, hk, head, n, rows, *depths = map(int, sys.argv[2:])
duo.ROWS = gates.BLOCK = rows

def model(layers):
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=d, intermediate_size=f, num_hidden_layers=layers, num_attention_heads=hq, num_key_value_heads=hk,
        head_dim=head, vocab_size=512, max_position_embeddings=4096)
    return prepare(transformers.Qwen3ForCausalLM(config).eval(), None)

def recipe(loaded, n):
    ids = tuple(torch.randint(512, (n,), generator=torch.Generator().manual_seed(n)).tolist())
    if what == "trimkv":
        given = Trace(name=str(n), prompt=ids[:-8], answer=ids[-8:])
        return gates.TrimKVRecipe(loaded, settings(BUILT_IN[what].options), [given], [given])
    given = Example(ids, (n - 8, n - 2), ((1,), (1,)))
    made = duo.DuoRecipe(loaded, settings(dict(sinks=4, recent=64, reg=0.05)), [given], [given])
    made.again = what == "duo recomputed"
    return made

def resident(which):
    # Not of getrusage, whose peak begins with that of the process which started this one.
    return 1024 * int(re.search(rf"Vm{which}:\\s+(\\d+) kB", open("/proc/self/status").read())[1])

def settings(more):
    return Settings(steps=1, lr=1.0, batch=1, more=more)

def step(made):
    loss, _ = made.loss(0, slice(0, 1))
    loss.backward()

for layers in depths:
    loaded = model(layers)
    step(recipe(loaded, 16))  # whatever is loaded or made at the first use
    made = recipe(loaded, n)
    now = resident("RSS")
    step(made)
    print(resident("HWM") - now)
"""


def rises(what: str) -> list[int]:
    """Bytes that a step's peak lies above what was held before it, with few and with many layers."""
    # Tensors of their own pages go back to the system when they are freed, so that what is resident is what is held.
    pages = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    sizes = map(str, (D, F, HQ, HK, HEAD, N, ROWS, FEW, MANY))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, what, *sizes],
        capture_output=True,
        text=True,
        env=dict(os.environ) | pages | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc of Linux")
@pytest.mark.parametrize("what", FORMULAS)
def test_a_layer_takes_what_the_formula_says(what):
    few, many = rises(what)
    grown = (many - few) / (MANY - FEW)
    assert grown == pytest.approx(FORMULAS[what], rel=0.15)
