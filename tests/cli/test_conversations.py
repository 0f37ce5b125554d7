"""Runs of a task with two turns: rows, stored answers, scoring them again, failures."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from kvbench.cli.app import main
from kvbench.config.plugins import load_plugin
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.runner.execute import execute
from kvbench.store import read_run
from kvbench.store.reading import read_texts

PLUGIN = """
from kvbench.registry import tasks
from kvbench.task import Doc, GenSpec, Score, Task, Turn


@tasks.register("two-turns")
class TwoTurns(Task):
    suite, summary = "own", "two questions in one conversation"

    def docs(self, source, *, style="default", limit=None):
        first = [Turn(question=f"fact {n} " * 20) for n in range(6)]
        warm = {"temperature": 1.0}  # half of the questions are sampled
        return [
            Doc(doc_id=f"q{n}", turns=(turn, Turn(question="and then")), reference=n, gen=warm if n % 2 else {})
            for n, turn in enumerate(first)
        ][:limit]

    def gen(self, model_type):
        return GenSpec(max_new_tokens=40)

    def score(self, doc, output):
        return Score(value=len(output.turns) / 2, aux={"first": float(len(output.turns[0]))})
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("plugin") / "two_turns.py"
    file.write_text(PLUGIN)
    load_plugin(str(file))
    return str(file)


def config(plugin: str, **settings: object) -> RunConfig:
    grid = Grid(methods=(MethodChoice(name="full"), MethodChoice(name="gkv")), budgets=(48,), tasks=("two-turns",))
    return RunConfig(grids=(grid,), interval=16, limit=6, plugin=(plugin,), **settings)


def test_rows_of_a_conversation(plugin, tmp_path: Path):
    folder = execute(config(plugin), out=tmp_path, run_name="r1").run_dir
    rows = read_run(folder).rows
    assert set(rows["status"]) == {"ok"}
    assert set(rows["multi_turn_cache"]) == {"keep"}
    assert set(rows["score"]) == {1.0}
    assert dict(rows.groupby("doc_id")["temperature"].first()) == {f"q{n}": float(n % 2) for n in range(6)}
    evicted = rows[rows["method"] == "gkv"]
    assert (evicted["entries_after_evict"] <= 48).all()
    assert (evicted["entries_peak"] <= 48 + 16).all()
    turns = [json.loads(text) for text in read_texts(folder)["turns"]]
    assert all(len(t) == 2 for t in turns)
    assert [t[-1] for t in turns] == read_texts(folder)["output"].tolist()
    assert json.loads(rows["aux"][0])["first"] == len(turns[0][0])


def test_stored_turns_are_scored_as_the_new_ones_were(plugin, tmp_path: Path, capsys):
    folder = execute(config(plugin), out=tmp_path, run_name="r1").run_dir
    before = read_run(folder).rows
    assert main(["score", str(folder), "--all", "-q", "--plugin", str(plugin)]) == 0
    after = read_run(folder).rows
    assert list(after["score"]) == list(before["score"])
    assert list(after["aux"]) == list(before["aux"])


def test_a_reset_conversation_is_another_row_and_reads_its_answers_anew(plugin, tmp_path: Path):
    kept = read_run(execute(config(plugin), out=tmp_path, run_name="keep").run_dir).rows
    reset = read_run(execute(config(plugin, multi_turn="reset"), out=tmp_path, run_name="reset").run_dir).rows
    assert set(reset["multi_turn_cache"]) == {"reset"}
    assert not set(kept["row_key"]) & set(reset["row_key"])
    full = kept["method"] == "full"
    # With nothing evicted both read the same text, up to how the answer is cut into tokens.
    same = kept[full]["output_sha256"].to_numpy() == reset[reset["method"] == "full"]["output_sha256"].to_numpy()
    assert same[::2].mean() >= 0.5


def test_show_names_the_missing_plugin_and_takes_it(kvbench, plugin, tmp_path: Path):
    execute(config(plugin), out=tmp_path, run_name="r1")
    words = ("show", "r1", "--out", str(tmp_path), "--sample", "q0", "--method", "full")
    page = tmp_path / "page.html"
    cause = "a plug-in of the run ('two_turns.py'), which must be given with --plugin"
    assert f"-- question 2\n(not stored in the run, and the task comes from {cause})\n" in kvbench(*words).out
    assert kvbench(*words, "--html", str(page)).code == 0
    assert f"The task comes from {cause}: later turns" in html.unescape(page.read_text())
    assert "-- question 2\nand then\n-- output 2\n" in kvbench(*words, "--plugin", plugin).out
    other = tmp_path / "other.py"
    other.write_text(PLUGIN + "# changed")
    assert "is none of the plug-ins that run 'r1' began with" in kvbench(*words, "--plugin", str(other)).err
