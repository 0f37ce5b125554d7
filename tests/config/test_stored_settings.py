"""Settings are stored as they were typed or refused; warnings with the words of others are shown without keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.store import read_rows

SECRET = {"MY_API_KEY": "Zx9-opaque-secret-77"}
PLUGIN = """
from dataclasses import dataclass
from kvbench.eviction.api import Method
from kvbench.registry import methods

@methods.register("normed")
@dataclass(frozen=True)
class Normed(Method):
    key_norm: str = "l2"
    def score(self, view):
        assert self.key_norm in ("l1", "linf"), self.key_norm
        return view.positions.float()

@methods.register("greedy")
@dataclass(frozen=True)
class Greedy(Method):
    def score(self, view):
        raise MemoryError("no room \\x1b[2J at api_key=hunter-22-x")
"""
RUN = "run --plugin mine.py --task walk/orbit-100 --budget 32 --interval 8 --limit 1 --max-new-tokens 24 --samples 1"
LINES = {
    "first": f"{RUN} --method normed --method-opt key_norm=l1 --run-name a -q",
    "again": "run --resume a --plugin mine.py -q",
    "other": f"{RUN} --method normed --method-opt key_norm=linf --run-name a -q",
    "greedy": f"{RUN} --method greedy --run-name g --slots 1",
    "secret": f"{RUN} --method normed --method-opt key_norm=l1 --run-name s --stop Zx9-opaque-secret-77",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    (path / "mine.py").write_text(PLUGIN)
    return path


@pytest.fixture(scope="module")
def outcomes(calls: Callable, folder: Path) -> dict:
    return dict(zip(LINES, calls(folder, [(line.split(), SECRET) for line in LINES.values()])))


def test_an_option_named_like_a_secret_is_stored(outcomes: dict, folder: Path) -> None:
    assert outcomes["first"].code == 0, outcomes["first"].err
    record = json.loads((folder / "results/a/run.json").read_text())
    assert record["config"]["grids"][0]["methods"] == [{"name": "normed", "options": {"key_norm": "l1"}}]
    assert [entry["method"] for entry in record["environment"]["methods"]] == ["normed(key_norm=l1)"]
    assert [json.loads(options)["key_norm"] for options in set(read_rows(folder / "results/a").options)] == ["l1"]
    assert outcomes["again"].code == 0, outcomes["again"].err


def test_another_value_of_it_is_another_setting(outcomes: dict) -> None:
    assert outcomes["other"].code == 2
    assert "normed(key_norm=l1)" in outcomes["other"].err
    assert "normed(key_norm=linf)" in outcomes["other"].err


def test_a_warning_with_a_plugin_s_words_is_clean(outcomes: dict) -> None:
    said = outcomes["greedy"].err
    assert "warning: " in said
    assert "no room \\x1b[2J at api_key=***" in said
    assert "\x1b[2J" not in said
    assert "hunter" not in said


def test_the_value_of_a_secret_variable_is_refused(outcomes: dict, folder: Path) -> None:
    assert outcomes["secret"].code == 2
    assert "--stop looks like a key" in outcomes["secret"].err
    assert SECRET["MY_API_KEY"] not in outcomes["secret"].err
    assert not (folder / "results/s").exists()
