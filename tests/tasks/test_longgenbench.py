"""LongGenBench on made rows with the released columns: prompts, what the judge is asked over HTTP, scores, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import judges
from support.folders import DATA
from support.judges import say, send

from kvbench.errors import SetupError
from kvbench.scoring.longgenbench import read_entries
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Services, Task
from kvbench.taskkit.names import get_task

serve = judges.serve  # the fixture
FILE = DATA / "tasks" / "longgenbench" / "short.sample.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
DIARY = " Quiet.\n#*# Week 2: Mother turned sixty.\n#*# Week 3: Off to Bergen.\n"


def docs() -> list[Doc]:
    return get_task("longgenbench").docs(Data(DATA / "tasks", env={}))


def output(text: str) -> Output:
    return Output(text=text, stop_reason="stop_string", prompt_tokens=1, output_tokens=1, thinking=None)


def asking(url: str | None, mode: str = "single") -> Task:
    task = get_task("longgenbench")
    task.services = Services(judge=url, judge_model="judge-1", judge_key_env="JUDGE_KEY", judge_mode=mode)
    return task


def test_prompts_and_sampling():
    diary, tower = docs()
    assert diary.turns[0].user == ROWS[0]["prompt"]
    assert (diary.doc_id, diary.meta["category"], tower.meta["category"]) == ("short-0", "Week", "Floor")
    assert list(tower.reference["events"]) == ["once", "range"]  # kinds without events are left out
    for name, tokens in (("longgenbench", 16000), ("longgenbench/long", 32000)):
        spec = get_task(name).gen("llama")
        assert (spec.max_new_tokens, spec.temperature, spec.top_p, spec.chat) == (tokens, 0.95, 0.95, False)
        assert spec.stop == ("*** finished",)


def test_scores(serve):
    server = serve(say("Yes."), say("No."), say("yes, it does"))
    score = asking(server.url).score(docs()[0], output(DIARY))
    assert [got.user for got in server.got] == [
        "Context:  Week 2: Mother turned sixty.\n### Instruction: Does this context include the her mother birthday? "
        "Please answer with 'yes' or 'no' only.",
        "Context:  Week 3: Off to Bergen.\n### Instruction: Does this context include the A trip to Bergen? "
        "Please answer with 'yes' or 'no' only.",
        "Context:  Week 2: Mother turned sixty.\n### Instruction: Does this context include the Repair the boat? "
        "Please answer with 'yes' or 'no' only.",
    ]
    assert server.got[0].body["max_tokens"] == 50
    assert score.value == pytest.approx((1 + 0 + 0.5) / 3)
    shares = {"once": 1.0, "range": 0.0, "periodic": 0.5}
    written = {"once_written": 1.0, "range_written": 0.0, "periodic_written": 1.0}
    assert score.aux == shares | written | {"completion": 0.75, "words": 21.0}
    assert str(score.facts["judge"]).startswith("judge-1 (judge-1-0711), 2")


def test_an_answer_without_entries_asks_nothing(serve):
    server = serve(say("yes"))
    score = asking(server.url).score(docs()[0], output("I will not."))
    assert (score.value, score.aux["completion"], server.got) == (0.0, 0.25, [])


def test_without_a_judge_the_entries_are_counted(serve):
    for judge in (None, "none"):
        score = asking(judge).score(docs()[0], output(DIARY))
        assert (score.value, score.status, score.aux["completion"]) == (None, "unscored", 0.75)
    assert "compares no pairs" in asking("https://judge.example/v1", "pair").score(docs()[0], output("")).note
    broken = asking(serve(send(400, "bad")).url).score(docs()[0], output(DIARY))
    assert (broken.value, broken.status) == (None, "judge_error")


def test_a_number_that_python_cannot_read_is_no_entry():
    assert read_entries(f"Week {'9' * 5000}#*#Week 2", "Week") == {2: "Week 2"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checks_range": ...}, "have no column 'checks_range'"),
        ({"number": "many"}, "row 1, have a value of a wrong form"),
        ({"checks_once": {"two": "x"}}, "row 1, have a value of a wrong form"),
        ({"checks_once": ["x"]}, "row 1, have a value of a wrong form"),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, change: dict[str, Any], message: str):
    row = {key: value for key, value in (ROWS[0] | change).items() if value is not ...}
    (tmp_path / "longgenbench").mkdir()
    (tmp_path / "longgenbench" / "Dataset_short.json").write_text(json.dumps([row]), encoding="utf-8")
    with pytest.raises(SetupError, match=f"^data of task 'longgenbench'.*{message}"):
        get_task("longgenbench").docs(Data(tmp_path, env={}, allow_mismatch=True))


def test_data_that_are_not_here_get_a_line(tmp_path: Path):
    with pytest.raises(SetupError, match=r"^--data has no data for task 'longgenbench/long': looked for "):
        get_task("longgenbench/long").docs(Data(tmp_path, env={}))
