"""Image files that rows name: in a data folder, from a table and from an archive on a hub, and what can be wrong."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from support.hub import Hub, Repo, environment
from support.vision import picture

from kvbench.errors import SetupError
from kvbench.sources import image_files
from kvbench.sources.data import Data
from kvbench.sources.data.images import unpack
from kvbench.task import Image, Manifest

ONE = Manifest(path="t/t.jsonl", rows=2, hub="org/t", split="test", images="image")
PINNED = "3" * 40
RED, BLUE, JPEG = picture(seed=1).data, picture(seed=2).data, picture(seed=3, kind="JPEG").data
NAMES = ["images/1.png", "images/2.jpg"]


def put(folder: Path, *rows: dict, **files: bytes) -> Path:
    (folder / "t" / "images").mkdir(parents=True, exist_ok=True)
    (folder / "t" / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, data in files.items():
        (folder / "t" / "images" / name.replace("__", ".")).write_bytes(data)
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    rows = [{"id": "a", "image": NAMES[0]}, {"id": "b", "image": NAMES[1]}]
    return put(tmp_path, *rows, **{"1__png": RED, "2__jpg": JPEG})


def read(folder: Path, manifest: Manifest = ONE) -> tuple[list[dict], str | None]:
    source = Data(folder, env={}, allow_mismatch=True)
    return source.rows("t", manifest), source.used["t"].sha256


def test_rows_hold_images_that_are_read_later(good: Path) -> None:
    rows, _ = read(good)
    assert [type(row["image"]) for row in rows] == [Image, Image]
    assert [row["image"].name for row in rows] == NAMES
    assert [row["image"].data for row in rows] == [b"", b""]
    assert [image_files.encoded(row["image"]) for row in rows] == [RED, JPEG]


def test_a_list_of_names_and_a_leading_slash(good: Path) -> None:
    put(good, {"image": ["/images/1.png", "images/2.jpg", "images/1.png"]})
    ((row,), _) = read(good)
    assert [image_files.encoded(image) for image in row["image"]] == [RED, JPEG, RED]


def test_the_hash_covers_rows_names_and_pixels(good: Path, tmp_path: Path) -> None:
    _, before = read(good)
    assert read(good)[1] == before
    (good / "t" / "images" / "1.png").write_bytes(BLUE)
    _, changed = read(good)
    put(good, {"id": "a", "image": NAMES[1]}, {"id": "b", "image": NAMES[0]})
    assert len({before, changed, read(good)[1]}) == 3


def test_links_are_followed_as_for_the_rows(good: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "1.png"
    (good / "t" / "images" / "1.png").rename(elsewhere)
    os.symlink(elsewhere, good / "t" / "images" / "1.png")
    assert image_files.encoded(read(good)[0][0]["image"]) == RED


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("images/9.png", r"row 2: image '.*/t/images/9\.png' does not exist"),
        ("../secret.png", r"row 2: image '\.\./secret\.png' is not a path inside the folder"),
        ("images/../../x.png", r"row 2: image '.*' is not a path inside the folder"),
        ("//../x.png", r"is not a path inside the folder"),
        ("images\\1.png", r"is not a path inside the folder"),
        ("C:/1.png", r"is not a path inside the folder"),
        ("/", r"is not a path inside the folder"),
        ("images", r"row 2: image '.*/t/images' is a folder"),
        ("", r"row 2: column 'image' must be the name of an image file"),
        (None, r"row 2: column 'image' must be the name of an image file"),
        ([], r"row 2: column 'image' must be the name of an image file"),
        ([NAMES[0], 7], r"row 2: column 'image' must be the name of an image file"),
    ],
)
def test_wrong_images_get_a_line(good: Path, name: object, message: str) -> None:
    put(good, {"image": NAMES[0]}, {"image": name})
    (good / "secret.png").write_bytes(RED)
    with pytest.raises(SetupError, match=rf"^data of task 't', .*{message}") as error:
        read(good)
    assert "\n" not in str(error.value)


def broken(archive: bytes, place: int, value: int) -> bytes:
    return archive[:place] + bytes([value]) + archive[place + 1 :]


@pytest.mark.parametrize("case", ["deflate", "encrypted", "method", "cut", "lzma"])
def test_a_broken_archive_gets_a_line(tmp_path: Path, case: str) -> None:
    path, packing = tmp_path / "a.zip", zipfile.ZIP_LZMA if case == "lzma" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(path, "w", packing) as archive:
        archive.writestr("1.png", bytes(1000))
    data = path.read_bytes()
    local, central = data.index(b"1.png"), data.rindex(b"PK\1\2")
    path.write_bytes(
        {
            "deflate": lambda: broken(data, local + 5, 0xFF),
            "encrypted": lambda: broken(broken(data, 6, 1), central + 8, 1),
            "method": lambda: broken(broken(data, 8, 97), central + 10, 97),
            "cut": lambda: data[:40],
            "lzma": lambda: broken(data, local + 9, 0xFF),
        }[case]()
    )
    with pytest.raises(SetupError, match=r"a\.zip' is no zip archive that kvbench can unpack \(") as error:
        unpack(path, ["1.png"], tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "1.png").exists()


# --- from a hub -------------------------------------------------------------------------------------------------------

TASKS = f"""
from kvbench.registry import tasks
from kvbench.task import Manifest, Task

class Base(Task):
    def docs(self, source, *, style="default", limit=None): raise NotImplementedError
    def gen(self, model_type): raise NotImplementedError
    def score(self, doc, output): raise NotImplementedError

def register(name, **fields):
    fields = {{"revision": "{PINNED}", **fields}}
    manifest = Manifest(path=f"{{name}}/{{name}}.jsonl", rows=2, images="image", **fields)
    tasks.register(name)(type(name, (Base,), {{"manifest": manifest}}))

register("table", hub="org/table", split="test", pixels="decoded")
register("packed", hub="org/packed", files=("list.json",), archive="pics.zip")
register("newest", hub="org/packed", files=("list.json",), archive="pics.zip", revision=None)
register("lacking", hub="org/lacking", files=("list.json",), archive="pics.zip")
register("hostile", hub="org/hostile", files=("list.json",), archive="pics.zip")
"""


def table() -> bytes:
    cells = [{"bytes": RED, "path": None}, {"bytes": JPEG, "path": "2.jpg"}]
    feature = {"decoded": {"_type": "Image"}, **{k: {"_type": "Value", "dtype": "string"} for k in ("id", "image")}}
    columns = pa.table({"id": ["a", "b"], "image": NAMES, "decoded": cells})
    columns = columns.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": feature}})})
    file = io.BytesIO()
    pyarrow.parquet.write_table(columns, file)
    return file.getvalue()


def packed(*names: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in zip(names, (RED, JPEG), strict=True):
            archive.writestr(name, data)
        archive.writestr("pics/not_asked_for.png", BLUE)
    return file.getvalue()


LIST = [{"id": "a", "image": ["/pics/1.png"]}, {"id": "b", "image": ["/pics/2.jpg", "/pics/1.png"]}]
HOSTILE = [{"id": "a", "image": ["pics/1.png"]}, {"id": "b", "image": ["/../../escaped.png"]}]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    rows, bad = (json.dumps(listed).encode() for listed in (LIST, HOSTILE))
    good = packed("pics/1.png", "pics/2.jpg")
    repos = {
        "datasets/org/table": Repo({"data/test-00000-of-00001.parquet": table()}, PINNED),
        "datasets/org/packed": Repo({"list.json": rows, "pics.zip": good}, PINNED),
        "datasets/org/lacking": Repo({"list.json": rows, "pics.zip": packed("pics/1.png", "other/2.jpg")}, PINNED),
        "datasets/org/hostile": Repo({"list.json": bad, "pics.zip": packed("pics/1.png", "../../escaped.png")}, PINNED),
    }
    with Hub(repos).running() as hub:
        yield hub


def test_images_come_from_a_hub_and_go_into_a_folder(calls: Callable, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASKS)
    there = environment(hub.url, tmp_path)
    off = there | {"HF_HUB_OFFLINE": "1"}
    lines = {
        "fetch": ("fetch table packed newest --out d --json", there),
        "again": ("fetch table packed newest --out d --json", off),
        "folder": ("check table packed newest --data d --json", off),
        "cache": ("check table packed newest --json", off),
        "lacking": ("fetch lacking --out d", there),
        "hostile": ("fetch hostile --out d", there),
    }
    plugin = ["--plugin", str(tmp_path / "mine.py")]
    did = dict(zip(lines, calls(tmp_path, [(["data", *line.split(), *plugin], env) for line, env in lines.values()])))
    assert {name: did[name].code for name in lines} == {
        **dict.fromkeys(("fetch", "again", "folder", "cache"), 0),
        **dict.fromkeys(("lacking", "hostile"), 3),
    }, {name: result.err for name, result in did.items()}
    assert (tmp_path / "d" / "table" / "images" / "1.png").read_bytes() == RED  # as stored, not encoded anew
    assert (tmp_path / "d" / "table" / "images" / "2.jpg").read_bytes() == JPEG
    rows = [json.loads(line) for line in (tmp_path / "d" / "table" / "table.jsonl").read_text().splitlines()]
    assert rows == [{"id": "a", "image": NAMES[0]}, {"id": "b", "image": NAMES[1]}]
    assert json.loads((tmp_path / "d" / "packed" / "packed.jsonl").read_text()) == LIST
    assert sorted(path.name for path in (tmp_path / "d" / "packed" / "pics").iterdir()) == ["1.png", "2.jpg"]
    assert "/pics/2.jpg' does not exist" in did["lacking"].err
    assert "is not a path inside the folder" in did["hostile"].err
    assert not list(tmp_path.rglob("escaped.png"))
    for name in ("folder", "cache"):
        states = {row["task"]: row["state"] for row in json.loads(did[name].out)["tasks"]}
        assert states == dict.fromkeys(("newest", "packed", "table"), "ok")
