"""Downloads from web addresses: whole and right, or not kept; https, or this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvbench.errors import SetupError
from kvbench.sources.data import Data, cache
from kvbench.sources.data.export import fetch
from kvbench.task import Manifest

BODY = b'{"data": [1, 2, 3]}\n' * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server; what it kept is in tmp_path/cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            if name == "elsewhere":
                self.send_response(302)
                self.send_header("Location", "http://example.com/dev.json")
                self.end_headers()
                return
            self.send_response(404 if name == "none" else 200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY[:500] if name == "cut" else BODY)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def kept(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_download_is_kept_and_told(web: str, tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    file = cache.download(f"{web}/dev.json", sha256=SHA256, bar=lambda *state: told.append(state))
    assert file.read_bytes() == BODY
    assert told[-1] == ("dev.json", len(BODY), len(BODY))
    again = cache.download(f"{web}/dev.json", sha256=SHA256, bar=lambda *state: pytest.fail("asked again"))
    assert again == file
    assert kept(tmp_path) == ["dev.json"]


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        (
            "dev.json",
            {"sha256": "0" * 64},
            rf"is not the expected file \(sha256 {SHA256[:12]}, expected 000000000000\)",
        ),
        ("dev.json", {"limit": 100}, "is larger than 100 bytes, the limit of a download; it was not kept"),
        ("none", {}, "the server answers with HTTP status 404"),
        ("cut", {}, "cannot be reached: .*closed"),
        ("elsewhere", {}, "redirects the download to 'http://example.com/dev.json', which is not https"),
    ],
)
def test_what_is_not_kept(web: str, tmp_path: Path, name: str, more: dict, what: str) -> None:
    with pytest.raises(SetupError, match=what):
        cache.download(f"{web}/{name}", **more)
    assert kept(tmp_path) == []


def test_only_https_is_spoken() -> None:
    for url in ("http://example.com/x", "ftp://example.com/x", "file:///etc/passwd"):
        with pytest.raises(SetupError, match="is not https"):
            cache.download(url)


def test_a_task_fetches_from_an_address(web: str, tmp_path: Path) -> None:
    manifest = Manifest(path="ruler/squad.json", rows=None, url=f"{web}/dev.json", url_sha256=SHA256)
    assert Data(env={}).find("t", manifest) is None
    used = fetch("t", manifest, tmp_path / "d")
    assert (used.sha256, used.source) == (SHA256, "--data")
    assert (tmp_path / "d/ruler/squad.json").read_bytes() == BODY
    here = Data(env={})
    assert here.file("t", manifest).read_bytes() == BODY
    assert here.used["t"].source == "hub"
    assert here.used["t"].location == manifest.url


def test_an_address_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    manifest = Manifest(path="ruler/squad.json", rows=None, url="http://127.0.0.1:9/dev.json")
    with pytest.raises(
        SetupError, match=r"task 't' is not on this machine and 'http://127\.0\.0\.1:9/dev\.json' is unreach"
    ):
        Data(env={}).file("t", manifest)


def test_rows_of_an_address(web: str, tmp_path: Path) -> None:
    manifest = Manifest(path="t/rows.jsonl", rows=1000, url=f"{web}/rows.jsonl")
    rows = Data(env={}).rows("t", manifest)
    assert rows[0] == json.loads(BODY.splitlines()[0])


def test_a_cache_that_cannot_be_written(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plain"))
    with pytest.raises(SetupError, match=r"cannot write '.*dev\.json': Not a directory"):
        cache.download(f"{web}/dev.json")


def test_data_in_kvbench_data_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    manifest = Manifest(path="sums/sums.jsonl", rows=2, hub="org/sums", split="test", revision="0" * 40)
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "sums").mkdir(parents=True)
    (here / "sums/sums.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    monkeypatch.setenv("KVBENCH_DATA", str(here))
    assert fetch("sums", manifest, there).rows == 2
    assert (there / "sums/sums.jsonl").read_bytes() == (here / "sums/sums.jsonl").read_bytes()
    (here / "sums/sums.jsonl").write_text('{"id": "a"}\n')  # not the expected rows: the hub would be asked
    with pytest.raises(SetupError, match="hub is unreachable"):
        fetch("sums", manifest, tmp_path / "elsewhere")


@pytest.mark.parametrize("theirs", [[], ["a.png"]])
def test_a_folder_that_another_process_fills_meanwhile_is_taken(theirs: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "images"
    with cache.filling(folder) as fresh:
        fresh.mkdir()
        (fresh / "b.png").touch()
        folder.mkdir()
        for name in theirs:
            (folder / name).touch()
    assert [path.name for path in folder.iterdir()] == (theirs or ["b.png"])
