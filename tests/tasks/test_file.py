"""Own tasks from a file: fields, scoring, and every refusal with its text."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from kvbench.tasks.file import FileTask, fold, is_mathematics

from kvbench.errors import UserError
from kvbench.sources.data import Data
from kvbench.task import IMAGE, Doc, Output
from kvbench.taskkit.prompts import INSTRUCTION


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def write(*items: object, name: str = "x.jsonl") -> str:
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")
    return name


def docs(path: str, style: str = "default") -> list[Doc]:
    return FileTask(path).docs(Data(env={}), style=style)


def item(**fields: object) -> dict:
    return {"question": "1+1?", "answer": 2, **fields}


def test_all_fields():
    path = write(
        item(
            id="a", context="Read this.", system="S", answer_prefix="It is", category="c", cluster_id="k", url="ignored"
        ),
        {"problem": "What?", "answer": "Paris", "id": 7, "context": None},
        {"question": "Else?", "answer": 2.5},
    )
    first, second, third = docs(path)
    turn = first.turns[0]
    assert (turn.context, turn.question) == ("Read this.\n\n", f"1+1?\n\n{INSTRUCTION}")
    assert (turn.system, turn.answer_prefix, first.meta, first.cluster) == ("S", "It is", {"category": "c"}, "k")
    assert (second.doc_id, second.reference, second.turns[0].context, second.cluster) == ("7", "Paris", "", "7")
    assert (third.doc_id, third.reference) == ("line-3", 2.5)
    assert (first.gen, second.gen) == ({"thinking": False}, {})  # a prefix follows the place of a thinking block
    assert docs(path, "plain")[1].turns[0].user == "What?"


def test_identity():
    task = FileTask(write(item(), name="My Questions.v2.jsonl"))
    assert (task.name, task.size()) == ("file/my-questions.v2", 1)
    assert len(task.sources()["sha256"]) == 64
    assert pickle.loads(pickle.dumps(task)).name == task.name
    assert FileTask(write(item(), name="é.jsonl")).name == "file/x"


def test_bom_crlf_and_a_last_line_without_newline_are_accepted():
    Path("x.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": 1}\r\n\r\n{"question": "b", "answer": "c"}')
    assert [(doc.doc_id, doc.reference) for doc in docs("x.jsonl")] == [("line-1", 1), ("line-3", "c")]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "x.jsonl has no questions."),
        ("\n" * 12, "x.jsonl has 12 lines and no question."),
        ('{"question": "a" "answer": 1}\n', "x.jsonl:1: not JSON (expected ',' at column 18)."),
        ('\n{"question": "a", "id": "q3"}\n', "x.jsonl:2: field 'answer' is missing (item id 'q3')."),
        ('{"question": "a", "answer": [1]}', "x.jsonl:1: 'answer' must be text or a number; got list."),
        ('{"question": "a", "answer": null}', "x.jsonl:1: 'answer' must be text or a number; got null."),
        ('{"question": "a", "answer": true}', "x.jsonl:1: 'answer' must be text or a number; got true/false."),
        ('{"question": "a", "answer": " "}', "x.jsonl:1: 'answer' is empty."),
        ('{"answer": 1}', "x.jsonl:1: field 'question' is missing."),
        ('{"problem": 3, "answer": 1}', "x.jsonl:1: 'problem' must be text; got number."),
        ('{"question": "a", "answer": 1, "context": {}}', "x.jsonl:1: 'context' must be text; got object."),
        (
            '{"question": "\\ud800", "answer": 1}',
            "x.jsonl:1: 'question' holds an invalid character (a lone surrogate).",
        ),
        (
            '{"question": "a", "answer": 1, "id": "q7"}\n\n{"question": "b", "answer": 1, "id": "q7"}',
            "x.jsonl:3: id 'q7' is already used on line 1.",
        ),
    ],
)
def test_refused_contents(content: str, text: str):
    Path("x.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        FileTask("x.jsonl")
    assert str(caught.value) == text
    assert caught.value.exit_code == 2


def test_images_stand_before_the_context_or_where_the_text_says():
    path = write(
        item(images=["a.png", "b/c.jpg"], context="Look."),
        item(images=["a.png"], question=f"Is {IMAGE} red?"),
        item(images=[]),
        item(images=None),
        name="d/x.jsonl",
    )
    first, second, *none = (doc.turns[0] for doc in docs(path, "plain"))
    assert first.user == f"{IMAGE}{IMAGE}Look.\n\n1+1?"
    assert [(i.name, i.path) for i in first.images] == [("a.png", Path("d/a.png")), ("b/c.jpg", Path("d/b/c.jpg"))]
    assert second.user == f"Is {IMAGE} red?"
    assert [turn.images for turn in none] == [(), ()]


@pytest.mark.parametrize(
    "wrong",
    [
        *("a.png", 3, {"a": 1}, [1], [""], ["/etc/passwd"], ["../a.png"], ["a/../../b.png"], ["C:a.png"], ["a\\b.png"]),
        *(0, False, "", {}),
    ],
)
def test_images_are_files_in_the_folder(wrong: object):
    with pytest.raises(UserError) as caught:
        FileTask(write(item(images=wrong)))
    assert (
        str(caught.value)
        == "x.jsonl:1: 'images' must be a list of names of image files, relative to the folder of this JSON-lines file."
    )


def test_up_to_five_problems_then_the_count():
    path = write(*({"question": "a"} for _ in range(4)), "{", *({"question": "a"} for _ in range(4)))
    with pytest.raises(UserError) as caught:
        FileTask(path)
    found = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in found[:5]] == ["1", "2", "3", "4", "5"]
    assert found[5:] == ["9 problems in all; the first 5 are shown."]


@pytest.mark.parametrize(("codec", "byte"), [("utf-16", "0xff at offset 0"), ("latin-1", "0xe9 at offset 14")])
def test_other_encodings(codec: str, byte: str):
    Path("x.jsonl").write_bytes('{"question": "é", "answer": 1}'.encode(codec))
    with pytest.raises(UserError) as caught:
        FileTask("x.jsonl")
    assert str(caught.value) == f"x.jsonl is not UTF-8 (byte {byte}). Save it as UTF-8."


def test_what_is_no_plain_file_is_never_read():
    os.mkdir("folder")
    os.mkfifo("fifo")
    with open("big", "wb") as stream:
        stream.truncate(50 * 10**9)
    for path, text in (
        ("folder", "--task-file folder is a folder, not a file."),
        ("fifo", "--task-file fifo is a pipe, not a file."),
        ("/dev/zero", "--task-file /dev/zero is a device, not a file."),
        ("none", "--task-file none does not exist."),
        ("a\x1b[2J", "--task-file a\\x1b[2J does not exist."),
        ("big", "big has 50,000.0 MB; the limit is 536.9 MB. Give a smaller file."),
    ):
        with pytest.raises(UserError) as caught:
            FileTask(path)
        assert str(caught.value) == text


def test_a_large_item_is_accepted_here():
    assert len(docs(write(item(context="x" * 10_000_000)))[0].turns[0].user) > 10_000_000


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *((a, True) for a in ("12", "-1.5", "1,234", "2x+3", r"\frac{1}{2}", r"\text{Paris}", "x^2", 5, 2.5)),
        *((a, False) for a in ("Paris", "Paris 2024", "y", "3 cm", "twelve", "C")),
    ],
)
def test_is_mathematics(answer: object, expected: bool):
    assert is_mathematics(answer) is expected


@pytest.mark.parametrize(
    ("answer", "text", "value", "strict"),
    [
        (2, r"\boxed{2.0}", 1.0, 1.0),
        (2.5, r"\boxed{\frac{5}{2}}", 1.0, 1.0),
        ("1/2", "The answer is 0.5", 1.0, 0.0),
        ("Paris", r"It is \boxed{\text{paris}}.", 1.0, 1.0),
        ("Paris", "paris.", 1.0, 0.0),
        ("Paris", "I think Paris", 0.0, 0.0),
        ("Paris 2024", r"\boxed{Berlin 2024}", 0.0, 0.0),
        ("The  Cat", '"the cat"', 1.0, 0.0),
        ("Paris", "", 0.0, 0.0),
        ("Paris", r"\boxed{Pairs}", 0.0, 0.0),
        ("x^2+xy+y^2", r"\boxed{x^2 + xy + y^2}", 1.0, 1.0),
        (r"\frac{2ab}{cd}", r"\boxed{\dfrac{2ab}{cd}}", 1.0, 1.0),
        ("y = ax + b", r"\boxed{y=b+ax}", 1.0, 1.0),
        ("p - q", "p-q", 1.0, 0.0),
        ("p - q", r"\boxed{q-p}", 0.0, 0.0),
        ("A-B-C", r"\boxed{A-C-B}", 0.0, 0.0),
        ("60 km/h", r"\boxed{60 mi/h}", 0.0, 0.0),
        (r"\text{cat}", r"\boxed{act}", 0.0, 0.0),
        (r"\text{cat} no", r"\boxed{act on}", 0.0, 0.0),
        (r"\textit{no} cat", r"\boxed{\textit{on} act}", 0.0, 0.0),
        ("A", r"\boxed{(A)}", 1.0, 1.0),
        ("(A)", r"\boxed{\mathbf{A}}", 1.0, 1.0),
        *((code, rf"It is \boxed{{{code}}}.", 1.0, 1.0) for code in ("H2O", "B-52", "Q3", "10:30", "7A")),
        ("H2O", r"\boxed{\text{H2O}}", 1.0, 1.0),
        ("H2O", "H2O.", 1.0, 0.0),
        ("H2O", r"\boxed{H2S}", 0.0, 0.0),
        (".5", r"\boxed{5}", 0.0, 0.0),
        *((1e-5, rf"\boxed{{{same}}}", 1.0, 1.0) for same in ("0.00001", "10^{-5}", "1e-05", "1e-5")),
        *((1e-5, rf"\boxed{{{other}}}", 0.0, 0.0) for other in ("e-5", "-5", "0.0001")),
        (1e22, r"\boxed{10^{22}}", 1.0, 1.0),
        ("1.5e-3", r"\boxed{0.0015}", 1.0, 1.0),
        ("1e999999", r"\boxed{1}", 0.0, 0.0),
        *(("1e-05", rf"\boxed{{{same}}}", 1.0, 1.0) for same in ("1.0e-5", "1.00e-05", "0.000010")),
        ("1e-05", "The final answer is $1e-05$", 1.0, 0.0),
        ("1e-08", r"\boxed{2e-08}", 0.0, 0.0),
        ("1e-08", r"\boxed{0.00000002}", 0.0, 0.0),
        ("1e16", r"\boxed{1e16\text{ m}}", 1.0, 1.0),
        *(("1e5", rf"\boxed{{{same}}}", 1.0, 1.0) for same in ("1e5 m", "x=1e5", "100000")),
        ("100", r"\boxed{x1e2}", 0.0, 0.0),
        ("~P", r"\boxed{P}", 0.0, 0.0),
        ("IMG2031", r"\boxed{IMG_2031}", 0.0, 0.0),
        ("12 cm", r"\boxed{12\text{ m}}", 0.0, 0.0),
        ("12 cm", r"\boxed{1\,2\text{ cm}}", 0.0, 0.0),
        ("5 m/s", r"\boxed{5 \text{ km/s}}", 0.0, 0.0),
        ("pi/4", r"\boxed{\frac{4}{\pi}}", 0.0, 0.0),
        ("sqrt(2)", r"\boxed{\sqrt[3]{2}}", 0.0, 0.0),
        ("ln 2", r"\boxed{\log 2}", 0.0, 0.0),
        ("H2O", r"\boxed{\text{H}_2\text{O}_2}", 0.0, 0.0),
        ("31/2", r"\boxed{3\frac{1}{2}}", 0.0, 0.0),
        (r"2516_8", r"\boxed{25168}", 0.0, 0.0),
        ("file_1.txt", r"\boxed{\text{file1.txt}}", 0.0, 0.0),
        *(
            (reference, rf"So \boxed{{{answer}}}.", 1.0, 1.0)
            for reference, answer in (
                ("12 cm", r"12\text{ cm}"),
                (r"12\text{ cm}", "12 cm"),
                ("12 cm", r"12\,\text{cm}"),
                ("12 cm", r"12~\mathrm{cm}"),
                ("10:30 AM", r"10:30 \text{ AM}"),
                ("2 and 3", r"2 \text{ and } 3"),
                ("5 m/s", r"5 \text{ m/s}"),
                ("90°", r"90^{\circ}"),
                ("H2O", r"\text{H}_2\text{O}"),
                ("H2O", r"\mathrm{H_{2}O}"),
                ("ln 2", r"\ln 2"),
                ("pi/4", r"\frac{\pi}{4}"),
                ("sqrt(2)", r"\sqrt{2}"),
                ("New York", r"\textbf{New\ York}"),
            )
        ),
    ],
)
def test_scores(answer: object, text: str, value: float, strict: float):
    task = FileTask(write(item(answer=answer)))
    output = Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1)
    score = task.score(task.docs(Data(env={}))[0], output)
    assert (score.value, score.strict) == (value, strict)


@pytest.mark.parametrize(
    ("prefix", "answer", "text", "value", "strict"),
    [
        ("The answer is", "Paris", " Paris.", 1.0, 0.0),
        (r"The answer is \boxed{", "Paris", "Paris}.", 1.0, 1.0),
        (r"The answer is \boxed{", "Paris", "Rome}.", 0.0, 0.0),
        (r"The answer is \boxed{", 7, "7}.", 1.0, 1.0),
        ("With x = 5 we get", 5, "", 0.0, 0.0),
        ("The", "The Cat", " cat", 1.0, 0.0),
        ("So", "Paris", r" <think>\boxed{Rome}</think>\boxed{Paris}", 1.0, 1.0),
    ],
)
def test_the_answer_prefix_is_part_of_the_answer(prefix: str, answer: object, text: str, value: float, strict: float):
    task = FileTask(write(item(answer=answer, answer_prefix=prefix)))
    output = Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)
    score = task.score(task.docs(Data(env={}))[0], output)
    assert (score.value, score.strict) == (value, strict)


def test_fold():
    assert fold(r" $\text{The  Cat}$ ") == fold("the cat.") == "the cat"


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        (
            {"image": "a.png"},
            "x.jsonl: the model does not see 'image' (2 questions); name image files in a list 'images'.",
        ),
        ({"image_path": "a.png", "Video": ["v"], "image": None}, "'image_path' (2 questions), 'Video' (2 questions)"),
        ({"imagery": "vivid", "reimaged": "x", "picture": ""}, None),
        ({"images": []}, None),
    ],
)
def test_fields_that_the_model_never_sees_get_one_line(fields: dict[str, object], note: str | None):
    task = FileTask(write(item(**fields), item(id="b", **fields), item(id="c")))
    notes = task.notes()
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
