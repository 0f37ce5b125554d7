"""Training of retention gates: the student at its limits, gradients, the engine's own gates, and that it learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from support.models import BASE, VOCABULARY, Words, build
from support.recipes import change

import kvbench.train.recipes.gates as module
from kvbench import tiny
from kvbench.audit.invariants import watch
from kvbench.cli.app import main
from kvbench.config.run_config import MethodChoice
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel, load, prepare
from kvbench.engine.model.weights import Base, save_weights
from kvbench.errors import UserError
from kvbench.eviction.choose import make
from kvbench.eviction.terms.retention import gated_attention
from kvbench.records import Request
from kvbench.replay.batches import replay
from kvbench.replay.choices import Chosen
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.forward import forward
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.gates import RetentionRecipe, Student, TrimKVRecipe, alike, fading
from kvbench.train.sparse_masks import plain
from kvbench.train.traces import Trace, built_in, collect

BOTH = [TrimKVRecipe, RetentionRecipe]
FORMS = [(gate, tie) for gate in ("rg", "rg2", "rg3", "rg10") for tie in ("none", "layers", "layers_and_heads")]


def settings(recipe, **more):
    options = BUILT_IN[recipe.name].settings("tiny") | {"width": 8} | more
    return Settings(steps=12, lr=2e-2, warmup=2, batch=4, more=options)


def drawn(lengths=((30, 20), (24, 11)), count=3):
    """Traces of random tokens."""
    g = torch.Generator().manual_seed(0)
    return [
        Trace(
            name=f"{i}-{prompt}",
            prompt=tuple(torch.randint(0, VOCABULARY, (prompt,), generator=g).tolist()),
            answer=tuple(torch.randint(0, VOCABULARY, (answer,), generator=g).tolist()),
        )
        for prompt, answer in lengths
        for i in range(count)
    ]


def many_heads() -> LoadedModel:
    """Llama with a KV head for every query head."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**BASE | {"num_key_value_heads": 4})
    return prepare(transformers.AutoModelForCausalLM.from_config(config).eval(), Words())


@pytest.fixture(scope="module")
def loaded():
    return load(str(tiny.path()), device="cpu")


@pytest.fixture(scope="module")
def traces(loaded):
    return (
        collect(loaded, built_in(("lookup", "chain"), 8, 0, loaded)),
        collect(loaded, built_in(("lookup", "chain"), 4, 0, loaded, held_out=True)),
    )


@pytest.fixture(scope="module")
def random_model():
    return build("qwen3")


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2-sliding", "mistral-wide", "gemma2", "gemma3n", "gpt-oss"])
@pytest.mark.parametrize("form", ["weight", "scale"])
def test_gates_that_never_forget_leave_the_model_as_it_is(name, form):
    """Sliding windows, windows that nothing outgrows, bounded logits and sinks included."""
    model = build(name)
    recipe = TrimKVRecipe(model, settings(TrimKVRecipe, bias=60.0, form=form, budget=8), drawn(), drawn())
    _, kl, capacity = recipe._means(recipe.test).tolist()
    assert kl < 1e-6
    assert capacity == pytest.approx(1.0)
    student = Student(recipe.rules, recipe.geometry, form)
    forward(model.model, student, hidden=True, input_ids=torch.tensor([drawn()[0].ids]))
    assert len(student.log_beta) == sum(g.evicts for g in recipe.geometry)


def test_gates_that_forget_at_once_leave_every_token_alone(random_model):
    recipe = TrimKVRecipe(random_model, settings(TrimKVRecipe, bias=-1e6), drawn(), drawn())
    ids = torch.tensor([drawn()[0].ids])

    def own(call: AttentionCall) -> torch.Tensor:
        return call.value.repeat_interleave(2, dim=1).transpose(1, 2)

    with torch.no_grad():
        alone = forward(random_model.model, own, logits=0, input_ids=ids)
        student = Student(recipe.rules, recipe.geometry, "weight")
        torch.testing.assert_close(
            forward(random_model.model, student, logits=0, hidden=True, input_ids=ids), alone, rtol=1e-4, atol=1e-4
        )
    assert recipe._means(recipe.test)[2].item() == 0.0  # a single entry is alive at any time


def test_the_loss_is_what_it_says(random_model):
    """From whole probabilities, position by position."""
    recipe = RetentionRecipe(random_model, settings(RetentionRecipe, bias=1.0, budget=5), drawn(), drawn())
    trace = drawn()[0]
    student, ids = Student(recipe.rules, recipe.geometry, "weight"), torch.tensor([trace.ids])
    with torch.no_grad():
        guess = forward(random_model.model, student, logits=0, hidden=True, input_ids=ids)[0].softmax(dim=-1)
        teacher = random_model.model(ids).logits[0].softmax(dim=-1)
        loss, kl, capacity = recipe._sums([trace]).tolist()
    wanted_kl = wanted_ce = 0.0
    for i, token in enumerate(trace.answer):
        row = len(trace.prompt) + i - 1
        wanted_kl += float((teacher[row] * (teacher[row] / guess[row]).log()).sum()) / len(trace.answer)
        wanted_ce -= float(guess[row, token].log()) / len(trace.answer)
    assert kl == pytest.approx(wanted_kl, rel=1e-3)
    assert 2 * (loss - capacity) - kl == pytest.approx(wanted_ce, rel=1e-3)
    assert kl > 0.01
    loss, figures = recipe.loss(0, slice(0, 4))
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()[:4]  # of the first epoch
    parts = [recipe._sums([recipe.traces[i]]) for i in order]
    assert loss.item() == pytest.approx(sum(p[0].item() for p in parts) / 4, rel=1e-5)
    assert figures["capacity"] == pytest.approx(sum(p[2].item() for p in parts) / 4, rel=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3n"])  # the last two: layers without gates of their own
def test_recomputed_layers_give_the_same_gradients(name):
    found = []
    for recompute in ("off", "on"):
        more = settings(RetentionRecipe, bias=1.0, budget=5, recompute=recompute)
        recipe = RetentionRecipe(build(name), more, drawn(), drawn())
        loss, _ = recipe.loss(0, slice(0, 4))
        loss.backward()
        assert recipe.again is (recompute == "on")
        found.append({"loss": loss.detach()} | {key: p.grad for key, p in recipe.parameters().items()})
    assert all(float(gradient.abs().max()) > 0 for gradient in found[0].values())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_loss_belongs_to_its_step_and_share(random_model):
    recipe = TrimKVRecipe(random_model, settings(TrimKVRecipe, bias=2.0, budget=5), drawn(), drawn())
    assert recipe.loss(3, slice(0, 4))[0].item() == recipe.loss(3, slice(0, 4))[0].item()
    assert recipe.loss(3, slice(0, 4))[0].item() != recipe.loss(4, slice(0, 4))[0].item()
    halves = [recipe.loss(3, slice(0, 2))[0].item(), recipe.loss(3, slice(2, 4))[0].item()]
    assert recipe.loss(3, slice(0, 4))[0].item() == pytest.approx(sum(halves) / 2, rel=1e-5)


def test_the_held_out_figure_evicts_with_the_horizon(random_model):
    near, far = (
        RetentionRecipe(random_model, settings(RetentionRecipe, bias=1.0, budget=5, horizon=n), drawn(), drawn())
        for n in (1, 60)
    )
    assert module._without_file(far.rules.method).horizon == 60
    assert near._evicted() != far._evicted()
    assert near._means(near.test)[2] == far._means(far.test)[2]  # the loss knows no horizon


def test_long_traces_are_read_one_by_one(random_model):
    made = [
        TrimKVRecipe(random_model, settings(TrimKVRecipe), traces, drawn())
        for traces in (drawn(), drawn(((1000, 30),)))
    ]
    assert [recipe.at_once for recipe in made] == [None, 1]


def test_equally_long_traces_are_read_together():
    groups = list(alike(drawn()))
    assert [len(g) for g in groups] == [3, 3]
    assert {len(t.prompt) for t in groups[0]} == {30}


@pytest.mark.parametrize("form", ["weight", "scale"])
def test_attention_block_by_block(form, monkeypatch):
    g = torch.Generator().manual_seed(0)
    found = []
    for block in (100, 4, 3):
        g.manual_seed(0)
        q, k, v = (torch.randn(2, heads, 11, 8, generator=g) for heads in (4, 2, 2))
        log_beta = (-torch.rand(2, 2, 11, generator=g)).requires_grad_(True)
        call = AttentionCall(
            layer=0, query=q, key=k.requires_grad_(True), value=v, scaling=0.3, window=None, softcap=None, sinks=None
        )
        monkeypatch.setattr(module, "BLOCK", block)
        out = fading(call, log_beta, form)
        out.square().sum().backward()
        found.append((out.detach(), log_beta.grad, k.grad))
    whole = gated_attention(q, k.detach(), v, log_beta.detach(), scaling=0.3, form=form)
    torch.testing.assert_close(found[0][0], whole.transpose(1, 2))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize(("gate", "tie"), FORMS)
@pytest.mark.parametrize("recipe", BOTH)
def test_gradients_reach_every_tensor_of_every_form(random_model, recipe, gate, tie):
    made = recipe(random_model, settings(recipe, gate=gate, tie=tie, bias=1.0, budget=5), drawn(), drawn())
    made.loss(0, slice(0, 4))[0].backward()
    for name, tensor in made.parameters().items():
        rows = tensor.grad.flatten(1) if len(tensor) == 3 and name != "out.bias" else tensor.grad[None]
        assert bool((rows.abs().amax(dim=-1) > 0).all()), name  # those of every layer
    assert all(p.grad is None for p in random_model.model.parameters())


@pytest.mark.parametrize("model", [lambda: build("qwen3"), lambda: build("llama"), many_heads])
@pytest.mark.parametrize("recipe", BOTH)
def test_a_few_steps_on_other_shapes(model, recipe, tmp_path: Path):
    model = model()
    options = settings(recipe, bias=3.0, budget=6, interval=8)
    made = recipe(model, dataclasses.replace(options, steps=6), drawn(), drawn(count=1))
    done = train(made, tmp_path, base=Base(name="random", config=model.model.config))
    assert done.after["capacity"] < done.before["capacity"]
    method = make(recipe.name, {"gates": str(done.path)})
    engine = Engine(model, method, budget=6, interval=8, slots=2, max_tokens=60)
    todo = [Request(task="t", doc_id=t.name, prompt_ids=t.prompt, max_new_tokens=20) for t in drawn(count=1)]
    assert [a.status for a in engine.generate(todo)] == ["ok", "ok"]


@pytest.mark.parametrize("recipe", BOTH)
def test_a_layer_without_trained_gates_is_not_evicted(recipe, tmp_path: Path):
    """gemma2's layer 1 has a window of 24 tokens: it is untrained, for the traces have 50 and 35."""
    loaded = build("gemma2")
    made = recipe(loaded, dataclasses.replace(settings(recipe, budget=6), steps=1), drawn(), drawn(count=1))
    done = train(made, tmp_path, base=Base(name="random", config=loaded.model.config))
    assert done.card["made"]["layers"] == [0, 2]
    method = make(recipe.name, {"gates": str(done.path)})
    with pytest.raises(
        UserError, match=r"are untrained in 1 layer that the method would evict \(the first is layer 1\)"
    ):
        Engine(loaded, method, budget=6, interval=8, slots=1, max_tokens=24)
    Engine(loaded, method, budget=6, interval=8, slots=1, max_tokens=25)


@pytest.mark.parametrize("recipe", BOTH)
def test_texts_that_fit_into_the_budget_are_noted_or_refused(random_model, recipe):
    def about(budget, **more):
        return recipe(random_model, settings(recipe, budget=budget, **more), drawn(), drawn()).about_data()

    assert about(34) == []
    assert about(35) == ["3 of 6 answers teach no gate to forget: with the prompt they fit into the budget."]
    with pytest.raises(
        UserError, match=r"every prompt with its answer fits into --opt budget=50, so the capacity loss"
    ):
        about(50)
    assert about(50, capacity=0.0) == []  # the user switched the loss off


@pytest.mark.parametrize("recipe", BOTH)
def test_training_and_the_engine_have_the_same_gates(loaded, traces, recipe, tmp_path: Path, monkeypatch):
    """In the first layer at any time, and in all layers while nothing fades, as while the engine reads a prompt."""
    trace = traces[0][0]
    made = recipe(loaded, settings(recipe, bias=2.0), *traces)
    path = tmp_path / "gates.safetensors"
    save_weights(path, recipe.name, made.tensors(), Base(name="tiny", config=loaded.model.config), made={})
    method = make(recipe.name, {"gates": str(path)})
    engine = Engine(loaded, method, budget=20, interval=32, slots=1, max_tokens=400)
    monkeypatch.setattr(watch, "MOST", 4)  # every layer
    with watch.watching(method) as seen:
        list(engine.generate([Request(task="t", doc_id="d", prompt_ids=trace.prompt, max_new_tokens=4)]))
    views = {view.layer: view for _, decided in seen.decisions for view in decided if int(view.seen) <= 200}
    student = Student(made.rules, made.geometry, "weight")
    monkeypatch.setattr(module, "fading", lambda call, log_beta, form: plain(call))
    still = Student(made.rules, made.geometry, "weight")
    with torch.no_grad():
        forward(loaded.model, still, hidden=True, input_ids=torch.tensor([trace.prompt]))
        monkeypatch.undo()
        forward(loaded.model, student, hidden=True, input_ids=torch.tensor([trace.prompt]))
    assert len(views) == len(still.log_beta) == 4
    for layer, view in views.items():
        held = view.columns["log_beta"]
        torch.testing.assert_close(still.log_beta[layer].gather(-1, view.positions), held, rtol=1e-3, atol=1e-5)
    held = views[0].columns["log_beta"]
    torch.testing.assert_close(student.log_beta[0].gather(-1, views[0].positions), held, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(student.log_beta[3], still.log_beta[3], rtol=1e-3)


@pytest.mark.parametrize("recipe", BOTH)
def test_training_improves_eviction(loaded, traces, recipe, tmp_path: Path):
    weights = {name: p.clone() for name, p in loaded.model.named_parameters()}
    made = recipe(loaded, settings(recipe, width=16), *traces)
    done = train(made, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    assert done.improved(made)
    assert done.after["capacity"] < 0.9 * done.before["capacity"]
    assert all(torch.equal(weights[name], p) for name, p in loaded.model.named_parameters())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gate": "rg7"}, "--opt gate must be one of rg, rg2, rg3, rg10; got 'rg7'."),
        ({"tie": "heads"}, "--opt tie must be one of none, layers, layers_and_heads; got 'heads'."),
        ({"form": "x"}, "--opt form must be weight or scale; got 'x'."),
        ({"hinge": "x"}, "--opt hinge must be released or paper; got 'x'."),
        ({"budget": 0}, "--opt budget must be 1 or more; got 0."),
        ({"capacity": -1.0}, "--opt capacity must be 0 or more; got -1."),
    ],
)
def test_mistakes(random_model, option, message):
    with pytest.raises(UserError) as error:
        TrimKVRecipe(random_model, settings(TrimKVRecipe, **option), drawn(), drawn())
    assert str(error.value) == message


@pytest.mark.parametrize("recipe", BOTH)
def test_the_command(tmp_path: Path, capsys, recipe, monkeypatch):
    change(monkeypatch, recipe.name, held_out=3)
    command = ["train", recipe.name, "--out", str(tmp_path), "--samples", "3", "--steps", "2", "--batch", "2"]
    assert main([*command, "--opt", "width=4", "--opt", "form=scale", "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["made"]["settings"]["more"]["form"] == "scale"
    assert document["shapes"]["in.weight"] == [4, 4, 128]
    assert {"kl", "soft_kl", "capacity"} == set(document["made"]["held_out_after"])
    assert str(tmp_path) not in json.dumps(document["made"])
    method = ["run", "--method", recipe.name, "--method-opt", f"{recipe.name}.gates={document['path']}"]
    run = [*method, "--budget", "48", "--task", "lookup", "--limit", "1", "--out", str(tmp_path / "r"), "-q"]
    assert main(run) == 0


@pytest.mark.parametrize("name", ["trimkv", "retention"])
def test_shipped_gates_are_found_and_beat_what_knows_nothing(loaded, traces, name):
    made = json.loads((tiny.path() / f"{name}.json").read_text())["made"]
    assert made["held_out_after"]["kl"] < 0.5 * made["held_out_before"]["kl"]
    assert (tiny.path() / f"{name}.safetensors").stat().st_size < 2**21
    chosen = [Chosen(method=MethodChoice(name=method), budget=48) for method in (name, "random", "gkv")]
    given = [trace.forced() for trace in traces[1]]
    rows = replay(loaded, "held out", given, chosen, interval=32, max_tokens=400).rows
    kl = {row["method"]: row["kl"] for row in rows}
    assert kl[name] < 0.5 * min(kl["random"], kl["gkv"])
