"""MathVista: prompts from rows, pictures from a folder, scores by rule and by a judge over HTTP, wrong rows."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from support import judges
from support.judges import say
from support.vision import picture

from kvbench.errors import SetupError
from kvbench.sources import image_files
from kvbench.sources.data import Data
from kvbench.task import IMAGE, Output, Services
from kvbench.taskkit.names import get_task

serve = judges.serve  # the fixture
PNG, JPEG = picture(seed=1).data, picture(seed=2, kind="JPEG").data
ABOUT = {"task": "geometry problem solving"}
PLAIN = {"choices": None, "unit": None, "precision": None, "question_type": "free_form", "metadata": ABOUT}
CHOICE = PLAIN | {
    "id": "1",
    "question": "Which colour?",
    "image": "images/1.png",
    "answer": "blue",
    "choices": ["red", "blue"],
    "question_type": "multi_choice",
    "answer_type": "text",
}
PRICE = PLAIN | {
    "id": "2",
    "question": "What does it cost?",
    "image": "images/2.jpg",
    "unit": "$",
    "answer": "1.45",
    "precision": 2.0,
    "answer_type": "float",
}
COUNT = PLAIN | {"id": "3", "question": "How many?", "image": "images/1.png", "answer": "14", "answer_type": "integer"}


def folder(path: Path, *rows: dict) -> Path:
    (path / "mathvista" / "images").mkdir(parents=True, exist_ok=True)
    (path / "mathvista" / "images" / "1.png").write_bytes(PNG)
    (path / "mathvista" / "images" / "2.jpg").write_bytes(JPEG)
    (path / "mathvista" / "testmini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def docs(path: Path, *rows: dict, **settings):
    source = Data(folder(path, *(rows or (CHOICE, PRICE, COUNT))), env={}, allow_mismatch=True)
    return get_task("mathvista").docs(source, **settings)


def output(text: str, thinking: bool | None = False) -> Output:
    return Output(text=text, turns=(text,), stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)


def test_documents(tmp_path: Path):
    choice, price, count = docs(tmp_path)
    assert choice.turns[0].context == IMAGE
    assert choice.turns[0].question == (
        "Hint: Please answer the question and provide the correct option letter, e.g., A, B, C, D, at the end.\n"
        "Question: Which colour?\nChoices:\n(A) red\n(B) blue"
    )
    assert price.turns[0].question == (
        "Hint: Please answer the question requiring a floating-point number with two decimal places and provide the "
        "final value, e.g., 1.23, 1.34, 1.45, at the end.\nQuestion: What does it cost? (Unit: $)"
    )
    assert count.turns[0].question.startswith("Hint: Please answer the question requiring an integer answer")
    assert [image_files.encoded(doc.turns[0].images[0]) for doc in (choice, price)] == [PNG, JPEG]
    assert choice.meta == {"category": "geometry problem solving"}
    assert [doc.doc_id for doc in docs(tmp_path, limit=2)] == ["1", "2"]
    released = docs(tmp_path, style="released")[0].turns[0].question
    assert released.startswith("Question: Which colour?\nChoices:\n(A) red\n(B) blue\nHint: ")
    assert released.endswith("at the end.\nSolution:")


def test_the_data_are_checked(tmp_path: Path):
    with pytest.raises(SetupError, match="3 rows instead of 1000"):
        get_task("mathvista").docs(Data(folder(tmp_path, CHOICE, PRICE, COUNT), env={}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": ""}, "question '1' has no text in 'question'"),
        ({"question": None}, "question '1' has no text in 'question'"),
        ({"answer": None}, "question '1' has no text in 'answer'"),
        ({"answer_type": "poem"}, "question '1' names an unknown form of answer, or contradicts itself"),
        ({"choices": None}, "question '1' names an unknown form of answer, or contradicts itself"),
        ({"choices": None, "question_type": "free_form"}, "question '1' names an unknown form of answer, or contra"),
        ({"image": "images/9.png"}, "row 1: image '.*images/9.png' does not exist"),
        ({"image": "../../1.png"}, "row 1: image '../../1.png' is not a path inside the folder"),
        ({"image": ["images/1.png"]}, "question '1' must have one image"),
        ({"metadata": None}, ", row 1, have a value of a wrong form .*subscriptable"),
        ({"precision": "x"}, ", row 1, have a value of a wrong form .*'x'"),
        ({"choices": 3}, ", row 1, have a value of a wrong form"),
        ({"id": "2"}, "occur twice"),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, change: dict, message: str):
    with pytest.raises(SetupError, match=f"^data of task 'mathvista'.*{message}"):
        docs(tmp_path, CHOICE | change, PRICE)


def test_a_row_without_a_column(tmp_path: Path):
    row = {key: value for key, value in CHOICE.items() if key != "question"}
    with pytest.raises(SetupError, match="data of task 'mathvista' have no column 'question'"):
        docs(tmp_path, row)


def test_scores_by_rule(tmp_path: Path):
    task, (choice, price, count) = get_task("mathvista"), docs(tmp_path)
    cases = [
        (choice, "blue", (1.0, 1.0, "blue")),
        (choice, 'The answer is "B".', (1.0, 1.0, "B")),
        (choice, "I see a circle.\nThe answer is (B).", (1.0, 0.0, "B")),
        (choice, "The answer is A.", (0.0, 0.0, "A")),
        (choice, "Who knows", (0.0, 0.0, None)),
        (price, "It costs $1.45.", (1.0, 0.0, "1.45")),
        (price, "1.4512", (1.0, 1.0, "1.4512")),
        (count, "14", (1.0, 1.0, "14")),
        (count, "", (0.0, 0.0, None)),
    ]
    for doc, text, expected in cases:
        score = task.score(doc, output(text))
        assert (score.value, score.strict, score.extracted) == expected, text
    thought = task.score(choice, output("<think>red? (A)</think>(B)", thinking=True))
    assert thought.value == 1.0
    assert task.score(choice, output("(B), I think", thinking=True)).extracted is None  # thinking never ends
    assert task.needs == frozenset()


def judged(url: str | None):
    task = get_task("mathvista/judge")
    task.services = Services(judge=url, judge_model="judge-1", judge_key_env="JUDGE_KEY")
    return task


def test_scores_by_a_judge(tmp_path: Path, serve):
    server = serve(say("B"), say(" (A) red\n"), say("1.45"))
    task, (choice, price, count) = judged(server.url), docs(tmp_path)
    assert task.needs == {"judge"}
    right = task.score(choice, output("The second, I should say."))
    assert (right.value, right.extracted) == (1.0, "B")
    assert right.facts["judge"].startswith("judge-1 (judge-1-0711), 2")
    assert task.score(choice, output("The first.")).value == 0.0
    assert task.score(price, output("One dollar and forty-five cents.")).value == 1.0
    asked = server.got[0]
    assert [message["role"] for message in asked.body["messages"]] == ["user"]  # officially without a system message
    assert asked.user.startswith("Please read the following example. Then extract the answer")
    assert asked.user.endswith(
        f"Extracted answer: B\n\n{choice.turns[0].question}\n\nThe second, I should say.\n\nExtracted answer: "
    )
    direct = task.score(count, output("14"))
    assert (direct.value, direct.facts["judge"].split(",")[0]) == (1.0, "nobody")
    assert task.score(count, output("")).value == 0.0
    assert len(server.got) == 3


def test_judges_that_fail(tmp_path: Path, serve):
    doc = docs(tmp_path)[0]
    for judge in (None, "none"):
        score = judged(judge).score(doc, output("The second."))
        assert (score.value, score.status) == (None, "unscored")
    empty = judged(serve(say("")).url).score(doc, output("The second."))
    assert (empty.value, empty.status, empty.note) == (None, "judge_error", "the judge's replies are empty")


def test_a_task_and_its_documents_travel(tmp_path: Path):
    task, doc = pickle.loads(pickle.dumps((get_task("mathvista"), docs(tmp_path)[0])))
    assert task.score(doc, output("B")).value == 1.0
