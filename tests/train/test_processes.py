"""Two processes under torchrun come to what one comes to, also after kills; they share out the questions.

Apart from answers, only the first writes and speaks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.recipes import change

from kvbench.cli.app import main
from kvbench.errors import SetupError, UserError
from kvbench.train.loop import HELD_OUT, LOG
from kvbench.train.processes import Processes, joined, own_device

STEPS = 8
COMMAND = ["train", "lookaheadkv", "--samples", "4", "--steps", str(STEPS), "--batch", "4", "--opt", "rows=3"]
COMMAND += ["--opt", "rank=2", "--evaluate", "3", "--json"]

# The command, with less held out, a checkpoint at every step and two figures of the answers' places in their batch. The
# first process kills itself after the checkpoint that KILL names, the second one after the answer that KILL_ANSWER
# names; any other process that writes, renames or deletes in the folder once the training has begun ends with code 3.
# Every answer is noted in a file beside the folder.
CHILD = """
import os, signal, sys
from dataclasses import replace
import kvbench.train.loop as loop
from kvbench.cli.app import main
from kvbench.registry import recipes
from kvbench.train.answers import SharedAnswers
from kvbench.train.catalogue import entry_of
from kvbench.train.recipes.lookaheadkv import LookaheadRecipe

folder, kill = sys.argv[sys.argv.index("--out") + 1], int(os.environ.get("KILL", "0"))

def watch(event, args):
    changes = event in ("os.rename", "os.remove", "os.mkdir")
    changes = changes or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))
    if changes and training and str(args[0]).startswith(folder):
        print(event, args, file=sys.stderr, flush=True)
        os._exit(3)

def save(*args):
    kept(*args)
    if args[2]["step"] == kill and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)

def begin(*args):
    global training
    training = True
    return began(*args)

def add(self, name, *answer):
    added(self, name, *answer)
    notes.append(name)
    with open(folder + ".answers", "a") as file:
        file.write(f"{os.environ['RANK']} {name}\\n")
    if os.environ["RANK"] == "1" and len(notes) == int(os.environ.get("KILL_ANSWER", "0")):
        os.kill(os.getpid(), signal.SIGKILL)

def loss(self, step, share):
    places = range(share.start, share.stop)
    figures = {"place": sum(places) / len(places), "weighted": (sum(i * i for i in places), sum(places))}
    return lost(self, step, share)[0], figures

lost, LookaheadRecipe.loss = LookaheadRecipe.loss, loss
notes, added, SharedAnswers.add = [], SharedAnswers.add, add
training, kept, began = False, loop.checkpoint.save, loop._Training.begin
loop.checkpoint.save, loop._Training.begin = save, begin
loop.train.__kwdefaults__["checkpoint_seconds"] = 0
recipes._members["lookaheadkv"] = replace(entry_of("lookaheadkv"), held_out=2)
if os.environ["RANK"] != "0":
    sys.addaudithook(watch)
sys.exit(main(sys.argv[1:]))
"""


def torchrun(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    child = folder.parent / "child.py"
    child.write_text(CHILD)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(child)]
    quiet = {"OMP_NUM_THREADS": "1", "KVBENCH_NO_PROGRESS": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [*command, *COMMAND, "--out", str(folder)],
        capture_output=True,
        text=True,
        env=dict(os.environ) | quiet | env,
        timeout=300,
    )


def rows(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        change(patch, "lookaheadkv", held_out=2)
        assert main([*COMMAND, "-q", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Killed after the second process's second answer, then after the fourth step, and started again."""
    folder = tmp_path_factory.mktemp("two") / "out"
    folder.mkdir()
    killed = torchrun(folder, KILL_ANSWER="2")
    assert killed.returncode != 0
    assert (folder / "answers.1.jsonl").read_text().count("\n") == 3, killed.stderr
    assert not (folder / LOG).exists()
    killed = torchrun(folder, KILL="4")
    assert killed.returncode != 0
    assert len(rows(folder, LOG)) == 4, killed.stderr
    assert not (folder / "lookaheadkv.safetensors").exists()
    again = torchrun(folder)
    assert again.returncode == 0, again.stderr
    return folder, again


def test_losses_and_weights_are_those_of_one_process(one, two):
    ours, theirs = rows(two[0], LOG), rows(one, LOG)
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-4)
    ours, theirs = (load_file(folder / "lookaheadkv.safetensors") for folder in (two[0], one))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        # AdamW moves a parameter by the learning rate however small its gradient is, so rounding shows most there.
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


def test_figures_are_those_of_the_whole_batch(two):
    """The figure `place` is a mean over the places 0 to 3 of the answers; `weighted` weights each place by itself."""
    for row in rows(two[0], LOG):
        assert (row["place"], row["weighted"]) == pytest.approx((1.5, 14 / 6))


def test_the_processes_share_out_the_questions(one, two):
    """Each answer is generated once, by either process, and is the one that a single process generates."""
    noted = [line.split(" ", 1) for line in two[0].with_suffix(".answers").read_text().splitlines()]
    ours, theirs = (rows(folder, "answers.jsonl") for folder in (two[0], one))
    assert sorted(name for _, name in noted) == sorted(row["name"] for row in theirs[1:])
    assert {rank for rank, _ in noted} == {"0", "1"}
    assert {row["name"]: row for row in ours[1:]} == {row["name"]: row for row in theirs[1:]}


def test_the_first_process_alone_writes_and_speaks(one, two):
    folder, done = two
    [document] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert document["made"]["settings"]["batch"] == 4
    assert done.stdout.count("wrote ") == 1
    figures, theirs = rows(folder, HELD_OUT), rows(one, HELD_OUT)
    assert [row["step"] for row in figures] == [0, 3, 6, STEPS]
    assert [row["loss"] for row in figures] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in one.iterdir())


def test_a_batch_is_shared_equally():
    shares = [Processes(4, rank).share(8) for rank in range(4)]
    assert [i for share in shares for i in range(8)[share]] == list(range(8))
    with pytest.raises(UserError, match="a batch of 6 cannot be shared equally by 4 processes"):
        Processes(4, 0).share(6)


def test_processes_that_do_not_find_each_other(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SetupError, match=r"cannot find each other: .*RANK.* Start them with torchrun."), joined():
        pass


def test_every_process_of_a_machine_has_its_own_gpu(monkeypatch):
    assert own_device("auto") == "auto"
    taken = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("auto") == "auto"  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [own_device(name) for name in ("auto", "cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:1", "cuda:0", "cpu"]
    assert taken == [1, 1]
