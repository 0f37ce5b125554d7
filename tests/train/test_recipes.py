"""From a recipe's name to its data: what is held out, and what is said where there is nothing to learn."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from support.recipes import change, options_of

from kvbench import tiny
from kvbench.engine.model.load import load
from kvbench.errors import KVBenchError, UserError
from kvbench.sources import models
from kvbench.train import prepare as recipes
from kvbench.train import traces
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.processes import Processes
from kvbench.train.recipe import Recipe

ASKED = [{"question": f"# Facts: cod 3{i}, bow 46,\nAsk: cod?\nThink:"} for i in range(8)]
LONG = {"question": "cod 31, " * 60}


@pytest.fixture
def ready(tmp_path, monkeypatch):
    def prepare(name, rows, **own):
        entry = change(monkeypatch, name, held_out=2)
        data = tmp_path / "questions.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = options_of(entry) | {"max_tokens": 32} | own
        numbers = {"steps": 1, "lr": 1e-3, "batch": 1, "seed": 0, "options": options, "device": "cpu", "out": tmp_path}
        return recipes.prepare(name, str(tiny.path()), data=str(data), samples=4, **numbers)

    return prepare


@pytest.fixture
def prepared(ready):
    return lambda *given, **own: ready(*given, **own).recipe


def test_the_first_questions_are_held_out(prepared):
    recipe = prepared("lookaheadkv", ASKED)
    assert [t.name for t in recipe.test] == ["line-1", "line-2"]
    assert [t.name for t in recipe.traces] == ["line-3", "line-4", "line-5", "line-6"]


@pytest.mark.parametrize("name", ["lookaheadkv", "trimkv", "foresightkv"])
def test_nothing_right_is_nothing_to_learn(prepared, name):
    with pytest.raises(
        UserError,
        match=r"no answer to the 4 training questions is usable\. Dropped answers.*: 6 wrong\. "
        r"See the answers in '.*answers\.jsonl'",
    ):
        prepared(name, [row | {"answer": "seven"} for row in ASKED])


def test_dropped_answers_are_told(ready):
    rows = [row | ({"answer": "seven"} if i in (2, 3) else {}) for i, row in enumerate(ASKED)]
    made = ready("lookaheadkv", rows)
    assert (len(made.recipe.traces), len(made.recipe.test)) == (2, 2)
    assert made.notes == ["4 of 6 answers are used; dropped: 2 wrong."]


def test_rows_that_make_no_question_are_told(ready):
    rows = [LONG, ASKED[0], {"text": "7"}, *ASKED[1:]]
    made = ready("lookaheadkv", rows, max_prompt=60, answers="data")
    assert [t.name for t in made.recipe.test] == ["line-2", "line-4"]
    assert made.notes == [
        "left out: 2 rows of --data (1 with a prompt of more than 60 tokens, 1 with an empty prompt or answer)."
    ]


def test_a_batch_that_processes_cannot_share_is_refused_before_anything_is_asked(ready, monkeypatch):
    monkeypatch.setattr(recipes, "joined", lambda: nullcontext(Processes(4, 0)))
    monkeypatch.setattr(recipes, "load", lambda *args, **more: pytest.fail("the model was loaded"))
    with pytest.raises(UserError, match="a batch of 1 cannot be shared equally by 4 processes"):
        ready("trimkv", ASKED)


def test_a_training_knows_the_type_of_its_numbers(ready):
    made = ready("lookaheadkv", ASKED)
    assert made.recipe.settings.more["dtype"] == "float32"
    assert made.notes == []


@pytest.mark.parametrize("name", ["gkv-distill", "gkv-rl"])
def test_what_is_right_must_be_known_before_anything_is_asked(prepared, name, monkeypatch):
    monkeypatch.setattr(recipes, "collect", lambda *args, **more: pytest.fail("the model was asked"))
    with pytest.raises(UserError, match="this recipe needs right answers; no usable row of --data has one in a column"):
        prepared(name, ASKED)


@pytest.mark.parametrize(
    ("name", "own", "message"),
    [
        ("lookaheadkv", {"rank": 0}, "--opt rank must be 1 or more; got 0"),
        ("retention", {"budget": -4}, "--opt budget must be 1 or more; got -4"),
        ("foresightkv", {"margin": 0.0}, "--opt margin must be above 0"),
        ("foresightkv-grpo", {"group": 1}, "--opt group must be 2 or more"),
        ("foresightkv-grpo", {"init": "nowhere"}, "nowhere.* does not exist"),
        ("trimkv", {"top_p": 0.0}, "--opt top_p must be above 0 and at most 1; got 0.0"),
        ("trimkv", {"temperature": -1.0}, "--opt temperature must be 0 or more; got -1.0"),
        ("trimkv", {"min_tokens": 33}, "--opt min_tokens 33 is above max_tokens 32, so every answer would be dropped"),
        ("trimkv", {"unfinished": "maybe"}, "--opt unfinished must be keep or drop; got 'maybe'"),
        ("gkv-distill", {"kl_temperature": 0.0}, "--opt kl_temperature must be above 0; got 0"),
        ("gkv-distill", {"recompute": "maybe"}, "--opt recompute must be one of auto, on, off"),
    ],
)
def test_settings_are_checked_before_anything_is_asked(prepared, name, own, message, monkeypatch):
    monkeypatch.setattr(recipes, "collect", lambda *args, **more: pytest.fail("the model was asked"))
    with pytest.raises(KVBenchError, match=message):
        prepared(name, [row | {"answer": "7"} for row in ASKED], **own)


def test_a_model_without_an_end_token_answers_nothing(prepared, monkeypatch):
    monkeypatch.setattr(recipes, "load", lambda *args, **more: replace(load(*args, **more), stop_ids=frozenset()))
    with pytest.raises(UserError, match="has no end token, so its answers would never end"):
        prepared("trimkv", ASKED)


def test_too_few_questions(prepared):
    with pytest.raises(UserError, match=r"2 to hold out \(needed: 2\), 0 to train on \(needed: 1 or more\)"):
        prepared("trimkv", ASKED[:2])
    with pytest.raises(UserError, match=r"; left out: 1 row of --data \(1 with a prompt of more than 60 tokens\)\."):
        prepared("trimkv", [*ASKED[:2], LONG], max_prompt=60)


ASKING = [name for name, entry in BUILT_IN.items() if entry.learns_from != "examples"]
DEFAULTS = dict.fromkeys(ASKING, 4096) | {"lookaheadkv": 512}


class Given(Recipe):
    """Keeps what it is given."""

    def __init__(self, loaded, settings, given, test):
        super().__init__(settings)
        self.loaded, self.given, self.test = loaded, given, test

    parameters = loss = held_out = None


@pytest.fixture
def given(monkeypatch):
    """Any recipe's data, whatever it would make of them, by a judge who finds everything right."""
    monkeypatch.setattr(traces, "judge", lambda *known: lambda text: True)
    for name in BUILT_IN:
        change(monkeypatch, name, location=f"{__name__}:Given")


def most_tokens(item):
    return item.max_new_tokens if isinstance(item, traces.Question) else len(item.answer)


@pytest.mark.parametrize("name", ASKING)
def test_max_tokens_is_the_same_option_everywhere(name, given, prepared):
    assert BUILT_IN[name].defaults()["max_tokens"] == DEFAULTS[name]
    recipe = prepared(name, [row | {"answer": "1"} for row in ASKED], max_tokens=2)
    assert {most_tokens(item) for item in (*recipe.given, *recipe.test)} == {2}  # of three
    with pytest.raises(UserError, match="--opt max_tokens must be 1 or more; got 0"):
        prepared(name, ASKED, max_tokens=0)


def test_rows_without_a_right_answer_are_told(given, ready):
    rows = [ASKED[0], *(row | {"answer": "1"} for row in ASKED[1:])]
    assert ready("gkv-rl", rows).notes == ["left out: 1 row of --data (1 without a right answer)."]


def test_answers_serve_a_recipe_that_asks_the_same(given, prepared, monkeypatch):
    first = prepared("trimkv", ASKED)
    monkeypatch.setattr(traces, "Engine", lambda *args, **more: pytest.fail("the model was asked"))
    again = prepared("retention", ASKED)
    assert (again.given, again.test) == (first.given, first.test)
    with pytest.raises(UserError, match="holds answers of another training: other questions"):
        prepared("foresightkv-grpo", ASKED[1:])


@pytest.mark.parametrize("name", ["trimkv", "gkv-rl"])
def test_an_answer_ends_where_the_context_does(name, given, prepared, monkeypatch):
    """Not refused, as the engine would a prompt that leaves less room than is asked for."""
    longest = max(len(item.ids) for item in prepared("gkv-rl", [row | {"answer": "1"} for row in ASKED]).test)
    load = recipes.load
    monkeypatch.setattr(recipes, "load", lambda *args, **how: replace(load(*args, **how), context=longest + 2))
    rows = [*ASKED[:4], {"question": "Ask: cod? " * 100}]
    recipe = prepared(name, [row | {"answer": "1"} for row in rows])
    items = (*recipe.test, *recipe.given)
    assert [item.name for item in items] == ["line-1", "line-2", "line-3", "line-4"]  # the last one has no room
    assert {most_tokens(item) for item in items} == {2}


@pytest.mark.parametrize("name", ASKING)
def test_a_model_that_is_trained_is_loaded_without_rounding(name, given, prepared, monkeypatch):
    load, asked = recipes.load, []
    monkeypatch.setattr(recipes, "load", lambda *args, **how: asked.append(how["dtype"]) or load(*args, **how))
    prepared(name, [row | {"answer": "1"} for row in ASKED])
    assert asked == ["float32" if name.startswith("gkv") else "auto"]


def test_the_revision_of_a_model_that_loading_fetches(given, ready, monkeypatch):
    """It is unknown before, and a training that goes on must find the one it began with."""
    load, describe, fetched = recipes.load, models.describe, []
    known = describe(str(tiny.path()))

    def fetch(where, **how):
        fetched.append(where)
        return load(str(tiny.path()), **how)

    monkeypatch.setattr(models, "describe", lambda name: known if fetched else replace(known, name=name, folder=None))
    monkeypatch.setattr(recipes, "load", fetch)
    assert ready("lookaheadkv", ASKED).revision == models.revision(known) is not None
