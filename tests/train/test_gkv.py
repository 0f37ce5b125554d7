"""Training of the model itself under eviction: what is learnt from, the gradient, and the model that is left."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import vision, zoo
from support.models import ARCHITECTURES, build
from support.recipes import change, logits_at_once

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine import sampler
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base
from kvbench.errors import UserError
from kvbench.train import prepare, sparse_pass
from kvbench.train.collection import Collection
from kvbench.train.data_file import read_questions
from kvbench.train.entry import LORA
from kvbench.train.loop import LOG, train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.gkv_distill import DistillRecipe
from kvbench.train.recipes.gkv_rl import RLRecipe, advantages, log_probs
from kvbench.train.sparse_masks import SparseAttention
from kvbench.train.sparse_pass import Part
from kvbench.train.traces import Question, Trace, built_in, collect
from kvbench.train.trained_model import write_model

MORE = {"method": "gkv", "budget": 112, "interval": 32, "slots": 32, "micro": 8, "recompute": "off"}
MORE |= {"precision": "float32", **LORA, "temperature": 0.6, "kl_temperature": 0.6}
ROLL = MORE | {"temperature": 1.5, "group": 6}
RANDOM = {**MORE, "method": "gkv(window=4)", "budget": 16, "interval": 8, "temperature": 1.0}


def settings(more=MORE, **numbers):
    return Settings(**{"steps": 6, "lr": 3e-4, "warmup": 1, "batch": 4, "more": more} | numbers)


@pytest.fixture
def loaded():
    return load(str(tiny.path()), device="cpu")


@pytest.fixture(scope="module")
def asked():
    loaded = load(str(tiny.path()), device="cpu")
    return built_in(("chain",), 6, 0, loaded), built_in(("chain",), 3, 0, loaded, held_out=True)


@pytest.fixture(scope="module")
def answers(asked):
    return collect(load(str(tiny.path()), device="cpu"), asked[0])


def gradients(recipe):
    return {name: p.grad.clone() for name, p in recipe.parameters().items() if p.grad is not None}


def forget(recipe):
    for p in recipe.parameters().values():
        p.grad = None


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    largest = max(float(g.abs().max()) for g in wanted.values())
    assert largest > 0
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) < 1e-4 * largest, name


def random_recipe(architecture, kind, **more):
    """A recipe for a random model that knows end tokens; a text is right when most of its tokens are even."""
    loaded = build(architecture)
    loaded = dataclasses.replace(loaded, stop_ids=frozenset(range(12)))
    generator = torch.Generator().manual_seed(1)
    ids = [tuple(torch.randint(0, 160, (n,), generator=generator).tolist()) for n in (21, 30, 13, 40)]

    def right(text):
        numbers = [int(word) for word in text.split()]
        return sum(n % 2 == 0 for n in numbers) > len(numbers) / 2

    questions = [Question(name=str(i), ids=x, max_new_tokens=40, judge=right) for i, x in enumerate(ids)]
    if kind is RLRecipe:
        return RLRecipe(loaded, settings(RANDOM | {"group": 8} | more), questions, questions)
    answers = [Trace(name=q.name, prompt=q.ids, answer=q.ids[::-1]) for q in questions]
    return DistillRecipe(loaded, settings(RANDOM | more), answers, questions)


def test_advantages():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    cut = torch.zeros(3, 4, dtype=torch.bool)
    cut[2, :2] = True
    third = 0.25 / 0.1875**0.5
    wanted = [[1.0, -1.0, -1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -third, 3 * third]]
    torch.testing.assert_close(advantages(rewards, cut), torch.tensor(wanted))


def test_batches_are_a_function_of_the_step_and_meet_every_item(loaded, asked):
    recipe = RLRecipe(loaded, settings(ROLL), *asked)
    drawn = [recipe.draw(range(6), step) for step in range(3)]
    assert drawn == [recipe.draw(range(6), step) for step in range(3)]
    flat = [item for batch in drawn for item in batch]
    assert sorted(flat[:6]) == sorted(flat[6:]) == [0, 1, 2, 3, 4, 5]
    assert flat[:6] != flat[6:]


def test_log_probs_are_those_that_the_tokens_were_drawn_with(loaded, asked, monkeypatch):
    drawn = {}

    def draw(logits, keys, steps, sampling):
        tokens = original(logits, keys, steps, sampling)
        scaled = (logits.float() / sampling.temperature).log_softmax(dim=-1)
        for row, (key, step, token) in enumerate(zip(keys.tolist(), steps.tolist(), tokens.tolist())):
            drawn[key, step] = float(scaled[row, token])
        return tokens

    original = sampler.draw
    monkeypatch.setattr(sampler, "draw", draw)
    recipe = RLRecipe(loaded, settings(ROLL), *asked)
    sequences = [r.answered for group in recipe.sample(0, slice(0, 4)) for r in group]
    part = Part(sequences, loaded.device)
    with torch.no_grad():
        said = log_probs(logits_at_once(part, loaded.model, part.tables(recipe.lifetimes)), part.targets, 1.5)
        blind = log_probs(logits_at_once(part, loaded.model, {}), part.targets, 1.5)
    counted = part.weights > 0
    wanted = torch.tensor([drawn[s.keys[1], step] for s in sequences for step in range(len(s.answer))])
    assert len({len(s.answer) for s in sequences}) > 1
    assert float((said[counted] - wanted).abs().max()) < 1e-3
    assert float((blind[counted] - wanted).abs().max()) > 0.1


def test_the_gradient_is_that_of_the_policy(loaded, asked, monkeypatch):
    recipe = RLRecipe(loaded, settings(ROLL), *asked)
    rollouts = recipe.sample(0, slice(0, 4))
    rewards = torch.tensor([[float(len(r.answered.answer) % 2) for r in group] for group in rollouts])  # all kinds
    told = [
        [dataclasses.replace(r, reward=float(reward), cut=False) for r, reward in zip(group, row)]
        for group, row in zip(rollouts, rewards)
    ]
    recipe.sample = lambda step, share: told
    loss, figures = recipe.loss(0, slice(0, 4))
    loss.backward()
    assert figures["reward"] == pytest.approx(float(rewards.mean()))
    found = gradients(recipe)
    forget(recipe)
    worth = advantages(rewards, torch.zeros(4, 6, dtype=torch.bool))
    total = torch.zeros(())
    for group, row in zip(told, worth):
        for rollout, advantage in zip(group, row):
            part = Part([rollout.answered], loaded.device)
            said = log_probs(logits_at_once(part, loaded.model, part.tables(recipe.lifetimes)), part.targets, 1.5)
            total = total - advantage * said.mean() / 6 / 4
    total.backward()
    assert_close(found, gradients(recipe))


def test_cut_answers_and_equal_rewards_teach_nothing(loaded, asked):
    recipe = RLRecipe(loaded, settings(ROLL), *asked)
    rollouts = recipe.sample(0, slice(0, 2))
    recipe.sample = lambda step, share: [[dataclasses.replace(r, reward=1.0) for r in g] for g in rollouts]
    loss, figures = recipe.loss(0, slice(0, 2))
    loss.backward()
    assert (figures["reward"], figures["mixed"], loss.item()) == (1.0, 0.0, 0.0)
    assert gradients(recipe) == {}


def test_answers_that_reach_their_longest_length_are_cut(loaded, asked):
    short = [dataclasses.replace(q, max_new_tokens=5) for q in asked[0]]
    recipe = RLRecipe(loaded, settings(ROLL), short, asked[1])
    assert all(r.cut and not r.reward for group in recipe.sample(0, slice(0, 2)) for r in group)


def test_rollouts_depend_on_step_and_share_of_the_batch_alone(loaded, asked):
    recipe = RLRecipe(loaded, settings(ROLL), *asked)
    whole = recipe.sample(3, slice(0, 4))
    assert recipe.sample(3, slice(2, 4)) == whole[2:]
    assert recipe.sample(4, slice(0, 4)) != whole


def test_held_out_are_the_rewards_of_sampled_answers(loaded, asked):
    texts = []
    test = [dataclasses.replace(q, judge=lambda text: texts.append(text) or len(texts) % 3 == 0) for q in asked[1]]
    recipe = RLRecipe(loaded, settings(ROLL), asked[0], test)
    assert recipe.held_out() == {"reward": pytest.approx(1 / 3), "accuracy": 1 / 3, "full_accuracy": 1 / 3}
    assert len(texts) == 6 * 3 + 3 + 3
    assert len(set(texts[:6])) > 1  # sampled


@pytest.mark.parametrize("architecture", ["qwen3", "llama-mha", "opt"])
@pytest.mark.parametrize("kind", [DistillRecipe, RLRecipe])
def test_parts_and_recomputed_layers_give_the_same_gradient(architecture, kind, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "llama-mha", ("LlamaConfig", {"num_key_value_heads": 4}))
    dropout = {"num_key_value_heads": 4, "ffn_dim": 96, "dropout": 0.5}  # that OPT's layers apply without a submodule
    monkeypatch.setitem(ARCHITECTURES, "opt", ("OPTConfig", dropout))
    found = []
    for rows, more in (
        (1024, {"micro": 64}),
        (1024, {"micro": 3}),
        (1024, {"recompute": "on"}),
        (9, {"recompute": "on"}),
    ):
        monkeypatch.setattr(sparse_pass, "SparseAttention", partial(SparseAttention, rows=rows))
        recipe = random_recipe(architecture, kind, **{"micro": 64} | more)
        loss, _ = recipe.loss(0, slice(0, 4))
        loss.backward()
        found.append((loss.item(), gradients(recipe)))
        assert not any(m.training for m in recipe.loaded.model.modules())
    for other in found[1:]:
        assert other[0] == pytest.approx(found[0][0], abs=1e-6)
        assert_close(other[1], found[0][1])


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "llama-mha"])
def test_distillation_of_random_models(architecture, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "llama-mha", ("LlamaConfig", {"num_key_value_heads": 4}))
    recipe = random_recipe(architecture, DistillRecipe)
    losses = []
    optimiser = torch.optim.AdamW(recipe.parameters().values(), lr=1e-3)
    for _ in range(8):
        loss, _ = recipe.loss(0, slice(0, 4))
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("architecture", ["qwen3", "llama-mha"])
def test_rewards_of_random_models_rise(architecture, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "llama-mha", ("LlamaConfig", {"num_key_value_heads": 4}))
    recipe = random_recipe(architecture, RLRecipe)
    optimiser = torch.optim.AdamW(recipe.parameters().values(), lr=2e-3)
    rewards = []
    for step in range(16):
        _, figures = recipe.loss(step, slice(0, 4))
        optimiser.step()
        optimiser.zero_grad()
        rewards.append(figures["reward"])
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


def test_the_loss_of_distillation_is_that_of_its_definition(loaded, asked, answers):
    """T^2 KL, a mean over the tokens of the batch; shares of it add up to the whole."""
    more = MORE | {"kl_temperature": 2.0}
    recipe = DistillRecipe(loaded, settings(more), answers, asked[1])
    whole, _ = recipe.loss(0, slice(0, 4))
    halves = [recipe.loss(0, slice(0, 2))[0].item(), recipe.loss(0, slice(2, 4))[0].item()]
    assert sum(halves) / 2 == pytest.approx(whole.item(), rel=1e-4)
    batch = recipe.draw(answers, 0)
    divergences = []
    for answered in recipe.simulate(batch):
        part = Part([answered], loaded.device)
        with torch.no_grad():
            full = (logits_at_once(part, loaded.model, {}) / 2).log_softmax(-1)
            sparse = (logits_at_once(part, loaded.model, part.tables(recipe.lifetimes)) / 2).log_softmax(-1)
        divergences.append(torch.nn.functional.kl_div(sparse, full, log_target=True, reduction="none").sum(-1)[0])
    assert whole.item() == pytest.approx(4 * float(torch.cat(divergences).mean()), rel=1e-4)
    roomy = DistillRecipe(copy.deepcopy(loaded), settings(MORE | {"budget": 400}), answers, asked[1])
    assert abs(roomy.loss(0, slice(0, 4))[0].item()) < 1e-6  # nothing is evicted: the teacher's own predictions


def test_a_budget_that_no_answer_exceeds_is_refused(loaded, asked, answers):
    longest = max(len(trace.ids) for trace in answers)
    roomy = DistillRecipe(copy.deepcopy(loaded), settings(MORE | {"budget": longest}), answers, asked[1])
    with pytest.raises(UserError, match=f"every prompt with its answer fits into --opt budget={longest}, so nothing"):
        roomy.about_data()
    fits = sum(len(trace.ids) < longest for trace in answers)
    tight = DistillRecipe(copy.deepcopy(loaded), settings(MORE | {"budget": longest - 1}), answers, asked[1])
    said = (
        f"{fits} of {len(answers)} answers train nothing: prompt and answer together fit into the budget, so nothing "
        "is evicted."
    )
    assert tight.about_data() == ([said] if fits else [])


def test_rollouts_that_no_budget_evicts_are_refused(loaded, asked):
    shorter = dataclasses.replace(asked[0][0], max_new_tokens=50)
    questions = [shorter, *asked[0][1:]]
    totals = [len(q.ids) + q.max_new_tokens for q in questions]

    def made(budget, **more):
        return RLRecipe(copy.deepcopy(loaded), settings(ROLL | {"budget": budget} | more), questions, asked[1])

    line = f"every prompt with its longest answer fits into --opt budget={max(totals)}, so nothing is evicted"
    with pytest.raises(UserError, match=line):
        made(max(totals)).about_data()
    assert made(max(totals), method="full").about_data() == []
    assert made(min(totals) - 1).about_data() == []
    fitting = totals.count(min(totals))
    [said] = made(min(totals)).about_data()
    assert said.startswith(f"{fitting} of {len(totals)} questions train without eviction: the prompt with its longest")


@pytest.mark.parametrize("name", ["gkv-distill", "gkv-rl"])
def test_windows_in_every_layer_are_refused_before_anything_is_asked(name, tmp_path, monkeypatch, capsys):
    folder = zoo.repository(tmp_path / "m", zoo.configuration("mistral", {"sliding_window": 24}))
    monkeypatch.setattr(prepare, "_answered", lambda *_: pytest.fail("the model answered"))
    assert main(["train", name, "--model", str(folder), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "sliding window of at most 24 tokens" in line
    assert "or a smaller --opt max_tokens, until" in line


def test_answers_of_the_data_that_outgrow_every_window_are_refused():
    test = [Question(name="q", ids=(1, 2), max_new_tokens=4, judge=bool)]
    answers = [Trace(name="t", prompt=(1, 2), answer=(3,) * 30)]
    with pytest.raises(UserError, match=r"at most 24 tokens, .* Give shorter texts or questions, .* up to 32 tokens"):
        DistillRecipe(build("mistral-sliding"), settings(RANDOM), answers, test)


def test_the_files_for_images_go_with_the_trained_model(tmp_path):
    folder = vision.repository(tmp_path / "vl", "llava_onevision")
    write_model(load(str(folder), device="cpu"), tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (folder / name).read_bytes()
    assert vision.model_reader(tmp_path / "model").vision is not None


def test_weights_of_the_eviction_method_are_missed_before_anything_is_asked():
    model = build("qwen3")
    with pytest.raises(UserError, match="method 'foresightkv' needs trained scorer weights"):
        DistillRecipe.check(model, MORE | {"method": "foresightkv", "budget": 64, "kl_temperature": 1.0})


def test_a_model_that_stays_quantised_is_refused():
    model = build("qwen3")
    model.model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UserError, match=r"the model's weights stay quantised \(bitsandbytes\), and gkv-rl cannot"):
        RLRecipe.check(model, ROLL)


def test_a_model_of_compressed_tensors_is_refused():
    model = build("qwen3")
    model.model.model.layers[0].mlp.up_proj.quantization_scheme = "W8A8"
    with pytest.raises(UserError, match=r"inputs as compressed-tensors prescribes, and gkv-rl cannot train"):
        RLRecipe.check(model, ROLL)


def test_an_answer_that_a_batch_has_twice_counts_twice(loaded, asked, answers, monkeypatch):
    """A batch over the end of an epoch may have one again, with others read in between."""
    recipe = DistillRecipe(loaded, settings(MORE | {"budget": 48, "micro": 1}), answers, asked[1])

    def loss(*drawn):
        monkeypatch.setattr(recipe, "draw", lambda items, step: [items[i] for i in drawn])
        return recipe.loss(0, slice(0, len(drawn)))[0].item()

    n = [len(answers[i].answer) for i in (0, 1)]
    wanted = (2 * n[0] * loss(0) + n[1] * loss(1)) / (2 * n[0] + n[1])
    assert loss(0, 1, 0) == pytest.approx(wanted, rel=1e-4)


def test_the_teacher_stays_as_it_was(loaded, asked, answers, tmp_path):
    recipe = DistillRecipe(loaded, settings(steps=2), answers, asked[1])
    with recipe.teacher() as teacher:
        before = copy.deepcopy(teacher.state_dict())
    train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    trained = loaded.model.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in trained.items())


@pytest.mark.parametrize("kind", [DistillRecipe, RLRecipe])
def test_a_training_that_was_stopped_goes_on_to_the_same_losses(kind, asked, answers, tmp_path):
    def run(folder, stop_after=None):
        loaded = load(str(tiny.path()), device="cpu")
        given = answers if kind is DistillRecipe else asked[0]
        recipe = kind(loaded, settings(ROLL, steps=4, batch=2), given, asked[1])

        def on_step(step, figures):
            if step == stop_after:
                raise KeyboardInterrupt

        train(recipe, folder, base=Base(name="tiny", config=loaded.model.config), checkpoint_seconds=0, on_step=on_step)
        return [json.loads(line)["grad_norm"] for line in (folder / LOG).read_text().splitlines()]

    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", stop_after=3)
    assert run(tmp_path / "stopped") == pytest.approx(run(tmp_path / "whole"), rel=1e-3)


def test_the_commands_leave_a_model(tmp_path: Path, capsys, monkeypatch):
    for kind in ("gkv-distill", "gkv-rl"):
        change(monkeypatch, kind, held_out=2)
        out = tmp_path / kind
        command = ["train", kind, "--out", str(out), "--samples", "4", "--steps", "2", "--batch", "2", "-q", "--json"]
        assert main(command) == 0
        card = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert Path(card["path"]) == out / "model"
        assert card["base_model"] == "tiny"
        figures = {"accuracy", "full_accuracy"} | ({"reward"} if kind == "gkv-rl" else set())
        assert set(card["made"]["held_out_after"]) == figures
        assert str(tmp_path) not in json.dumps({**card, "path": ""})
        assert str(tmp_path) not in "".join(p.read_text() for p in (out / "model").glob("*.json"))
        model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
        assert model.config.model_type == "qwen3"
        assert model.generation_config.eos_token_id is not None
    run = ["run", "--model", str(out / "model"), "--method", "gkv", "--budget", "64", "--task", "chain", "--limit", "1"]
    assert main([*run, "--interval", "32", "--out", str(tmp_path / "r"), "-q"]) == 0


def test_the_model_comes_with_the_weights_that_it_was_trained_with(tmp_path: Path, capsys, monkeypatch):
    change(monkeypatch, "gkv-distill", held_out=2)
    command = ["train", "gkv-distill", "--out", str(tmp_path), "--samples", "4", "--steps", "2", "--batch", "2", "-q"]
    assert main([*command, "--opt", "method=retention", "--opt", "budget=48"]) == 0
    run = ["run", "--model", str(tmp_path / "model"), "--method", "retention", "--budget", "48", "--task", "chain"]
    run += ["--limit", "1", "--interval", "32", "--out", str(tmp_path / "r"), "-q"]
    assert main(run) == 0
    gates = load_file(tmp_path / "model/retention.safetensors")
    wanted = load_file(tiny.path() / "retention.safetensors")
    assert gates.keys() == wanted.keys()
    assert all(torch.equal(gates[name], wanted[name]) for name in wanted)
    capsys.readouterr()
    assert main([*run, "--method-opt", f"retention.gates={tiny.path()}"]) == 3
    assert "whose parameters differ from this model's" in capsys.readouterr().err


def test_the_written_model_is_the_trained_one(loaded, asked, answers, tmp_path):
    recipe = DistillRecipe(loaded, settings(steps=2), answers, asked[1])
    done = train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    written = load(str(done.path), device="cpu")
    wanted = loaded.model.state_dict()
    assert all(torch.equal(wanted[name], value) for name, value in written.model.state_dict().items())
    assert written.stop_ids == loaded.stop_ids
    assert not (tmp_path / ".model.part").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"method": "duo(sparsity=0.5)"},
            "the method is an oracle, or evicts without a budget",
        ),
        ({"method": "golden"}, "this training cannot use method 'golden': the method is an oracle"),
        ({"budget": 4}, "--opt budget must be at least"),
        ({"recompute": "maybe"}, "--opt recompute must be one of auto, on, off; got 'maybe'."),
        ({"temperature": 0.0}, "--opt temperature must be above 0; got 0."),
        ({"temperature": float("nan")}, "--opt temperature must be above 0; got nan."),
        ({"slots": 0}, "--opt slots must be 1 or more; got 0."),
        ({"group": 1}, "--opt group must be 2 or more; got 1."),
    ],
)
def test_mistakes(loaded, asked, more, message):
    with pytest.raises(UserError, match=message.replace("(", "\\(")):
        RLRecipe(loaded, settings(ROLL | more), *asked)


def test_a_model_that_could_not_be_saved_is_refused_before_it_is_trained(loaded, asked):
    loaded.model.generation_config.do_sample, loaded.model.generation_config.temperature = False, 0.5
    with pytest.raises(UserError, match=r"generation_config.json is invalid and could not be saved.*temperature"):
        RLRecipe(loaded, settings(ROLL), *asked)


def test_answers_are_compared_as_mathematics(loaded, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "half", "answer": "\\\\frac{1}{2}"}\n')
    right = next(read_questions(path, loaded, Collection())).judge
    assert right("It is \\boxed{0.5}.")
    assert not right("It is \\boxed{5}.")


def test_recomputing_is_refused_where_no_layer_can() -> None:
    with pytest.raises(UserError, match="the layers of 'Linear' cannot be recomputed; use --opt recompute=off"):
        sparse_pass.recomputes(torch.nn.Linear(2, 2), "on")
    assert not sparse_pass.recomputes(torch.nn.Linear(2, 2), "auto")
