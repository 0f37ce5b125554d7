"""Training the model in bfloat16: losses against float32, a resumed training, and the written model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base
from kvbench.sources.model_files import CHECKPOINT
from kvbench.train.checkpoint import state_of
from kvbench.train.collection import Collection
from kvbench.train.entry import LORA
from kvbench.train.loop import LOG, train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.gkv_distill import DistillRecipe
from kvbench.train.recipes.gkv_rl import RLRecipe, Rollout
from kvbench.train.traces import built_in, collect

MORE = {"method": "gkv(window=4)", "budget": 32, "interval": 8, "slots": 32, "micro": 8, "recompute": "off"}
MORE |= {**LORA, "kl_temperature": 4.0, "temperature": 2.0, "group": 4}
PRECISIONS = ("float32", "bfloat16")


def recipe(precision):
    """Two short answers, most of whose entries are evicted; one question is held out."""
    loaded = load(str(tiny.path()), device="cpu", dtype=precision)
    asked = [replace(q, max_new_tokens=40) for q in built_in(("chain",), 2, 0, loaded)]
    answers = collect(loaded, asked, Collection(wrong="keep"))
    settings = Settings(steps=3, lr=3e-4, warmup=1, batch=2, more=MORE | {"precision": precision})
    return DistillRecipe(loaded, settings, answers, [replace(asked[0], max_new_tokens=2)])


def run(made, folder, stop_after=None):
    """Train, and return the log. The training is interrupted after `stop_after` steps."""

    def on_step(step, figures):
        if step == stop_after:
            raise KeyboardInterrupt

    folder.mkdir(exist_ok=True)
    train(made, folder, base=Base(name="tiny", config=made.loaded.model.config), checkpoint_seconds=0, on_step=on_step)
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By precision: the recipe after a training, its folder, and its log."""
    found = {}
    for precision in PRECISIONS:
        folder, made = tmp_path_factory.mktemp(precision), recipe(precision)
        found[precision] = made, folder, run(made, folder)
    return found


def test_losses_in_bfloat16_are_those_in_float32_up_to_rounding(trained):
    exact, rounded = ([row["loss"] for row in trained[precision][2]] for precision in PRECISIONS)
    assert rounded == pytest.approx(exact, rel=0.1)
    assert rounded != pytest.approx(exact, rel=1e-4)
    assert rounded == sorted(rounded, reverse=True)


def test_model_and_teacher_are_bfloat16_and_the_optimiser_float32(trained):
    made, folder, _ = trained["bfloat16"]
    with made.teacher() as teacher:
        for model in (made.loaded.model, teacher):
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    written = load_file(folder / "model/model.safetensors")
    assert all(torch.equal(written[name], p) for name, p in made.parameters().items())
    with safe_open(folder / CHECKPOINT, framework="pt") as file:
        for name, p in made.parameters().items():
            master = file.get_tensor(f"parameter/{name}")
            assert master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), p)


def test_the_frequencies_of_rope_are_not_rounded(trained):
    made, fresh = (
        trained["bfloat16"][0],
        dict(load(str(tiny.path()), device="cpu", dtype="bfloat16").model.named_buffers()),
    )
    with made.teacher() as teacher:
        for model in (made.loaded.model, teacher):
            assert {name: (b.dtype, b.tolist()) for name, b in model.named_buffers()} == {
                name: (b.dtype, b.tolist()) for name, b in fresh.items()
            }
    assert any(not torch.equal(b, b.bfloat16().float()) for b in fresh.values())  # rounding would change some


def test_a_bfloat16_training_that_was_stopped_goes_on_to_the_same_losses(trained, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(recipe("bfloat16"), tmp_path, stop_after=2)
    assert state_of(tmp_path / CHECKPOINT)["step"] == 1
    whole, stopped = trained["bfloat16"][2], run(recipe("bfloat16"), tmp_path)
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in stopped] == pytest.approx([row[key] for row in whole], rel=1e-6)


def test_the_gradient_of_rewards_in_bfloat16_is_that_of_float32(monkeypatch):
    """Of the same answers with the full cache: a right one, and a wrong one."""
    gradients = []
    for precision in PRECISIONS:
        made = recipe(precision)
        groups = [[Rollout(answered=a, reward=r, cut=False) for a, r in zip(made.simulate(made.traces), (1.0, 0.0))]]
        more = MORE | {"precision": precision}
        learner = RLRecipe(made.loaded, Settings(steps=1, lr=1e-4, batch=1, more=more), made.test, made.test)
        monkeypatch.setattr(learner, "sample", lambda *_, groups=groups: groups)
        learner.loss(0, slice(0, 1))
        gradients.append(torch.cat([p.grad.float().flatten() for p in learner.parameters().values()]))
    assert gradients[0].norm() > 0
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.95


def test_an_unknown_precision_is_refused_before_questions_are_asked(tmp_path, capsys):
    command = ["train", "gkv-rl", "--opt", "precision=float16", "--out", str(tmp_path / "t"), "-q"]
    assert main(command) == 2
    assert "--opt precision must be float32 or bfloat16; got 'float16'." in capsys.readouterr().err
