"""LongMemEval on made rows with the hub's columns: prompts, what the judge is asked over HTTP, marks, wrong data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import judges
from support.folders import DATA
from support.judges import say, send

from kvbench.errors import SetupError
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Services, Task
from kvbench.taskkit.names import get_task

serve = judges.serve  # the fixture
FILE = DATA / "tasks" / "longmemeval" / "longmemeval_s_cleaned.json"
ROWS = json.loads(FILE.read_text(encoding="utf-8"))
HISTORY = """
### Session 1:
Session Date: 2023/05/20 (Sat) 02:21
Session Content:

[{"role": "user", "content": "My two cacti are fine."}, {"role": "assistant", "content": "Good."}]

### Session 2:
Session Date: 2023/05/21 (Sun) 04:41
Session Content:

[{"role": "user", "content": "I bought a {third} plant, a fern."}, {"role": "assistant", "content": \
"Ferns like shade \\u2013 enjoy!"}]


"""


def docs(name: str = "longmemeval", style: str = "default") -> list[Doc]:
    return get_task(name).docs(Data(DATA / "tasks", env={}, allow_mismatch=True), style=style)


def output(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


def asking(url: str | None, mode: str = "single") -> Task:
    task = get_task("longmemeval")
    task.services = Services(judge=url, judge_model="judge-1", judge_key_env="JUDGE_KEY", judge_mode=mode)
    return task


@pytest.mark.parametrize("name", ["longmemeval", "longmemeval/oracle"])
def test_prompts(name: str):
    first, absent = docs(name)
    (turn,) = first.turns
    assert turn.context.startswith("I will give you several history chats between you and a user.")
    assert "Answer the question step by step" in turn.context
    assert turn.context.endswith("History Chats:\n\n" + HISTORY)
    asked = "How many plants do I have?\nAnswer (step by step):"
    assert turn.question == f"Current Date: 2023/05/30 (Tue) 23:40\nQuestion: {asked}"
    assert (first.doc_id, first.meta["category"], first.reference["answer"]) == ("made_1", "multi-session", "3")
    assert not first.reference["abstention"]
    assert absent.reference["abstention"]


def test_styles():
    direct = docs(style="direct")[0]
    assert direct.turns[0].user.endswith("How many plants do I have?\nAnswer:")
    assert "step by step" not in direct.turns[0].user
    assert direct.gen == {"max_new_tokens": 500}
    assert docs()[0].gen == {"max_new_tokens": 800}


@pytest.mark.parametrize(("reply", "value"), [("Yes", 1.0), ("yes.", 1.0), ("No", 0.0), ("no, not yet", 0.0)])
def test_marks(serve, reply: str, value: float):
    server = serve(say(reply))
    score = asking(server.url).score(docs()[0], output(" You have 3. "))
    assert (score.value, score.aux) == (value, {"invalid": 0.0, "abstention": 0.0})
    assert score.facts["judge"].startswith("judge-1 (judge-1-0711), 2")
    (got,) = server.got
    assert [message["role"] for message in got.body["messages"]] == ["user"]
    assert (got.body["max_tokens"], got.body["temperature"]) == (10, 0)
    assert got.user.endswith(
        "\n\nQuestion: How many plants do I have?\n\nCorrect Answer: 3\n\nModel Response: You have 3.\n\n"
        "Is the model response correct? Answer yes or no only."
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("single-session-user", "contains all the intermediate steps to get the correct answer, you should also"),
        ("temporal-reasoning", "do not penalize off-by-one errors for the number of days"),
        ("knowledge-update", "the updated answer is the required answer"),
        ("single-session-preference", "\n\nRubric: 3\n\n"),
    ],
)
def test_the_prompt_depends_on_the_type_of_question(serve, tmp_path: Path, kind: str, words: str):
    server = serve(say("yes"))
    asking(server.url).score(one(tmp_path, {"question_type": kind}), output("3"))
    assert words in server.got[0].user


def test_questions_without_an_answer(serve):
    server = serve(say("Yes"))
    score = asking(server.url).score(docs()[1], output("You never told me {0}."))
    assert (score.value, score.aux["abstention"]) == (1.0, 1.0)
    assert server.got[0].user.startswith("I will give you an unanswerable question")
    assert "Model Response: You never told me {0}.\n\nDoes the model" in server.got[0].user


def test_replies_without_a_mark(serve):
    doc = docs()[0]
    again = asking(serve(say("Perhaps."), say("yes")).url).score(doc, output("3"))
    assert (again.value, again.aux["invalid"]) == (1.0, 1.0)
    none = asking(serve(say("Perhaps.")).url).score(doc, output("3"))
    assert (none.value, none.status, none.note) == (None, "judge_error", "the judge's replies say neither yes nor no")
    broken = asking(serve(send(400, "bad")).url).score(doc, output("3"))
    assert (broken.value, broken.status) == (None, "judge_error")
    for judge in (None, "none"):
        assert asking(judge).score(doc, output("3")).status == "unscored"
    assert "compares no pairs" in asking("https://judge.example/v1", "pair").score(doc, output("3")).note


def one(folder: Path, change: dict) -> Doc:
    data = {key: value for key, value in (ROWS[0] | change).items() if value is not ...}
    (folder / "longmemeval").mkdir(exist_ok=True)
    (folder / "longmemeval" / FILE.name).write_text(json.dumps([data]), encoding="utf-8")
    (doc,) = get_task("longmemeval").docs(Data(folder, env={}, allow_mismatch=True))
    return doc


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"haystack_dates": ["2023/05/21 (Sun) 04:41"]}, "row 1, have a value of a wrong form"),
        ({"haystack_sessions": ...}, "have no column 'haystack_sessions'"),
        ({"question_type": "riddle"}, "have a value of a wrong form .question_type 'riddle' is not one of single-"),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, change: dict, message: str):
    with pytest.raises(SetupError, match=f"^data of task 'longmemeval'.*{message}"):
        one(tmp_path, change)
