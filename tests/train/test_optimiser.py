"""The sharded AdamW against torch's, bfloat16 parameters, and checkpoints across numbers of processes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from kvbench.errors import SetupError
from kvbench.train import checkpoint
from kvbench.train.optimiser import ShardedAdamW
from kvbench.train.processes import Processes

SHAPES = {"matrix": (5, 7), "row": (3,), "number": (), "unused": (2, 2)}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    made["matrix"] = made["matrix"].T.contiguous().T  # not contiguous
    return {name: tensor.requires_grad_(True) for name, tensor in made.items()}


def set_gradients(tensors, step):
    generator = torch.Generator().manual_seed(step)
    for name, p in tensors.items():
        if name != "unused":
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def optimiser(tensors, processes=None):
    return ShardedAdamW(tensors, processes or Processes(), beta2=0.98, weight_decay=0.1)


def test_steps_are_those_of_torch():
    ours, theirs = parameters(), parameters()
    adamw = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.98), weight_decay=0.1)
    made = optimiser(ours)
    for step in range(5):
        for tensors in (ours, theirs):
            set_gradients(tensors, step)
        theirs["unused"].grad = torch.zeros_like(theirs["unused"])
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        adamw.param_groups[0]["lr"] = 0.1 / (step + 1)
        adamw.step()
        assert made.step(0.1 / (step + 1), clip=1.0) == pytest.approx(float(norm))
        assert all(p.grad is None for p in ours.values())
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    """Clipping by an infinite norm would make every number NaN, and the last step's would become weights."""
    p = torch.ones(3, requires_grad=True)
    made = optimiser({"p": p})
    p.grad = torch.tensor([float(value), 1.0, 1.0])
    with pytest.raises(SetupError, match=rf"the norm of the gradient is {value} at step 1; try a smaller --lr\."):
        made.step(0.1, clip=1.0)
    assert bool((p == 1).all())


def test_small_steps_of_bfloat16_parameters_add_up():
    """One step of 1e-4 from 1 rounds back to 1 in bfloat16; a hundred of them do not."""
    p = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    made = ShardedAdamW({"p": p}, Processes(), beta2=0.98, weight_decay=0.0)
    for step in range(100):
        p.grad = torch.ones_like(p)
        made.step(1e-4, clip=100.0)
        assert p.dtype == torch.bfloat16
        assert step > 0 or bool((p == 1).all())
    torch.testing.assert_close(p.detach().float(), torch.full((4,), 0.99), rtol=0, atol=4e-3)
    torch.testing.assert_close(made.parts["p"].parameter, torch.full((4,), 0.99), rtol=0, atol=1e-4)


def test_parts_cover_every_number_once():
    for size in (0, 1, 5, 35):
        parts = [Processes(3, rank).part(size) for rank in range(3)]
        assert [i for part in parts for i in range(size)[part]] == list(range(size))
    parts = [optimiser(parameters(), Processes(3, rank)).parts["matrix"].exp_avg for rank in range(3)]
    assert [len(part) for part in parts] == [11, 12, 12]


def test_a_checkpoint_of_one_process_serves_three(tmp_path):
    """Each process takes its part of the whole tensors, which are plain safetensors."""
    path, tensors = tmp_path / "checkpoint.safetensors", parameters()
    made = optimiser(tensors)
    for step in range(3):
        set_gradients(tensors, step)
        made.step(0.1, clip=1.0)
    checkpoint.save(path, made, {"step": 3}, Processes())
    stored = load_file(path)
    assert checkpoint.state_of(path) == {"step": 3}
    for name, p in tensors.items():
        assert torch.equal(stored[f"parameter/{name}"], p.detach())
    joined = {name: [] for name in tensors}
    for rank in range(3):
        others = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        part = optimiser(others, Processes(3, rank))
        checkpoint.restore(path, part, 3)
        assert part.steps == 3
        for name in tensors:
            assert torch.equal(others[name], tensors[name])
            joined[name].append(part.parts[name].exp_avg_sq)
    for name, parts in joined.items():
        assert torch.equal(torch.cat(parts), made.parts[name].exp_avg_sq)
        assert torch.equal(torch.cat(parts), stored[f"exp_avg_sq/{name}"].flatten())


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    checkpoint.save(path, optimiser({"row": torch.zeros(3)}), {}, Processes())
    with pytest.raises(SetupError, match=r"parameter/row has the shape \[3\], not \[4\]"):
        checkpoint.restore(path, optimiser({"row": torch.zeros(4)}), 1)
    path.write_bytes(b"")
    with pytest.raises(SetupError, match="cannot be used"):
        checkpoint.restore(path, optimiser({"row": torch.zeros(3)}), 1)
