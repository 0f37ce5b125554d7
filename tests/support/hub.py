"""A hub on this machine: repositories in memory behind the hub's own addresses, and the refusals it knows.

hub = Hub({"datasets/org/t": Repo({"data.jsonl": b"..."}), "org/m": Repo({...}, gated=True)})
with hub.running(): kvbench(..., env=hub.environment(tmp_path))
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1111111111111111111111111111111111111111"
_REPO = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+)"
_ADDRESSES = {
    "tree": re.compile(rf"/api/(?:models/)?{_REPO}/(?:tree|paths-info)/(?P<revision>[^/]+)/?(?P<folder>.*)"),
    "file": re.compile(rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)"),
    "info": re.compile(rf"/api/(?:models/)?{_REPO}(?:/revision/(?P<revision>[^/]+))?/?"),
}


@dataclass
class Repo:
    """`gated`: its files are refused. `status`: what everything answers with, where that is not 200."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    commit: str = COMMIT
    gated: bool = False
    status: int = 200


@dataclass
class Hub:
    repos: dict[str, Repo] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    url: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[Hub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub._answer(self, body=True)

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a process that is to use this hub, with caches of its own."""
        return environment(self.url, home)

    def _answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        self.asked.append(f"{handler.command} {path}")
        if token := handler.headers.get("Authorization"):
            self.tokens.append(token)
        status, headers, data = self._find(path)
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)

    def _find(self, path: str) -> tuple[int, dict[str, str], bytes]:
        matches = {name: match for name, pattern in _ADDRESSES.items() if (match := pattern.fullmatch(path))}
        if not matches:
            return 404, {}, b"{}"
        kind, found = next((name, match.groupdict()) for name, match in matches.items())
        repo = self.repos.get(found["repo"])
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b"{}"
        if repo.status != 200:
            return repo.status, {}, b"{}"
        if found.get("revision") not in (None, "main", repo.commit):
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}, b"{}"
        if kind == "info":
            return 200, {"Content-Type": "application/json"}, json.dumps(self._info(found["repo"], repo)).encode()
        if kind == "tree":
            return 200, {"Content-Type": "application/json"}, json.dumps(_tree(repo, found["folder"])).encode()
        if repo.gated:
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this repository is restricted"}
            return 403, headers, b"{}"
        if found["file"] not in repo.files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit}, b""
        data = repo.files[found["file"]]
        etag = '"' + hashlib.sha1(data).hexdigest() + '"'
        return 200, {"ETag": etag, "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}, data

    @staticmethod
    def _info(name: str, repo: Repo) -> dict[str, object]:
        return {
            "id": name.removeprefix("datasets/"),
            "sha": repo.commit,
            "private": False,
            "gated": "manual" if repo.gated else False,
            "tags": [],
            "siblings": [{"rfilename": file} for file in repo.files],
        }


def _tree(repo: Repo, folder: str) -> list[dict[str, object]]:
    """Files and folders directly in a folder."""
    prefix = f"{folder}/" if folder else ""
    below = {name.removeprefix(prefix): data for name, data in repo.files.items() if name.startswith(prefix)}
    folders = sorted({name.split("/")[0] for name in below if "/" in name})
    return [
        *({"type": "directory", "path": prefix + name, "oid": "0" * 40} for name in folders),
        *(
            {"type": "file", "path": prefix + name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in below.items()
            if "/" not in name
        ),
    ]


def environment(url: str, home: Path) -> dict[str, str]:
    """Variables for a process that is to use the hub at an address."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_TOKEN": "",
    }
