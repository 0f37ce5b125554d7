"""Graders, judges and sandboxes that fail. F20, F22, F30."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faults.stage import NO_WEIGHTS, ROWS, RUN, Stage, scenario, segment_of
from support.commands import Before, Tell
from support.folders import DATA
from support.judges import hang, say, send

from kvbench.store import read_texts
from kvbench.store.journal import encode
from kvbench.store.recovery import decode
from kvbench.taskkit.synthetic_task import SyntheticTask


@scenario("F20")
def grader_raises(stage: Stage) -> None:
    question = str(stage.rows(stage.undisturbed)["doc_id"].iloc[0])
    ended = stage.call(RUN, _grader(question))
    assert ended.code == 4, ended
    rows = stage.rows()
    failed = rows[rows["doc_id"] == question]
    assert (len(failed), set(failed["status"])) == (ROWS // 3, {"grader_error"})
    assert failed["score"].isna().all()
    assert failed["note"].str.fullmatch(r"error: RuntimeError: broken \(traceback [0-9a-f]{8}\)").all()
    assert failed["note"].nunique() == 1  # one fault, one hash
    good = rows["doc_id"] != question
    before = stage.rows(stage.undisturbed)
    assert rows[good][["row_key", "status", "score"]].equals(before[good][["row_key", "status", "score"]])
    stage.done("score r1 -q", NO_WEIGHTS)
    stage.check_final(apart_from=("score_pass",))


def _grader(question: str) -> Before:
    """A grader that raises on one question."""

    def before(tell: Tell) -> None:
        real = SyntheticTask.score

        def score(self: SyntheticTask, doc: Any, output: Any) -> Any:
            if doc.doc_id == question:
                raise RuntimeError("broken")
            return real(self, doc, output)

        SyntheticTask.score = score  # type: ignore[method-assign]

    return before


ASK = "--method full --task mt_bench --limit 1 --max-new-tokens 8 -q --run-name r1"


@scenario("F22")
def judge_fails(stage: Stage) -> None:
    serve = stage.fixture("serve")
    stage.done(f"run {ASK} --judge none")
    answers = read_texts(stage.run_dir)
    for act, tries in ((send(429), 5), (send(500), 5), (hang, 5), (send(200, "{"), 1)):
        server = serve(act)
        command = stage.start(f"score r1 -q {_judge(server)}", _impatient)
        pauses = [float(event.split()[1]) for event in command.events()]
        ended = command.end()
        assert ended.code == 4, ended
        assert "judge_error" in ended.err
        rows = stage.rows()
        assert set(rows["status"]) == {"judge_error"}
        assert rows["score"].isna().all()
        assert read_texts(stage.run_dir).equals(answers)
        asked = [got.body["messages"][1]["content"] for got in server.got]
        assert (len(asked), len(set(asked))) == (tries, 1)
        assert len(pauses) == tries - 1
        assert max(pauses, default=0.0) <= 60
    server = serve(send(401))
    refused = stage.call(f"score r1 -q {_judge(server)}", _impatient)
    assert refused.code == 3, refused
    assert "refused the key in JUDGE_KEY (HTTP status 401)" in refused.err
    assert len(server.got) <= len(answers)  # each answer was asked about once at most
    assert read_texts(stage.run_dir).equals(answers)
    stage.done(f"score r1 -q {_judge(serve(say('Rating: [[7]]')))}", NO_WEIGHTS)
    assert set(stage.rows()["score"]) == {0.7}
    assert read_texts(stage.run_dir).equals(answers)


def _judge(server: Any) -> str:
    return f"--judge {server.url} --judge-model m --judge-key-env JUDGE_KEY"


def _impatient(tell: Tell) -> None:
    """A judge gets a second for an answer; pauses are told and not made."""
    from kvbench.scoring.judge import endpoint

    endpoint.time = SimpleNamespace(sleep=lambda seconds: tell(f"pause {seconds}"))  # type: ignore[assignment]
    defaults = endpoint.Endpoint.__init__.__kwdefaults__
    assert defaults is not None
    defaults["seconds"] = 1.0


PROGRAM = "```python\nn = int(input())\nprint(sum(map(int, input().split())))\n```"  # right for kvb_001
TASK_DATA = DATA / "tasks"


@scenario("F30")
def sandbox_goes(stage: Stage) -> None:
    """bubblewrap starts all boxes but the last: in whatever order boxes start, at least one answer is scored."""
    real = shutil.which("bwrap")
    if real is None:
        pytest.skip("bubblewrap is not installed")
    line = f"run --method full --task livecodebench --data {TASK_DATA} --limit 1 --samples 4 --max-new-tokens 4"
    assert stage.call(f"{line} --no-chat-template -q --run-name r1").code == 0
    _answer_with(stage, PROGRAM)
    answered = stage.run_dir.rename(stage.folder / "answered")
    boxes = stage.folder / "boxes"
    for limit in (1000, None):
        shutil.copytree(answered, stage.run_dir)
        allowed = limit or len(list(boxes.iterdir())) - 1
        shutil.rmtree(boxes, ignore_errors=True)
        boxes.mkdir()
        ended = stage.call("score r1 -q", env={"PATH": f"{_bwrap(stage, real, allowed)}:{os.environ['PATH']}"})
        rows = stage.rows()
        if limit:
            assert (ended.code, set(rows["verdict"])) == (0, {"pass"}), ended
            shutil.rmtree(stage.run_dir)
    assert ended.code == 4, ended
    assert "sandbox_error" in ended.err
    assert set(rows["status"]) == {"ok", "sandbox_error"}
    assert set(rows["verdict"].dropna()) == {"pass"}
    assert rows[rows["status"] == "sandbox_error"]["score"].isna().all()
    stage.done("score r1 -q")
    rows = stage.rows()
    assert (set(rows["status"]), set(rows["score"])) == ({"ok"}, {1.0})


def _bwrap(stage: Stage, real: str, allowed: int) -> Path:
    """A folder with a bubblewrap that starts so many boxes and is gone then.

    Boxes start at the same time, so each takes a number of its own: `mkdir` of a number succeeds once.
    """
    folder = stage.folder / f"bin{allowed}"
    folder.mkdir()
    take = f'n=1; until mkdir "{stage.folder}/boxes/$n" 2>/dev/null; do n=$((n + 1)); done'
    (folder / "bwrap").write_text(f'#!/bin/sh\n{take}\ntest $n -le {allowed} || exit 127\nexec {real} "$@"\n')
    (folder / "bwrap").chmod(0o755)
    return folder


def _answer_with(stage: Stage, text: str) -> None:
    """Let the stored answers, which the built-in model cannot write, be programs that were not scored yet."""
    segment = segment_of(stage.run_dir)
    for name in ("rows.parquet", "texts.parquet", "seal.json"):
        (stage.run_dir / name).unlink()
    records = [decode(line) for line in segment.read_bytes().splitlines(keepends=True)]
    digest = hashlib.sha256(text.encode()).hexdigest()
    changed = [
        record
        | {
            "row": record["row"] | {"output_sha256": digest, "status": "unscored", "score": None, "verdict": None},
            "text": record["text"] | {"output": text},
        }
        for record in records
        if record is not None
    ]
    segment.write_bytes(b"".join(map(encode, changed)))
