"""Training of lookaheadkv: its target is the model's own attention, its guess what the engine sees, and it learns."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from kvbench.methods.lookaheadkv import LookaheadKV
from support.models import VOCABULARY, Words, build
from support.zoo import configuration

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load, prepare
from kvbench.engine.model.random_weights import shapes_of
from kvbench.engine.model.weights import Base
from kvbench.errors import UserError
from kvbench.records import Request
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.train.collection import Collection
from kvbench.train.data_file import read_questions
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.lookaheadkv import LookaheadRecipe
from kvbench.train.traces import Trace, built_in, collect

SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
MORE = {"rows": 4, "rank": 2, "alpha": 8.0, "budget": 32}
SETTINGS = Settings(steps=12, lr=5e-3, warmup=2, batch=4, more=MORE)
WITHOUT_ADAPTER = dataclasses.replace(SETTINGS, more=MORE | {"places": "none"})


@pytest.fixture(scope="module")
def loaded():
    return load(str(tiny.path()), device="cpu")


@pytest.fixture(scope="module")
def traces(loaded):
    return collect(loaded, built_in(("lookup", "chain"), 8, 0, loaded)), collect(
        loaded, built_in(("lookup",), 2, 0, loaded, held_out=True)
    )


def test_traces_are_right_answers_to_problems_that_no_evaluation_asks(loaded, traces):
    train_on, held_out = traces
    assert len(train_on) >= 6
    numbers = [int(t.name.rpartition("-")[2]) for t in train_on]
    assert max(numbers) < HELD_OUT
    assert len(set(numbers)) == len(numbers)
    assert [int(t.name.rpartition("-")[2]) >= HELD_OUT for t in held_out] == [True] * len(held_out)
    for trace in train_on:
        assert trace.answer[-1] in loaded.stop_ids
    assert collect(loaded, built_in(("lookup", "chain"), 8, 0, loaded)) == train_on  # the seed says it all


def test_only_right_answers_are_kept(loaded):
    questions = [dataclasses.replace(q, judge=lambda text: False) for q in built_in(("lookup",), 3, 0, loaded)]
    assert collect(loaded, questions) == []
    assert len(collect(loaded, questions, Collection(wrong="keep"))) == 3


def test_tokens_before_a_broken_logit_are_no_answer(loaded, monkeypatch):
    class Broken(Engine):
        def generate(self, requests):
            yield from (dataclasses.replace(done, status="nan_logits") for done in super().generate(requests))

    monkeypatch.setattr("kvbench.train.traces.Engine", Broken)
    dropped = []
    questions = built_in(("lookup",), 3, 0, loaded)
    assert collect(loaded, questions, Collection(wrong="keep"), on_drop=dropped.append) == []
    assert dropped == ["failed"] * 3


SHORT = [Trace(name="a", prompt=tuple(range(2, 42)), answer=(5, 9, 7))]


def test_windows_as_long_as_every_text_hide_nothing():
    wide = LookaheadRecipe(build("mistral-wide"), SETTINGS, SHORT, SHORT)
    assert set(wide.held_out()) == {"loss", "hit"}
    assert len(wide.evicted) == len(wide.loaded.geometry)


def test_windows_in_every_layer_leave_nothing_to_evict():
    narrow = build("mistral-wide")
    geometry = [dataclasses.replace(layer, window=8) for layer in narrow.geometry]
    with pytest.raises(
        UserError,
        match=r"every layer of the model has a sliding .* Give shorter texts or questions, until .* 43 tokens",
    ):
        LookaheadRecipe(dataclasses.replace(narrow, geometry=geometry), SETTINGS, SHORT, SHORT)


def test_the_target_is_the_models_own_attention(loaded, traces):
    trace = traces[0][0]
    recipe = LookaheadRecipe(loaded, SETTINGS, *traces)
    with torch.no_grad():
        target, _ = recipe._shares(trace)
    model, before = loaded.model, loaded.model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(torch.tensor([trace.ids]), output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    n = len(trace.prompt)
    wanted = torch.stack([a[0, :, n:, :n].mean(dim=1) for a in out.attentions])
    torch.testing.assert_close(target, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("places", "names"), [("q_proj, v_proj", {"q_proj", "v_proj"}), ("none", set()), ("all", SEVEN)]
)
def test_an_adapter_has_its_places(loaded, traces, tmp_path: Path, places, names):
    settings = dataclasses.replace(SETTINGS, steps=1, more=MORE | {"places": places})
    recipe = LookaheadRecipe(loaded, settings, *traces)
    assert {name.rpartition(".")[2] for name in recipe.parameters()} - {"embeddings"} == names
    assert len(recipe.parameters()) == 1 + 2 * 4 * len(names)
    done = train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    method = LookaheadKV(lookahead=str(done.path))
    engine = Engine(loaded, method, budget=40, interval=128, slots=1, max_tokens=300)
    request = Request(task="t", doc_id="d", prompt_ids=traces[0][0].prompt, max_new_tokens=4)
    assert [answer.status for answer in engine.generate([request])] == ["ok"]


def test_an_unknown_place_is_refused(loaded):
    with pytest.raises(UserError, match=r"--opt places must be all, none, or names from q_proj, .*; got 'qproj'"):
        LookaheadRecipe.check(loaded, MORE | {"places": "qproj"})
    with pytest.raises(UserError, match=r"names from o_proj, qkv_proj, gate_up_proj, down_proj; got 'q_proj'"):
        LookaheadRecipe.check(build("phi3"), MORE | {"places": "o_proj,q_proj"})


def small_model(kind, **changes):
    torch.manual_seed(0)
    return prepare(transformers.AutoModelForCausalLM.from_config(configuration(kind, changes)).eval(), Words())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("opt", {"k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"}),
        ("gpt_neox", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
        ("phimoe", {"q_proj", "k_proj", "v_proj", "o_proj"}),  # not its routers, of a subclass of nn.Linear
    ],
)
def test_all_places_are_all_linear_layers_of_the_decoder(kind, names, tmp_path: Path):
    """OPT's embeddings are narrower than its hidden states."""
    loaded = small_model(kind, **({"word_embed_proj_dim": 32} if kind == "opt" else {}))
    recipe = LookaheadRecipe(loaded, dataclasses.replace(SETTINGS, steps=1), SHORT, SHORT)
    assert {name.rpartition(".")[2] for name in recipe.parameters()} - {"embeddings"} == names
    done = train(recipe, tmp_path, base=Base(name="m", config=loaded.model.config))
    engine = Engine(loaded, LookaheadKV(lookahead=str(done.path)), budget=8, interval=8, slots=1, max_tokens=60)
    request = Request(task="t", doc_id="d", prompt_ids=SHORT[0].prompt, max_new_tokens=4)
    assert [answer.status for answer in engine.generate([request])] == ["ok"]


def test_random_weights_have_the_size_of_the_embeddings():
    loaded = small_model("opt", word_embed_proj_dim=32)
    assert shapes_of(LookaheadKV().weights(), loaded.model)["embeddings"][1] == 32


def test_a_model_without_linear_layers_takes_no_adapter():
    """GPT-2's are of a class of its own."""
    loaded = small_model("gpt2")
    with pytest.raises(UserError, match="'GPT2LMHeadModel' has no linear layers in its decoder; use --opt places=none"):
        LookaheadRecipe.check(loaded, MORE)
    assert set(LookaheadRecipe(loaded, WITHOUT_ADAPTER, SHORT, SHORT).parameters()) == {"embeddings"}


def test_learned_tokens_begin_as_the_model_reads_tokens():
    """Gemma's embeddings are rows of the table times the root of the hidden size."""
    loaded = build("gemma2")
    begun = LookaheadRecipe(loaded, WITHOUT_ADAPTER, SHORT, SHORT).parameters()["embeddings"].detach()
    with torch.no_grad():
        every = loaded.model.get_input_embeddings()(torch.arange(VOCABULARY))
    assert bool((torch.cdist(begun, every).amin(dim=1) < 1e-3).all())


def test_prompts_without_positions_for_the_learned_tokens_are_left_out():
    loaded = small_model("opt", max_position_embeddings=64, word_embed_proj_dim=64)
    long = Trace(name="b", prompt=tuple(range(2, 63)), answer=(5, 9))
    recipe = LookaheadRecipe(loaded, SETTINGS, [*SHORT, long], SHORT)
    assert recipe.traces == SHORT
    assert recipe.about_data() == [
        "left out: 1 answer whose prompt leaves no positions for 4 learned tokens; 1 train, 1 are held out."
    ]
    with pytest.raises(UserError, match=r"have more than 60 tokens, and this model has only 64 positions, 4 of them"):
        LookaheadRecipe(loaded, SETTINGS, [long], SHORT)


def test_the_guess_is_what_the_method_keeps(loaded, traces, tmp_path: Path):
    recipe = LookaheadRecipe(loaded, SETTINGS, *traces)
    done = train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    trace = traces[1][0]
    with torch.no_grad():
        _, guess = recipe._shares(trace)
    merged = guess.unflatten(1, (2, -1)).mean(dim=2)  # [L, Hk, T]
    events = []
    engine = Engine(
        loaded,
        LookaheadKV(lookahead=str(done.path)),
        budget=20,
        interval=32,
        slots=1,
        max_tokens=400,
        log=lambda *event: events.append(event),
    )
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=trace.prompt, max_new_tokens=4)]))
    kept = {layer: heads for _, seen, layer, heads in events if seen == len(trace.prompt)}
    for layer, heads in kept.items():
        for head, positions in enumerate(heads):
            assert sorted(map(int, positions)) == sorted(merged[layer, head].topk(20).indices.tolist())
    assert len(kept) == len(merged)


def test_training_improves_the_held_out_loss(loaded, traces, tmp_path: Path):
    recipe = LookaheadRecipe(loaded, SETTINGS, *traces)
    weights = {name: p.clone() for name, p in loaded.model.named_parameters()}
    done = train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    assert done.improved(recipe)
    assert done.after["loss"] < 0.8 * done.before["loss"]
    assert all(torch.equal(weights[name], p) for name, p in loaded.model.named_parameters())


def test_the_command(tmp_path: Path, capsys):
    command = ["train", "lookaheadkv", "--out", str(tmp_path), "--samples", "4", "--steps", "3", "--batch", "2"]
    assert main([*command, "--opt", "rows=3", "--opt", "rank=2", "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["made"]["settings"]["steps"] == 3
    assert document["made"]["settings"]["more"]["rows"] == 3
    assert document["shapes"]["embeddings"] == [3, 128]
    assert "--samples 4 --steps 3" in document["made"]["command"]
    assert str(tmp_path) not in json.dumps(document["made"])
    method = ["run", "--method", "lookaheadkv", "--method-opt", f"lookahead={document['path']}", "--budget", "48"]
    assert main([*method, "--task", "lookup", "--limit", "1", "--out", str(tmp_path / "r"), "-q"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--opt", "rwos=3"], "lookaheadkv has no setting 'rwos'. Did you mean 'rows'?"),
        (["--opt", "rows=x"], "--opt rows must be a whole number; got 'x'."),
        (["--opt", "rows"], "--opt takes NAME=VALUE; got 'rows'."),
        (["--opt", "alpha=nan"], "--opt alpha must be a finite number; got 'nan'."),
        (["--opt", "rank=-1"], "--opt rank must be 1 or more; got -1."),
        (["--opt", "rows=0"], "--opt rows must be 1 or more; got 0."),
        (["--lr", "0"], "--lr must be a finite number > 0; got 0."),
        (["--data", "/nowhere.jsonl"], "--data '/nowhere.jsonl' does not exist."),
    ],
)
def test_mistakes(tmp_path: Path, capsys, arguments, message):
    assert main(["train", "lookaheadkv", "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert main(["train", "headkv", "--out", str(tmp_path), "--steps", "3"]) == 2
    assert "headkv is estimated, not trained; it takes no --steps." in capsys.readouterr().err


def test_questions_of_a_file(loaded, tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "one two"}\n{"prompt": "three"}\n')
    asked = list(read_questions(path, loaded, Collection(max_tokens=7)))
    assert [q.name for q in asked] == ["line-1", "line-2"]
    assert {q.max_new_tokens for q in asked} == {7}
