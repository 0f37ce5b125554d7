"""Two processes train each recipe to the losses and weights of one, although one of the two is killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.folders import TESTS
from support.recipes import options_of

from kvbench import tiny
from kvbench.engine.model.weights import Base
from kvbench.train import prepare as recipes
from kvbench.train.catalogue import BUILT_IN, entry_of
from kvbench.train.loop import LOG, OnStep, train

STEPS = 3
# What makes a recipe small. The second stage of foresightkv goes on from the scorer that ships with the model.
SMALL: dict[str, dict[str, Any]] = {
    "lookaheadkv": {"rows": 4, "rank": 2},
    "trimkv": {"width": 16},
    "retention": {"width": 16},
    "foresightkv-grpo": {"group": 2},
    "gkv-rl": {"group": 4, "slots": 8},
}
CASES = {name: SMALL.get(name, {}) for name in BUILT_IN}
CASES |= {"gkv-distill bfloat16": {"precision": "bfloat16"}, "gkv-distill lora": {"lora": 4}}
CASES |= {"gkv-rl lora": SMALL["gkv-rl"] | {"lora": 4}}
LOSS = {"gkv-distill bfloat16": 5e-3}  # a sum of bfloat16 gradients depends on their order


def run(name: str, out: Path, on_step: OnStep | None, options: dict[str, Any]) -> None:
    entry = entry_of(name)
    ready = recipes.prepare(
        name,
        str(tiny.path()),
        data=None,
        samples=6,
        steps=STEPS,
        lr=entry.settings("tiny")["lr"],
        batch=2,
        seed=0,
        options=options_of(entry) | options,
        device="cpu",
        out=out,
    )
    base = Base(name="tiny", config=ready.loaded.model.config)
    train(ready.recipe, out, base=base, checkpoint_seconds=0.0, on_step=on_step)


# Imports once, and forks: a single process per recipe; two, the second of which kills itself in its second step, as
# the launcher then kills the first; and two that go on. Each two meet at a store of the parent, as under torchrun, so
# that no port can be taken by another program before they listen.
CHILD = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = {path!r}
import torch
from torch.distributed import TCPStore
from kvbench.registry import recipes
from kvbench.train.catalogue import entry_of
from kvbench.train.processes import joined
from train.test_shared_recipes import run

def kill(step, figures):
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

def start(name, out, rank, count, port, on_step, settings):
    if pid := os.fork():
        running.add(pid)
        return pid
    try:
        torch.set_num_threads(1)
        address = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "RANK": rank}}
        address["TORCHELASTIC_USE_AGENT_STORE"] = True
        os.environ.update({{key: str(value) for key, value in address.items()}})
        out.mkdir(exist_ok=True)
        with joined():  # as the command does, around answers and training
            run(name, out, on_step, settings)
        os._exit(0)
    except BaseException as error:
        print(name, rank, repr(error), file=sys.stderr, flush=True)
        os._exit(1)

def pair(name, out, kills, settings):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores.append(store)
    return [start(name, out, rank, 2, store.port, kill if kills and rank else None, settings) for rank in (0, 1)]

def ended(pid):
    status = os.waitpid(pid, 0)[1]
    running.discard(pid)
    return status

running, stores = set(), []
try:
    for name, settings in {cases!r}.items():
        out, recipe = Path(sys.argv[1]) / name, name.partition(" ")[0]
        recipes._members[recipe] = replace(entry_of(recipe), held_out=2)
        alone = start(recipe, out.with_suffix(".one"), 0, 1, 0, None, settings)
        first, second = pair(recipe, out, True, settings)
        assert ended(second) == signal.SIGKILL, name
        os.kill(first, signal.SIGKILL)
        ended(first)
        again = pair(recipe, out, False, settings)
        assert [ended(pid) for pid in (*again, alone)] == [0, 0, 0], name
finally:
    for pid in running:
        os.kill(pid, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    done = subprocess.run(
        [sys.executable, "-c", CHILD.format(path=[str(TESTS)], cases=CASES), str(folder)],
        capture_output=True,
        text=True,
        env=dict(os.environ) | {"OMP_NUM_THREADS": "1", "KVBENCH_NO_PROGRESS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in out.rglob("[a-z]*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_reach_the_losses_of_one_after_a_kill(folder, name):
    two, one = folder / name, folder / f"{name}.one"
    ours, theirs = rows(two), rows(one)
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], abs=LOSS.get(name, 1e-5))
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=2e-3)
    made, wanted = weights(two), weights(one)
    assert made.keys() == wanted.keys()
    # AdamW moves a number by the learning rate however small its gradient is, so rounding shows most there.
    for tensor in wanted:
        rounding = 2 * torch.finfo(wanted[tensor].dtype).eps
        torch.testing.assert_close(made[tensor], wanted[tensor], rtol=max(1e-3, rounding), atol=1e-3)
