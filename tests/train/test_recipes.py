"""From a recipe's name to its data: what is held out, and what is said where there is nothing to learn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvbench import tiny
from kvbench.errors import UserError
from kvbench.train import recipes
from kvbench.train.catalogue import RECIPES

ASKED = [{"question": f"# Facts: cod 3{i}, bow 46,\nAsk: cod?\nThink:"} for i in range(8)]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    def prepare(name, rows):
        monkeypatch.setitem(RECIPES, name, entry := replace(RECIPES[name], held_out=2))
        data = tmp_path / "questions.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = dict(entry.options) | dict(entry.tiny)
        numbers = {"steps": 1, "lr": 1e-3, "batch": 1, "seed": 0, "options": options, "device": "cpu"}
        return recipes.prepare(name, str(tiny.path()), data=str(data), samples=4, **numbers).recipe

    return prepare


def test_the_first_questions_are_held_out(prepared):
    recipe = prepared("lookaheadkv", ASKED)
    assert [t.name for t in recipe.test] == ["line-1", "line-2"]
    assert [t.name for t in recipe.traces] == ["line-3", "line-4", "line-5", "line-6"]


@pytest.mark.parametrize("name", ["lookaheadkv", "trimkv", "foresightkv"])
def test_nothing_right_is_nothing_to_learn(prepared, name):
    with pytest.raises(
        UserError, match=r"none of the questions rightly; there is nothing to learn\. Without the field"
    ):
        prepared(name, [row | {"answer": "seven"} for row in ASKED])


@pytest.mark.parametrize("name", ["gkv-distill", "gkv-rl"])
def test_what_is_right_must_be_known_before_anything_is_asked(prepared, name, monkeypatch):
    monkeypatch.setattr(recipes, "collect", lambda *args, **more: pytest.fail("the model was asked"))
    with pytest.raises(UserError, match=f"{name} needs to know what is right"):
        prepared(name, ASKED)


def test_too_few_questions(prepared):
    with pytest.raises(UserError, match="--data has 2 questions that leave the model room to answer; more than 2 are"):
        prepared("trimkv", ASKED[:2])
