"""``kvbench replay`` as a user runs it, with the built-in model."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.commands import Command, Tell
from support.hostile_run import edit

from kvbench import tiny
from kvbench.replay.parts import Parts

SMALL = "--task walk/orbit-100 --limit 3 --interval 16"
SESSION = {
    "all": f"replay --model tiny --method all --budget 32 {SMALL} --out found --json",
    "again": f"replay --model tiny --method all --budget 32 {SMALL} -q --json",
    "options": f"replay --method gkv,full --method-opt gkv.window=8 --budget 48 {SMALL} -q --json",
    "run": "run --method full,gkv --budget 32 --task walk/orbit-100,lookup --limit 3 --interval 16 --run-name r1 -q",
    "stored": "replay --run r1 --task walk/orbit-100 --method gkv --budget 32 -q --json",
    "part": "replay --run results/r1 --method gkv --budget 32 --limit 1 -q --json",
    "empty": "replay --run r2 --method gkv --budget 32",
    "run without": "run --method gkv --budget 32 --task walk/orbit-100 --limit 1 --interval 16 --run-name r2 -q",
    "without": "replay --run r2 --method gkv --budget 32",
    "turns": "replay --plugin turns.py --task turns --analysis retention-ratio --method gkv --budget 32 --json",
}
TURNS = """
from kvbench.registry import tasks
from kvbench.task import Doc, GenSpec, Score, Task, Turn


class Turns(Task):
    suite = summary = "own"
    cheap_score = True

    def docs(self, source, *, style="default", limit=None):
        counts = {"turns": (1, 1, 1, 2, 3), "talk": (2, 2)}[self.name]
        turn = Turn(question="fact 1 " * 20)
        return [Doc(doc_id=str(i), turns=(turn,) * n, reference=1) for i, n in enumerate(counts)]

    def gen(self, model_type):
        return GenSpec(max_new_tokens=12, chat=False)

    def score(self, doc, output):
        return Score(value=[1.0, None][int(doc.doc_id)])  # fails for question 2


for name in ("turns", "talk"):
    tasks.register(name)(type(name, (Turns,), {}))
"""
REFUSED = {
    "turns only": (
        "replay --plugin turns.py --task talk --method gkv --budget 32",
        "every question of task 'talk' has several turns, and replay reads only questions with one turn. Choose",
    ),
    "no method": ("replay --budget 32 --task walk", "--method is missing. Give a method name, or all;"),
    "no budget": ("replay --method all --task walk", "--budget is missing."),
    "no task": ("replay --method gkv --budget 32", "--task is missing."),
    "unknown": ("replay --method gvk --budget 32 --task walk", "unknown method 'gvk'. Did you mean 'gkv'"),
    "limit": ("replay --method gkv --budget 32 --task walk --limit 0", "--limit must be 1 or more; got 0."),
    "small": ("replay --method snapkv --budget 32 --task walk --limit 1", "--budget must be at least 33; got 32."),
    "context": ("replay --method gkv --budget 99999 --task walk", "is above the model's context"),
    "seed": ("replay --run r1 --seed 3 --method gkv --budget 32", "--seed cannot be given with --run"),
    "task": ("replay --run r1 --task chain --method gkv --budget 32", "run 'r1' has no task 'chain'. It has walk/"),
    "oracle": ("run --method golden --budget 32 --task walk", "method 'golden' is an oracle"),
    "pair": ("run --method snapkv+golden --budget 64 --task walk", "'kvbench replay --method snapkv+golden', where"),
    "bench": ("bench --method golden", "method 'golden' is an oracle"),
    "chunked": ("replay --budget 32 --task walk", "prefill is chunked, but kvbench can read answers again only with"),
}
VARIABLES = {"chunked": {"KVBENCH_METHOD": "all", "KVBENCH_PREFILL": "chunked"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replays")


@pytest.fixture(scope="module")
def session(folder: Path, calls: Callable) -> dict:
    (folder / "turns.py").write_text(TURNS)
    lines = SESSION | {case: line for case, (line, _) in REFUSED.items()} | {"list": "list methods --json"}
    return dict(zip(lines, calls(folder, [(line.split(), VARIABLES.get(case, {})) for case, line in lines.items()])))


def document(result) -> dict:
    assert result.code == 0, result.err
    return json.loads(result.out.splitlines()[-1])


def by_method(result) -> dict:
    return {row["method"]: row for row in document(result)["rows"]}


def test_every_method_that_can_run_is_in_the_table(session):
    found = document(session["all"])
    names, left_out = {row["method"] for row in found["rows"]}, {left["method"] for left in found["left_out"]}
    listed = {entry["name"] for entry in json.loads(session["list"].out)}
    assert names | left_out == listed
    assert {"golden", "random", "full", "h2o", "gkv", "kvzip"} <= names
    assert {"snapkv", "speckv"} <= left_out
    assert all(left["reason"] for left in found["left_out"])
    assert "left out: snapkv: method 'snapkv' keeps 32 window tokens" in session["all"].err


def test_rows_are_sorted_by_loss_ratio(session):
    rows = document(session["all"])["rows"]
    assert rows[0]["method"] == "full"
    assert rows[0]["budget"] is None
    ratios = [row["loss_ratio"] for row in rows[1:]]
    assert ratios == sorted(ratios)
    assert all(row["task"] == "walk/orbit-100" and row["budget"] == 32 for row in rows[1:])


def test_the_oracle_is_far_below_random(session):
    rows = by_method(session["all"])
    assert rows["golden"]["loss"] < 0.2 * rows["random"]["loss"]
    assert rows["golden"]["oracle"]
    kinds = {entry["name"]: entry["kind"] for entry in json.loads(session["list"].out)}
    assert kinds["golden"] == "oracle"


def test_the_same_command_gives_the_same_rows(session):
    assert document(session["again"])["rows"] == document(session["all"])["rows"]
    assert len(session["again"].out.splitlines()) == 1  # --quiet leaves the document alone


def test_tables_for_people(session):
    text = session["all"].out
    assert "walk/orbit-100: 3 answers" in text
    (head,) = [line for line in text.splitlines() if "loss ratio" in line and line.startswith("method")]
    assert head.split()[:4] == ["method", "budget", "loss", "+"]  # the ratio, which may be huge, comes later
    assert max(len(line.rstrip()) for line in text.splitlines() if not line.startswith("{")) <= 100
    assert "kvzip *" in text  # it keeps what is generated


def test_files(session, folder):
    rows = document(session["all"])["rows"]
    table = pd.read_csv(folder / "found" / "replay.csv")
    assert table["method"].tolist() == [row["method"] for row in rows]
    assert table["loss_ratio"].tolist() == pytest.approx([row["loss_ratio"] for row in rows])
    kept = json.loads((folder / "found" / "replay.json").read_text())
    assert kept == document(session["all"])
    assert kept["settings"]["interval"] == 16
    traces, heads = (pd.read_parquet(folder / "found" / f"{name}.parquet") for name in ("traces", "heads"))
    assert len(traces) == 3 * len(rows)
    assert len(heads) == 4 * 4 * len(rows)


def test_options_and_yardsticks(session):
    assert set(by_method(session["options"])) == {"full", "gkv(window=8)", "golden", "random"}


def test_answers_of_a_run_are_those_made_here(session):
    """The built-in model answers greedily, so its stored texts are its own answers but for the end token."""
    fresh, stored = by_method(session["all"]), by_method(session["stored"])
    assert stored["gkv"]["traces"] == 3
    assert stored["gkv"]["tokens"] == fresh["gkv"]["tokens"] - 3
    assert stored["gkv"]["loss"] == pytest.approx(fresh["gkv"]["loss"], rel=0.05)
    part = document(session["part"])
    assert {row["task"] for row in part["rows"]} == {"walk/orbit-100", "lookup"}
    assert {row["traces"] for row in part["rows"]} == {1}


def test_a_run_without_answers_of_the_full_cache(session):
    assert session["without"].code == 2
    assert "run 'results/r2' has no answers with the full cache to 'walk/orbit-100'" in session["without"].err
    assert session["empty"].code == 2
    assert "r2" in session["empty"].err


def test_questions_with_several_turns_and_answers_without_a_score_are_left_out(session):
    [row] = [r for r in document(session["turns"])["analyses"]["retention-ratio"] if r["method"] == "gkv"]
    assert (row["answers"], row["right"]) == (1, 1)
    notices = session["turns"].err
    assert "task 'turns': 2 of 5 questions have no answer to replay (too long, several turns, or failed)." in notices
    assert "task 'turns': 2 of 3 answers have no score and count neither as right nor as wrong: grader_error (1), " in (
        notices
    )
    assert "IndexError" in notices


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(session, case):
    found = session[case]
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert found.code == 2
    assert len(errors) == 1
    assert REFUSED[case][1] in errors[0]
    assert found.out == ""


def test_a_killed_replay_continues_and_writes_the_same_tables(folder):
    """It is killed after the answers and two of its batches; batches that were finished are not read again."""
    line = "replay --method gkv,kvzip --budget 32 --task walk/orbit-100,chain --limit 4 --interval 16 -q --out "

    def watched(most: int | None) -> Callable[[Tell], None]:
        def before(tell: Tell) -> None:
            write, count = Parts.write, itertools.count(1)

            def writing(*arguments: Any) -> None:
                write(*arguments)
                tell("written")
                if next(count) == most:
                    os.kill(os.getpid(), signal.SIGKILL)

            Parts.write = writing

        return before

    whole, killed = (Command(line + name, cwd=folder, before=watched(n)) for name, n in (("whole", None), ("part", 3)))
    every = len(list(whole.events()))
    assert (whole.end().code, killed.end().code) == (0, -signal.SIGKILL)
    assert len(list((folder / "part" / "unfinished").iterdir())) == 3
    again = Command(line + "part", cwd=folder, before=watched(None))
    assert len(list(again.events())) == every - 3
    assert again.end().code == 0
    names = ["heads.parquet", "replay.csv", "traces.parquet"]
    assert sorted(p.name for p in (folder / "part").iterdir()) == sorted([*names, "replay.json"])
    for name in names:
        assert (folder / "part" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_answers_of_another_model_or_other_data_are_not_read(folder, calls):
    """A run's weights and data that changed since are refused, as `run --resume` refuses them."""
    shutil.copytree(tiny.path(), folder / "m", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run = "run --model ./m --method full --task walk/orbit-100 --limit 1 --max-new-tokens 8 --run-name r3 -q"
    replay = "replay --run r3 --method knorm --budget 16 --interval 8 -q"
    made, same = calls(folder, [(run.split(), {}), (replay.split(), {})])
    assert (made.code, same.code) == (0, 0), made.err + same.err
    shutil.copytree(folder / "results" / "r3", folder / "results" / "r4")
    edit(
        folder / "results" / "r4", lambda r: r["environment"]["tasks"]["walk/orbit-100"]["data"].update(sha256="0" * 64)
    )
    (other,) = calls(folder, [(replay.replace("r3", "r4").split(), {})])
    assert other.code == 2
    assert "the data of task 'walk/orbit-100' changed since run 'r4' began" in other.err
    weights = folder / "m" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (changed,) = calls(folder, [(replay.split(), {})])
    assert changed.code == 2
    assert f"{weights.name} of model './m' changed since run 'r3' began" in changed.err
