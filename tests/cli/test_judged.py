"""mt_bench from the command line against a judge on this machine: keys refused, judged later, compared in pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.judges import KEY, say, send, serve

from kvbench.cli.app import main
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
    assert "refused the key in JUDGE_KEY (HTTP status 401)" in error
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


def test_without_a_judge_scores_stay_and_nothing_is_missing(judged, tmp_path, capsys):
    again = ["score", "r1", "--all", "--judge", "none", "--out", str(tmp_path)]
    assert main([*RUN, "--judge", "none", "--out", str(tmp_path), "--run-name", "r1"]) == 0
    assert main([*again, "-q"]) == 4  # nothing is judged yet
    assert "no score for some answers (4 without a judge)" in capsys.readouterr().err
    assert main(["score", "r1", "-q", *judged(say("[[10]]"))]) == 0
    before = read_run(tmp_path / "r1").rows
    capsys.readouterr()
    assert main([*again, "-q"]) == 0
    assert "note: 0 answers scored. 4 keep their scores, since no judge was asked." in capsys.readouterr().err
    assert main([*again, "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {key: document[key] for key in ("scored", "failed", "waiting", "kept")} == {
        "scored": 0,
        "failed": {},
        "waiting": 0,
        "kept": 4,
    }
    after = read_run(tmp_path / "r1").rows
    assert list(after["score"]) == list(before["score"])
    assert list(after["judge"]) == list(before["judge"])


def test_pairs_are_judged_against_the_full_caches_answers(judged, tmp_path):
    judge = judged(say("[[A]]"))  # whoever comes first wins: the two orders disagree, so it is a tie
    assert main([*RUN, *judge, "--judge-mode", "pair", "--run-name", "r1"]) == 0
    rows = read_run(tmp_path / "r1").rows
    assert set(rows["status"]) == {"ok"}
    assert set(rows["score"]) == {0.5}


def test_pairs_that_lie_in_two_shards_are_judged_after_join(judged, tmp_path, capsys):
    judge = [*judged(say("[[A]]")), "--judge-mode", "pair"]
    for shard in ("1/2", "2/2"):
        assert main([*RUN, *judge, "--run-name", "r1", "--shard", shard]) == 0
    assert main(["join", "r1-1-of-2", "r1-2-of-2", "--out", str(tmp_path), "-q"]) == 0
    rows = read_run(tmp_path / "r1").rows
    assert sorted(zip(rows["method"], rows["status"])) == [("full", "ok")] * 2 + [("gkv", "unscored")] * 2
    assert "2 answers have no score yet; 'kvbench run --resume r1 --out " in capsys.readouterr().err
    assert main(["run", "--resume", "r1", "-q", *judge]) == 0
    rows = read_run(tmp_path / "r1").rows
    assert set(rows["status"]) == {"ok"}
    assert set(rows["score"]) == {0.5}


def test_show_prints_every_turn_with_its_question(tmp_path, capsys, monkeypatch):
    assert main([*RUN, "--judge", "none", "--out", str(tmp_path), "--run-name", "r1"]) == 0
    answers = json.loads(read_texts(tmp_path / "r1")["turns"][0])
    capsys.readouterr()
    show = ["show", "r1", "--sample", "81", "--method", "full", "--out", str(tmp_path)]
    assert main(show) == 0
    blocks = capsys.readouterr().out.split("\n-- ")
    assert [block.partition("\n")[0] for block in blocks[1:]] == ["prompt", "output 1", "question 2", "output 2"]
    later = "Rewrite your previous response. Start every sentence with the letter A."
    assert "Hawaii" in blocks[1]
    assert blocks[3].partition("\n")[2] == later
    assert main([*show, "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert [turn["output"] for turn in sample["turns"]] == answers
    assert [turn["question"] for turn in sample["turns"]] == [sample["prompt"], later]
    assert sample["output"] == answers[-1]
    for lines in ('{"question_id": 81, "category": "x", "turns": ["other", "things"]}\n', None):  # other data, none
        folder = tmp_path / f"data{lines is None}/mt_bench"
        folder.mkdir(parents=True)
        if lines:
            (folder / "question.jsonl").write_text(lines)
        monkeypatch.setenv("KVBENCH_DATA", str(folder.parent))
        assert main(show) == 0
        shown = capsys.readouterr().out
        why = "(not stored in the run, and the task's data are not on this machine, or are not those of the run)"
        assert f"-- question 2\n{why}\n-- output 2\n" in shown
        assert "things" not in shown
