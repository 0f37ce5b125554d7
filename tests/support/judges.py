"""A judge on this machine that answers as a test wants, over real HTTP: acts, and the fixture that plays them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvbench.scoring.judge import settings

KEY = "sk-canary0123456789abcdefXYZ"


@dataclass
class Got:
    """One request as the server saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def user(self) -> str:
        return self.body["messages"][-1]["content"]


Act = Callable[[BaseHTTPRequestHandler, Got], None]


@dataclass
class Server:
    """Plays its acts one after the other, the last one for ever."""

    acts: list[Act] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    url: str = ""

    def act(self, handler: BaseHTTPRequestHandler) -> None:
        size = int(handler.headers.get("Content-Length") or 0)
        got = Got(
            handler.path, {k.lower(): v for k, v in handler.headers.items()}, json.loads(handler.rfile.read(size))
        )
        self.got.append(got)
        act = self.acts[min(len(self.got), len(self.acts)) - 1]
        act(handler, got)


def send(status: int, body: bytes | str = b"", **headers: str) -> Act:
    data = body.encode() if isinstance(body, str) else body

    def act(handler: BaseHTTPRequestHandler, got: Got) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(data)

    return act


def say(text: str, model: str = "judge-1-0711") -> Act:
    return send(200, json.dumps({"model": model, "choices": [{"message": {"role": "assistant", "content": text}}]}))


def hang(handler: BaseHTTPRequestHandler, got: Got) -> None:
    time.sleep(3)


def drip_headers(handler: BaseHTTPRequestHandler, got: Got) -> None:
    """Never silent for long, never done."""
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
    for _ in range(30):
        handler.wfile.write(b"a")
        time.sleep(0.1)


def drip_body(handler: BaseHTTPRequestHandler, got: Got) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
    for _ in range(30):
        handler.wfile.write(b" ")
        time.sleep(0.1)


@contextlib.contextmanager
def playing(server: Server) -> Iterator[Server]:
    """The server at an address of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client had enough
                server.act(self)

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    try:
        yield server
    finally:
        http.shutdown()
        http.socket.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """serve(act, act, ...) starts a server. The judge's key is in JUDGE_KEY; no judge outlives a test."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(settings, "_judges", {})
    with contextlib.ExitStack() as running:
        yield lambda *acts: running.enter_context(playing(Server(acts=list(acts))))
