"""``kvbench show --sample``: images where they stood, the reference answer, and the page of a question, also of hostile
folders: a page loads nothing, and shows images only from data that the user or kvbench names."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lxml.html
import PIL.Image
import pytest
from support.browser import Browser, browser
from support.folders import DATA
from support.vision import picture

from kvbench.cli.app import main
from kvbench.cli.run_questions import RunQuestions
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.report import image_list
from kvbench.report.page import pictures
from kvbench.sources.data import Data
from kvbench.store import RunFolder
from kvbench.task import IMAGE, Doc, Turn
from kvbench.taskkit.names import get_task

CASES = [json.loads(line)["text"] for line in (DATA / "xss_cases.jsonl").read_text().split("\n") if line]
MARK = "<|vision_start|><|image_pad|><|vision_end|>"
VERSIONS = {"kvbench_version": "0", "torch_version": "0", "transformers_version": "0"}
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="window.__x=1"><image href="http://127.0.0.1:9/"/></svg>'


def large() -> bytes:
    """A PNG file of a few bytes that claims more pixels than kvbench decodes."""
    file = io.BytesIO()
    PIL.Image.new("1", (20_000, 20_000)).save(file, "PNG")
    return file.getvalue()


def files_of(doc: Doc) -> list[bytes]:
    images = [image for turn in doc.turns for image in turn.images]
    return [image.data if image.path is None else image.path.read_bytes() for image in images]


def write_run(folder: Path, task: str, doc: Doc, *, names: list[str] | None = None, **more: Any) -> Path:
    """A run with the answers of two methods to a question, as a run of a model that sees stores them."""
    environment = VERSIONS | more.pop("environment", {})
    grid = Grid(methods=(MethodChoice(name="full"), MethodChoice(name="gkv")), tasks=(task,), budgets=(48,), limit=1)
    config = RunConfig(grids=(grid,), interval=16).stored()
    prompt = f"<|im_start|>user\n{doc.turns[0].user.replace(IMAGE, MARK)}<|im_end|>"
    files = files_of(doc)
    digest = hashlib.sha256(prompt.encode())
    for data in files:
        digest.update(hashlib.sha256(data).digest())
    listed, place = [], 0
    for number, data in enumerate(files):
        width, height = PIL.Image.open(io.BytesIO(data)).size
        place = prompt.find("<|image_pad|>", place + 1)
        name = names[number] if names else f"{number + 1}.png"
        about = {"name": name, "width": width, "height": height, "tokens": 4, "turn": 1}
        listed.append(about | {"at": place if place > 0 else None})
    answers = more.pop("answers", [[f"answer {n}" for n in range(len(doc.turns))]] * 2)
    with RunFolder.open(folder, "r", config, environment=environment, planned=2) as run:
        with run.journal() as journal:
            for method, budget, turns in (("full", None, answers[0]), ("gkv", 48, answers[1])):
                row = {"row_key": method, "task": task, "doc_id": doc.doc_id, "sample": 0, "method": method}
                row |= {"budget": budget, "status": "ok", "score": 1.0, "prompt_sha256": digest.hexdigest()}
                row |= {"kept_text": 0.5, "kept_images": 0.25, "images": len(files), "image_list": listed} | more
                journal.append(row, prompt=prompt, output=turns[-1], turns=turns)
        run.seal()
    return folder / "r"


def question() -> Doc:
    return get_task("vneedle/grid-3").docs(Data(), limit=1)[0]


def show(folder: Path, *words: str) -> int:
    return main(["show", "r", "--sample", "grid-3-0", "--out", str(folder), *words])


def page(folder: Path, *words: str, sample: str = "grid-3-0") -> Any:
    file = folder / "page.html"
    assert main(["show", "r", "--sample", sample, "--out", str(folder), "--html", str(file), *words]) == 0
    return lxml.html.document_fromstring(file.read_text(encoding="utf-8"))


def test_text_shows_where_images_stood_and_the_reference_answer(tmp_path: Path, capsys: Any) -> None:
    doc = question()
    write_run(tmp_path, "vneedle/grid-3", doc)
    assert show(tmp_path) == 0
    text = capsys.readouterr().out
    assert "Image 1: <|vision_start|>[image 1]<|image_pad|><|vision_end|>\nImage 2: <|vision_start|>[image 2]" in text
    assert "-- reference answer\n" + "\n".join(doc.reference) in text
    assert "50% of text kept, 25% of images kept" in text
    assert f"-- question 2\n{doc.turns[1].user}\n-- output 2\nanswer 1" in text
    assert show(tmp_path, "--json") == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert [sample["reference"] for sample in samples] == ["\n".join(doc.reference)] * 2


def test_the_page_has_the_images_in_their_places(tmp_path: Path) -> None:
    doc = question()
    write_run(tmp_path, "vneedle/grid-3", doc)
    whole = page(tmp_path)
    shown = whole.xpath("//pre[1]//img")
    assert [image.get("alt") for image in shown] == [
        f"image {n}: {n}.png, 202x202 pixels, 4 tokens, turn 1".replace("202x202", "x".join(map(str, size)))
        for n, size in enumerate([PIL.Image.open(io.BytesIO(data)).size for data in files_of(doc)], 1)
    ]
    for image, data in zip(shown, files_of(doc), strict=True):
        kind, _, encoded = image.get("src").partition(";base64,")
        assert kind == "data:image/jpeg"
        made, own = PIL.Image.open(io.BytesIO(base64.b64decode(encoded))), PIL.Image.open(io.BytesIO(data))
        assert made.size == own.size
        differing = sum(abs(a - b) for a, b in zip(made.convert("L").tobytes(), own.convert("L").tobytes()))
        assert differing / (made.width * made.height) < 4
    before = whole.xpath("//pre[1]")[0].text_content()
    assert before.index("Image 1:") < before.index("image 1: 1.png") < before.index("Image 2:")
    assert "\n".join(doc.reference) in whole.text_content()
    assert len(whole.xpath("//article")) == 2
    assert "score 1" in whole.xpath("//article")[1].text_content()
    assert not whole.xpath("//script | //link | //iframe")
    policy = whole.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")[0]
    assert "default-src 'none'" in policy
    assert "script-src 'none'" in policy


def test_a_conversation_that_failed_shows_its_questions(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sample failed in its first turn, the second before its last."""
    doc = question()
    doc = dataclasses.replace(doc, turns=(*doc.turns, Turn(question="And then?")))
    monkeypatch.setattr(RunQuestions, "of", lambda self, entry: doc)
    second = doc.turns[1].user
    write_run(tmp_path, "vneedle/grid-3", doc, answers=[["only"], ["one", "two"]])
    assert show(tmp_path) == 0
    assert f"-- question 2\n{second}\n-- output 2\ntwo" in capsys.readouterr().out
    assert second in page(tmp_path).text_content()


def mathvista(folder: Path, data: bytes) -> Doc:
    """Data of one question with a picture, below a folder."""
    (folder / "mathvista/images").mkdir(parents=True)
    row = {"id": "1", "question": "How many?", "image": "images/1.png", "answer": "3", "answer_type": "integer"}
    row |= {"choices": None, "unit": None, "precision": None, "question_type": "free_form", "metadata": {"task": "t"}}
    (folder / "mathvista/testmini.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "mathvista/images/1.png").write_bytes(data)
    return get_task("mathvista").docs(Data(folder, allow_mismatch=True))[0]


def recorded(folder: Path) -> dict[str, Any]:
    """What a run's record says of these data."""
    source = Data(folder, allow_mismatch=True)
    get_task("mathvista").docs(source)
    sha256 = source.used["mathvista"].sha256
    return {"data": str(folder), "tasks": {"mathvista": {"version": "1", "data": {"sha256": sha256}}}}


def test_an_image_file_that_only_the_folder_names_is_not_read(tmp_path: Path) -> None:
    private = tmp_path / "private"
    doc = mathvista(private, picture().data)
    write_run(tmp_path, "mathvista", doc, environment=recorded(private))
    whole = page(tmp_path, sample="1")
    assert not whole.xpath("//img")
    assert f"give --data '{private}'" in whole.text_content()
    assert len(page(tmp_path, "--data", str(private), sample="1").xpath("//img")) == 1


@pytest.mark.parametrize("how", ["svg", "large", "broken", "link", "other", "missing"])
def test_bad_image_files_are_left_out(tmp_path: Path, how: str) -> None:
    data = tmp_path / "data"
    doc = mathvista(data, picture().data)
    write_run(tmp_path, "mathvista", doc, environment=recorded(data))
    file = data / "mathvista/images/1.png"
    file.unlink()
    if how == "link":
        (tmp_path / "secret").write_text("the user's private words")
        file.symlink_to(tmp_path / "secret")
    elif how != "missing":
        file.write_bytes({"svg": SVG, "large": large(), "other": picture(seed=1).data, "broken": b"x"}[how])
    whole = page(tmp_path, "--data", str(data), sample="1")
    assert not whole.xpath("//img")
    assert "private words" not in whole.text_content()
    assert "not those of the run" in whole.text_content()  # the files are hashed with the data


@pytest.mark.parametrize(
    ("data", "why"), [(SVG, "is no PNG, JPEG or WebP"), (large(), "pixels. Make it smaller"), (b"x", "is no")]
)
def test_hostile_data_with_right_hashes_show_no_image(tmp_path: Path, data: bytes, why: str) -> None:
    """A folder whose record was made for the file as it is."""
    place = tmp_path / "data"
    mathvista(place, picture().data)
    doc = get_task("mathvista").docs(Data(place, allow_mismatch=True))[0]
    (place / "mathvista/images/1.png").write_bytes(data)
    environment = recorded(place)
    (place / "mathvista/images/1.png").write_bytes(picture().data)
    write_run(tmp_path, "mathvista", doc, environment=environment)
    (place / "mathvista/images/1.png").write_bytes(data)
    whole = page(tmp_path, "--data", str(place), sample="1")
    assert not whole.xpath("//img")
    assert why in whole.text_content()


def test_images_of_another_prompt_are_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path, "vneedle/grid-3", question(), prompt_sha256="0" * 64)
    whole = page(tmp_path)
    assert not whole.xpath("//img")
    assert "not those that the model saw" in whole.text_content()


def test_gated_texts_stay_out_of_the_page(tmp_path: Path) -> None:
    doc = question()
    write_run(tmp_path, "gpqa_diamond", doc, answers=[["secret stem"]] * 2, extracted="secret too")
    text = page(tmp_path).text_content()
    assert "gated" in text
    assert "score 1" in text
    assert "secret" not in text
    assert doc.turns[0].question not in text


def test_metadata_of_a_file_stay_out_and_the_page_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    large = PIL.Image.effect_noise((2400, 1200), 90).convert("RGB")
    large.save(file, "JPEG", comment=b"private words", icc_profile=b"private profile", exif=b"Exif\0\0private exif")
    image = picture()
    made = pictures.embedded([type(image)(name="n", data=file.getvalue())])[0]
    decoded = base64.b64decode(made.uri.partition(",")[2])
    assert b"private" not in decoded
    assert max(PIL.Image.open(io.BytesIO(decoded)).size) == pictures.LONGEST
    monkeypatch.setattr(pictures, "MOST_BYTES", 3 * len(pictures.embedded([image])[0].uri))
    kept = [bool(one.uri) for one in pictures.embedded([image] * 5)]
    assert kept == [True, True, False, False, False]


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def hostile(folder: Path, text: str, doc: Doc) -> None:
    names = [text, "../../../../etc/passwd"]
    write_run(folder, "vneedle/grid-3", doc, names=names, extracted=text, stop_reason=text, answers=[[text, text]] * 2)


def elements(whole: Any) -> list[tuple[str, ...]]:
    return [(one.tag, *one.attrib) for one in whole.iter() if isinstance(one.tag, str)]


def test_hostile_text_adds_no_element(tmp_path: Path) -> None:
    doc = question()
    (tmp_path / "plain").mkdir()
    hostile(tmp_path / "plain", "harmless", doc)
    plain = elements(page(tmp_path / "plain"))
    for number, text in enumerate(CASES):
        (folder := tmp_path / str(number)).mkdir()
        hostile(folder, text, doc)
        assert elements(page(folder)) == plain, text


def test_hostile_text_never_runs_and_the_page_asks_for_nothing(tmp_path: Path, window: Browser) -> None:
    hostile(tmp_path, "\n".join(CASES), question())
    page(tmp_path)
    window.open(tmp_path / "page.html")
    seen = window.run(
        "return [typeof window.__x, performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:'))"
        ".length, [...document.images].map(i => i.complete && i.naturalWidth > 0)]"
    )
    assert seen == ["undefined", 0, [True, True]]
    assert window.complaints() == []


@pytest.mark.parametrize(
    "stored",
    ["[]", "3", "[1]", '[{"name": 1}]', '[{"name": "a", "width": 1, "height": 1, "tokens": -1, "turn": 1}]', "[" * 99],
)
def test_a_list_of_images_that_is_none_is_empty(stored: str) -> None:
    assert image_list.images(stored) == []


@pytest.mark.parametrize("places", [[5, 2], [99], [2, 99]])
def test_places_outside_a_prompt_leave_it_whole(places: list[int]) -> None:
    about = {"name": "a", "width": 1, "height": 1, "tokens": 1, "turn": 1}
    listed = image_list.images(json.dumps([about | {"at": place} for place in places]))
    assert image_list.split("a prompt", listed) == ["a prompt"]


def test_a_page_is_of_one_question(tmp_path: Path, capsys: Any) -> None:
    assert main(["show", "r", "--out", str(tmp_path), "--html", "x.html"]) == 2
    assert "Give --sample ID too" in capsys.readouterr().err
