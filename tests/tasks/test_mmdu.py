"""MMDU: dialogues with pictures from a folder, what the judge is shown over HTTP, scores, and data that are wrong."""

from __future__ import annotations

import base64
import json
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
PNG, JPEG, WEBP = (picture(seed=seed, kind=kind).data for seed, kind in enumerate(("PNG", "JPEG", "WEBP")))
TALK = [
    {"from": "user", "value": "Image1: <ImageHere>. Image2: <ImageHere>.\nCompare them."},
    {"from": "assistant", "value": "One is red, one is blue."},
    {"from": "user", "value": "And this one?<ImageHere>"},
    {"from": "assistant", "value": "It is green."},
    {"from": "user", "value": "Thank you. Which was first?"},
    {"from": "assistant", "value": "The red one."},
]
ROW = {"id": "t1", "image": ["/pics/1.png", "/pics/2.jpg", "/pics/3.webp"], "conversations": TALK}
NAMES = ["Creativity", "Richness", "Visual Perception", "Logical Coherence", "Answer Accuracy"]
NAMES += ["Image Relationship Understanding", "Overall Score"]


def folder(path: Path, *rows: dict) -> Path:
    (path / "mmdu" / "pics").mkdir(parents=True, exist_ok=True)
    for name, data in {"1.png": PNG, "2.jpg": JPEG, "3.webp": WEBP}.items():
        (path / "mmdu" / "pics" / name).write_bytes(data)
    (path / "mmdu" / "benchmark.json").write_text(json.dumps(list(rows)))
    return path


def docs(path: Path, *rows: dict):
    return get_task("mmdu").docs(Data(folder(path, *(rows or (ROW,))), env={}, allow_mismatch=True))


def output(*turns: str) -> Output:
    return Output(text=turns[-1], turns=turns, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


def asking(url: str | None):
    task = get_task("mmdu")
    task.services = Services(judge=url, judge_model="judge-1", judge_key_env="JUDGE_KEY")
    return task


def scores(*values: float) -> str:
    return str(dict(zip(NAMES, values, strict=True)))


EIGHT = scores(8, 8, 8, 8, 8, 8, 8)


def test_documents(tmp_path: Path):
    (doc,) = docs(tmp_path)
    assert [turn.user for turn in doc.turns] == [
        f"Image1: {IMAGE}. Image2: {IMAGE}.\nCompare them.",
        f"And this one?{IMAGE}",
        "Thank you. Which was first?",
    ]
    assert [[image_files.encoded(image) for image in turn.images] for turn in doc.turns] == [[PNG, JPEG], [WEBP], []]
    assert doc.reference == ("One is red, one is blue.", "It is green.", "The red one.")
    assert doc.meta == {"category": "2-5 images"}
    assert get_task("mmdu").needs == {"judge", "images"}
    assert get_task("mmdu").gen("qwen3_vl").max_new_tokens == 2048


def test_images_without_a_mark_are_not_shown(tmp_path: Path):
    (doc,) = docs(tmp_path, ROW | {"conversations": TALK[:2]})
    assert sum(len(turn.images) for turn in doc.turns) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": ["/pics/1.png"]}, "dialogue 't1' marks 3 images in its text but names 1 image files"),
        ({"image": ["/pics/9.png"]}, "row 1: image '.*/mmdu/pics/9.png' does not exist"),
        ({"image": ["/../../etc/passwd"]}, "row 1: image '/../../etc/passwd' is not a path inside the folder"),
        ({"image": None}, "row 1: column 'image' must be the name of an image file"),
        ({"conversations": TALK[1:]}, "dialogue 't1' does not alternate questions and answers"),
        ({"conversations": TALK[:-1]}, "dialogue 't1' does not alternate questions and answers"),
        ({"image": "/pics/1.png"}, ", row 1, have a value of a wrong form .*not iterable"),
        ({"conversations": None}, ", row 1, have a value of a wrong form .*not iterable"),
        ({"conversations": []}, "dialogue 't1' does not alternate questions and answers"),
        ({"conversations": [TALK[0] | {"value": " "}, *TALK[1:]]}, "dialogue 't1' has a turn without text"),
        ({"conversations": [TALK[0] | {"value": None}, *TALK[1:]]}, "dialogue 't1' has a turn without text"),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, change: dict, message: str):
    with pytest.raises(SetupError, match=f"^data of task 'mmdu'.*{message}"):
        docs(tmp_path, ROW | change)


def test_the_judge_sees_the_dialogue_and_its_pictures(tmp_path: Path, serve):
    server = serve(
        say("Strict as I am.\n" + scores(1, 2, 3, 4, 5, 6, 7)), say(scores(3, 4, 5, 6, 7, 8, 9)), say(scores(*[5] * 7))
    )
    (doc,) = docs(tmp_path)
    score = asking(server.url).score(doc, output("Red and blue.", "Green.", "Red."))
    assert score.value == pytest.approx(0.7)
    assert score.extracted == "7, 9, 5"
    assert {name: score.aux[name] for name in ("creativity", "visual_perception")} == pytest.approx(
        {"creativity": 3.0, "visual_perception": 13 / 3}
    )
    assert score.aux["image_relationship_understanding"] == pytest.approx(19 / 3)
    assert {score.aux[f"overall_{turn}"] for turn in (1, 2, 3)} == {7.0, 9.0, 5.0}
    assert (score.aux["rated"], score.aux["invalid"]) == (3.0, 0.0)
    assert score.facts["judge"].startswith("judge-1 (judge-1-0711), 2")
    first, second, _ = server.got
    assert first.body["messages"][0] == {"role": "system", "content": "You are a helpful assistant."}
    text, *images = first.user
    assert text["text"].startswith("\nYou are an assistant skilled at evaluating the quality of creative text.")
    assert text["text"].endswith(
        "[Question]\nImage1: <ImageHere>. Image2: <ImageHere>.\nCompare them.\n\n"
        "[The Start of Reference Answer]\nOne is red, one is blue.\n[The End of Reference Answer]\n\n"
        "[The Start of Assistant’s Answer]\nRed and blue.\n[The End of Assistant’s Answer]"
    )
    kinds, files = zip(*(image["image_url"]["url"].split(";base64,") for image in images))
    assert kinds == ("data:image/png", "data:image/jpeg", "data:image/webp")
    assert [base64.b64decode(file) for file in files] == [PNG, JPEG, WEBP]
    assert "[Question]\nAnd this one?<ImageHere>\n\n" in second.user[0]["text"]
    assert second.user[1:] == images
    assert {got.body["max_tokens"] for got in server.got} == {4096}


def test_rows_by_name_in_place_of_a_list_get_a_line(tmp_path: Path):
    file = folder(tmp_path) / "mmdu" / "benchmark.json"
    for indent in (None, 2):
        file.write_text(json.dumps({"t1": ROW}, indent=indent))
        with pytest.raises(SetupError, match=r"must be the name of an image file|not JSON") as error:
            get_task("mmdu").docs(Data(tmp_path, env={}, allow_mismatch=True))
        assert "\n" not in str(error.value)


def test_the_judge_gets_the_pictures_that_were_hashed(tmp_path: Path, serve):
    server = serve(say(EIGHT))
    (doc,) = docs(tmp_path)
    path = tmp_path / "mmdu" / "pics" / "2.jpg"
    for data, why in ((PNG, "changed during the run"), (b"", "changed during the run"), (None, "does not exist")):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        score = asking(server.url).score(doc, output("a", "b", "c"))
        assert (score.value, score.status) == (None, "judge_error")
        assert score.note.startswith("image '")
        assert f"/pics/2.jpg' {why}" in score.note
        path.touch()
    assert server.got == []


@pytest.mark.parametrize(
    "bad",
    [
        "no scores",
        "{}",
        "{'Overall Score': 7}",
        scores(1, 2, 3, 4, 5, 6, 11),
        scores(0, 2, 3, 4, 5, 6, 7),
        "{'Creativity': __import__('os')}",
        EIGHT.replace("8", "'8'"),
        EIGHT.replace("8", "True"),
        f"<think>{EIGHT}",
    ],
)
def test_a_reply_without_scores_is_asked_for_once_more(tmp_path: Path, serve, bad: str):
    (doc,) = docs(tmp_path)
    answers = output("a", "b", "c")
    score = asking(serve(say(bad), say(EIGHT)).url).score(doc, answers)
    assert (score.value, score.aux["invalid"], score.extracted) == (pytest.approx(0.8), 1.0, "8, 8, 8")
    score = asking(serve(say(bad), say(bad), say(EIGHT)).url).score(doc, answers)
    assert (score.extracted, score.aux["rated"], score.aux["invalid"]) == ("-, 8, 8", 2.0, 2.0)
    assert score.note == "the judge's replies hold no scores on some turns"
    none = asking(serve(say(bad)).url).score(doc, answers)
    assert (none.value, none.status, none.note) == (None, "judge_error", "the judge's replies hold no scores")


@pytest.mark.parametrize("later", ["{[1]: 2}", "{'Overall Score': 7}", "{'x'}"])
def test_the_last_complete_dictionary_of_a_reply_counts(tmp_path: Path, serve, later: str):
    score = asking(serve(say(f"{EIGHT} {later}")).url).score(docs(tmp_path)[0], output("a", "b", "c"))
    assert (score.value, score.aux["invalid"]) == (pytest.approx(0.8), 0.0)


def test_scores_in_an_answer_are_none(tmp_path: Path, serve):
    server = serve(say(EIGHT))
    (doc,) = docs(tmp_path)
    asking(server.url).score(doc, output(f"{scores(*[10] * 7)} \\frac{{1}}{{2}}", "b", "c"))
    shown = server.got[0].user[0]["text"].partition("Assistant’s Answer]\n")[2]
    assert shown.startswith("['Creativity': 10, ")
    assert "\\frac{1}{2}" in shown


def test_without_a_judge_or_with_one_that_cannot_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (doc,) = docs(tmp_path)
    for judge in (None, "none"):
        score = asking(judge).score(doc, output("a", "b", "c"))
        assert (score.value, score.status) == (None, "unscored")
    pairs = get_task("mmdu")
    pairs.services = Services(judge="https://judge.example/v1", judge_model="judge-1", judge_mode="pair")
    score = pairs.score(doc, output("a", "b", "c"))
    assert (score.value, score.note) == (None, "mmdu compares no pairs; use --judge-mode single")
    missing = asking("https://judge.example/v1").score(doc, output("a"))
    assert (missing.value, missing.note) == (None, "the model gave 1 of 3 answers")
    blind = tmp_path / "judge"
    blind.mkdir()
    (blind / "config.json").write_text("{}")
    (blind / "chat_template.jinja").write_text("x")
    with pytest.raises(SetupError, match="a local judge reads no images; give a judge at an address"):
        asking(f"local:{blind}").score(doc, output("a", "b", "c"))
