"""The training script: a killed run goes on as if nothing had happened, levels rise in time, exports load."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.errors import UserError
from kvbench.taskkit.synthetic import chain
from kvbench.taskkit.synthetic.problem import FACT, KINDS, PLAN, RESULT
from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.train.tiny import __main__ as tiny
from kvbench.train.tiny import card as tiny_card
from kvbench.train.tiny.data import LEVELS, PATIENCE, STAGES, Batch, Ladder, draw_batch, pack
from kvbench.train.tiny.trainer import Trainer, batch_loss
from kvbench.train.tiny.warmstart import warm_start

TINY_SCALE = 1e-3  # a few steps a stage


def small() -> Trainer:
    return Trainer(seed=0, scale=TINY_SCALE, batch_tokens=512)


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_killed_run_repeats_the_losses(tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    straight = small()
    tiny.train(straight, whole, save_every=100, print_every=100)
    assert straight.step == straight.total == len(losses(whole))
    assert np.isfinite(losses(whole)).all()

    killed, step = small(), Trainer.train_step
    with monkeypatch.context() as patch:  # saved after step 3, killed in step 6
        patch.setattr(killed, "train_step", lambda: step(killed) if killed.step < 5 else raise_kill())
        with pytest.raises(KeyboardInterrupt):
            tiny.train(killed, cut, save_every=3, print_every=100)
    resumed = small()
    tiny.train(resumed, cut, save_every=100, print_every=100)
    assert losses(cut) == losses(whole)
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def raise_kill():
    raise KeyboardInterrupt


def test_a_checkpoint_of_another_seed_is_refused(tmp_path):
    small().save(tmp_path / "checkpoint.pt")
    with pytest.raises(UserError, match="other settings or another seed"):
        Trainer(seed=1, scale=TINY_SCALE, batch_tokens=512).restore(tmp_path / "checkpoint.pt")


def test_data_depend_on_seed_and_step_only():
    ladder = Ladder()
    batch = draw_batch(3, 17, STAGES[0], ladder)
    assert (batch.tokens == draw_batch(3, 17, STAGES[0], ladder).tokens).all()
    other = draw_batch(3, 18, STAGES[0], ladder).tokens
    assert batch.tokens.shape != other.shape or (batch.tokens != other).any()


@pytest.mark.parametrize("task", LEVELS)
def test_every_level_makes_batches_of_about_the_wanted_size(task):
    for level in range(LEVELS[task]):
        ladder = Ladder(level=dict.fromkeys(LEVELS, level))
        for stage in STAGES:
            if task in stage.mixture:
                only = type(stage)(name="one", steps=1, mixture={task: 1.0}, muon_lr=0.0, review=0.0)
                batch = draw_batch(0, level, only, ladder)
                assert (batch.task, batch.level) == (task, level)
                assert 2500 < batch.tokens.size <= 4096
                assert len(batch.kinds) == batch.tokens.shape[1] - batch.n_prompt


def test_the_ladder_climbs_after_patience_and_only_when_every_gate_is_passed():
    batch = Batch("chain", 0, np.zeros((1, 1)), np.zeros(1), 0)
    good = {FACT: 1.0, PLAN: 1.0, RESULT: 1.0}
    ladder = Ladder()
    assert [ladder.learn(batch, good) for _ in range(PATIENCE)] == [False] * (PATIENCE - 1) + [True]
    assert ladder.level["chain"] == 1
    assert not ladder.learn(batch, good), "a batch from a lower level says nothing"
    ladder = Ladder()
    assert not any(ladder.learn(batch, good | {RESULT: 0.9}) for _ in range(3 * PATIENCE))


@torch.no_grad()
def test_warm_heads_look_where_they_should():
    model = warm_start(0).eval()
    model.set_attn_implementation("eager")
    problems = [chain.generate(i, chain.Knobs(n_facts=4, n_steps=2, n_distract=0, n_filler=0)) for i in range(4)]
    tokens = torch.from_numpy(pack("chain", 0, problems).tokens)
    attentions = model(tokens, output_attentions=True).attentions  # 4 x [rows, heads, query, key]
    last = tokens.shape[1] - 1
    for layer, head, offset in ((0, 0, 1), (0, 1, 2), (2, 2, 3), (2, 3, 7), (3, 2, 3), (3, 3, 7)):
        seen = attentions[layer][:, head, last].mean(0)
        assert seen.argmax() == last - offset, (layer, head)
    # the induction head: from a name in the solution to the token behind the same name in the prompt
    position = len(problems[0].prompt_pieces) + 7
    found = []
    for row, problem in enumerate(problems):
        pieces = problem.prompt_pieces + problem.solution_pieces
        behind = [i + 1 for i in range(position) if pieces[i] == pieces[position]]
        found.append(attentions[1][row, 0, position, behind].sum().item())
    assert np.mean(found) > 0.4, "chance is about 0.05"


def test_one_step_lowers_the_loss_of_its_own_batch():
    trainer = small()
    batch = draw_batch(0, 0, STAGES[0], trainer.ladder, 512)
    before, right = batch_loss(trainer.model, batch)
    assert set(right) <= set(KINDS)
    for _ in range(3):
        trainer.train_step()
    assert batch_loss(trainer.model, batch)[0] < before


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny_card, "VARIANTS", {"lookup-1": VARIANTS["lookup-1"]})
    small_run = f"--steps-scale {TINY_SCALE} --batch-tokens 512 --threads 1 --problems 1 --print-every 2"
    command = ["tiny", "--out", str(tmp_path), *small_run.split()]
    monkeypatch.setattr("sys.argv", command)
    tiny.main()
    output = capsys.readouterr()
    assert json.loads(output.out)["lookup-1"]["problems"] == 1
    assert "2/" in output.err
    monkeypatch.setattr("sys.argv", [*command, "--seed", "1"])
    with pytest.raises(SystemExit) as stop:
        tiny.main()
    assert stop.value.code == 2
    assert "other settings or another seed" in capsys.readouterr().err


def test_export_loads_with_the_stock_classes(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_card, "VARIANTS", {name: VARIANTS[name] for name in ("lookup-1", "chain-4")})
    trainer = small()
    trainer.train_step()
    card = tiny_card.export(trainer, tmp_path, n_problems=2)
    assert json.loads((tmp_path / "card.json").read_text())["steps"] == card["steps"] == 1
    assert set(card["accuracy"]) == {"lookup-1", "chain-4"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.lm_head.weight, trainer.model.lm_head.weight)
    assert model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(tmp_path).eos_token_id
