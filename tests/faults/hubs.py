"""A hub that refuses, hangs, or goes away. F21."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.stage import NO_WEIGHTS, RUN, Stage, scenario
from support.commands import Before, Tell, hold
from support.hub import Hub, Repo

from kvbench import tiny
from kvbench.sources import hub as product

LIBRARY = 1  # questions that the hub's library may put for itself
TASK = RUN.replace("--task walk/orbit-100", "--task math500")


@scenario("F21")
def unreachable(stage: Stage) -> None:
    pauses = sum(product.PAUSE * 2**n for n in range(product.TRIES - 1))
    assert (product.TRIES + LIBRARY) * product.SECONDS + pauses <= 60
    with _silent() as (silent, connections):
        for url, tries in (("http://127.0.0.1:9", 0), (silent, product.TRIES)):
            for line, text in ((f"{RUN} --model org/x", "org/x"), (TASK, "math500")):
                connections.clear()
                ended = stage.call(line, _hub_at(url, stage.folder, NO_WEIGHTS, seconds=0.1))
                assert (ended.code, ended.out) == (3, ""), ended
                assert "the hub" in ended.err
                assert text in ended.err
                assert tries <= len(connections) <= tries + LIBRARY
    _gone_in_mid_run(stage)


def _gone_in_mid_run(stage: Stage) -> None:
    files = {path.name: path.read_bytes() for path in tiny.path().iterdir() if path.is_file() and path.suffix != ".py"}
    gate = stage.folder / "gate"
    with Hub({"org/tiny": Repo(files)}).running() as hub:
        url = hub.url
        command = stage.start(f"{RUN} --model org/tiny", _hub_at(url, stage.folder, hold(gate)))
        command.wait_for("holding")
    gate.unlink()
    ended = command.end()
    assert ended.code == 0, ended
    stage.check_final(apart_from=("row_key", "model", "model_revision"))
    again = stage.done("score r1 --all -q", _hub_at(url, stage.folder))  # nor does scoring
    assert "hub" not in again.err


@contextmanager
def _silent() -> Iterator[tuple[str, list[str]]]:
    """A server that takes connections and never answers; who came."""
    came: list[str] = []
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                kept.append(connection)
                came.append(str(address))

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


def _hub_at(url: str, home: Path, then: Before | None = None, *, seconds: float = 10.0) -> Before:
    """A hub at this address that is given so many seconds for an answer, and an empty cache."""

    def before(tell: Tell) -> None:
        import huggingface_hub
        import transformers.utils.hub

        cache = str(home / "hub")
        constants = huggingface_hub.constants
        constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = url, False, cache
        constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        constants.HF_HUB_DISABLE_XET = True
        transformers.utils.hub.TRANSFORMERS_CACHE = cache
        product.SECONDS, product.PAUSE = seconds, 0.01
        if then:
            then(tell)

    return before
