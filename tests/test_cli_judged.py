"""mt_bench from the command line against a judge on this machine: keys refused, judged later, compared in pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.judges import KEY, say, send, serve

from kvbench.cli import main
from kvbench.store import read_run
from kvbench.store.reading import read_texts

__all__ = ["serve"]
RUN = [
    "run",
    "--method",
    "full,gkv",
    "--budget",
    "64",
    "--task",
    "mt_bench",
    "--limit",
    "2",
    "--max-new-tokens",
    "16",
    "-q",
]


@pytest.fixture
def judged(serve, tmp_path: Path):
    """judged(act, ...) gives the arguments that name the judge and the folder."""

    def arguments(*acts) -> list[str]:
        server = serve(*acts)
        return ["--judge", server.url, "--judge-model", "m", "--judge-key-env", "JUDGE_KEY", "--out", str(tmp_path)]

    return arguments


def test_b075_no_judge(capsys, tmp_path):
    assert main([*RUN, "--out", str(tmp_path)]) == 2
    assert "task 'mt_bench' needs a judge" in capsys.readouterr().err


def test_b077_a_refused_key_loses_no_answer_and_score_goes_on(judged, tmp_path, capsys):
    assert main([*RUN, *judged(send(401, json.dumps({"error": KEY}))), "--run-name", "r1"]) == 3
    error = capsys.readouterr().err
    assert "refused the key from JUDGE_KEY (401)" in error
    assert "kvbench score" in error
    saved = read_run(tmp_path / "r1").rows
    assert len(saved) >= 1
    assert set(saved["status"]) == {"unscored"}
    assert KEY not in error
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    judge = judged(say("Rating: [[7]]"))
    assert main(["run", "--resume", "r1", "-q", *judge]) == 0
    rows = read_run(tmp_path / "r1").rows
    assert set(rows["status"]) == {"ok"}
    assert set(rows["score"]) == {0.7}
    assert rows["judge"].str.contains("judge-1-0711").all()


def test_answers_are_stored_first_and_judged_later(judged, tmp_path):
    assert main([*RUN, "--judge", "none", "--out", str(tmp_path), "--run-name", "r1"]) == 0
    before = read_texts(tmp_path / "r1")
    assert set(read_run(tmp_path / "r1").rows["status"]) == {"unscored"}
    assert main(["score", "r1", "-q", *judged(say("[[10]]"))]) == 0
    assert set(read_run(tmp_path / "r1").rows["score"]) == {1.0}
    assert read_texts(tmp_path / "r1").equals(before)
    assert main(["score", "r1", "--all", "-q", *judged(say("no rating"))]) == 4
    assert set(read_run(tmp_path / "r1").rows["score"]) == {1.0}  # what was there stays


def test_pairs_are_judged_against_the_full_caches_answers(judged, tmp_path):
    judge = judged(say("[[A]]"))  # whoever comes first wins: the two orders disagree, so it is a tie
    assert main([*RUN, *judge, "--judge-mode", "pair", "--run-name", "r1"]) == 0
    rows = read_run(tmp_path / "r1").rows
    assert set(rows["status"]) == {"ok"}
    assert set(rows["score"]) == {0.5}
