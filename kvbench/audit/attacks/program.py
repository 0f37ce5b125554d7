"""One hostile program of a corpus, and its targets: the files, sockets and process that it attacks.

An attack is a Python file that begins with comment lines ``# name: value``: id, class, mode (stdio or call), check (the
kinds of success to look for, separated by commas), expected-status, and stdin-bytes (padding of the input). Before the
program runs, each ``@@NAME@@`` in its text is replaced by the value with this name. Most values are paths, ports or
process ids of targets. All targets are harmless: files in a temporary folder, sockets on loopback, a sleeping process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import selectors
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.console import signals
from kvbench.scoring.sandbox.cleanup import remove_tree

_HEADER = re.compile(r"^# ([a-z-]+): (.*)$", re.MULTILINE)
_CANARIES = ("hub", "netrc", "ssh", "aws", "host", "package", "variable", "key", "argument")


@dataclass(frozen=True, slots=True)
class Attack:
    """A hostile program: its text, and the fields that the header of its file states."""

    id: str
    kind: str
    mode: str
    checks: tuple[str, ...]
    expected_status: str
    stdin_bytes: int
    source: str

    @classmethod
    def read(cls, text: str, name: str) -> Attack:
        """Parse the text of a hostile program. `name` is the id if the header has none. Raises ValueError if the header
        lacks a required line (class, mode or check), or if its stdin-bytes is not a whole number."""
        head = dict(_HEADER.findall(text.partition("\n\n")[0]))
        try:
            return cls(
                id=head.get("id", name),
                kind=head["class"],
                mode=head["mode"],
                checks=tuple(head["check"].split(",")),
                expected_status=head.get("expected-status", "any"),
                stdin_bytes=int(head.get("stdin-bytes", 0)),
                source=text,
            )
        except KeyError as missing:
            key = missing.args[0]
            raise ValueError(f"{name} has no header line '# {key}: VALUE'; add it at the top") from None

    def filled(self, values: Mapping[str, Any]) -> str:
        """Return the program's text with ``@@NAME@@`` replaced by ``values["NAME"]`` for every name in `values`."""
        source = self.source
        for name, value in values.items():
            source = source.replace(f"@@{name}@@", str(value))
        return source


@dataclass
class Targets:
    """The targets of one hostile program, and a record of the sockets that it reached and the bytes that it sent."""

    folder: Path
    canaries: dict[str, str]  # secrets that must not leave the sandbox
    values: dict[str, Any]  # NAME -> the value that replaces ``@@NAME@@`` in the program
    sentinel: subprocess.Popen[bytes]  # a process to kill
    reached: set[str] = field(default_factory=set)  # sockets to which the program connected
    received: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self._contents()

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def changed(self) -> bool:
        return self.before != self._contents()

    def left(self) -> list[str]:
        """Return the names of the files and of the shared memory segment that the program left behind."""
        token, key = self.values["TOKEN"], self.values["SHMKEY"]
        leftovers = [name for name in os.listdir(self.temporary) if not name.startswith("kvbench-second-try-")]
        leftovers += [str(path) for place in ("/dev/shm", "/var/tmp") for path in Path(place).glob(f"evil-{token}*")]
        with contextlib.suppress(OSError):
            rows = Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()
            leftovers += [f"segment {key}" for row in rows if row.split()[:1] == [str(key)]]
        return leftovers

    def environment(self) -> dict[str, str]:
        """Return all environment variables of the grader. `watch` measures the size of the grader's TMPDIR."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        return kept | {
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": self.values["HOME"],
            "TMPDIR": str(self.temporary),
            "HF_TOKEN": self.canaries["variable"],
            "OPENAI_API_KEY": self.canaries["key"],
        }

    def _contents(self) -> dict[str, tuple[Any, ...]]:
        contents: dict[str, tuple[Any, ...]] = {}
        for name in ("home", "victim", "grader"):
            for path in (self.folder / name).rglob("*"):
                status = path.lstat()
                plain = stat.S_ISREG(status.st_mode)
                digest = hashlib.sha1(path.read_bytes()).hexdigest() if plain else ""
                contents[str(path)] = (status.st_mode, status.st_size, int(status.st_mtime) if plain else 0, digest)
        return contents


@contextlib.contextmanager
def targets(expected: str) -> Iterator[Targets]:
    """Create the files, sockets and process that one program attacks; remove them when the `with` statement ends.
    expected: the output that the program's test expects; one of the files holds this text as bait."""
    folder = Path(tempfile.mkdtemp(prefix="kvbench-attack-"))
    folder.chmod(0o755)
    token, canaries = secrets.token_hex(8), {name: f"CANARY-{secrets.token_hex(16)}" for name in _CANARIES}
    for name, text in {
        "home/.cache/huggingface/token": canaries["hub"],
        "home/.netrc": canaries["netrc"],
        "home/.ssh/id_ed25519": canaries["ssh"],
        "home/.aws/credentials": canaries["aws"],
        "hostfile": canaries["host"],
        "grader/kvbench_private_marker/__init__.py": f"SECRET = {canaries['package']!r}\n",
        "victim/rows.parquet": "PAR1" * 50,
        "victim/journal.jsonl": "{}\n" * 50,
        "victim/expected.json": f'{{"expected": "{expected}"}}',
        "tmp/": "",
    }.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if text:
            path.write_text(text, encoding="utf-8")
    sleeper = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
    with contextlib.ExitStack() as stack:
        stack.callback(remove_tree, folder)
        sockets = _sockets(stack, folder, token)
        sentinel = subprocess.Popen(sleeper, start_new_session=True)
        signals.at_end(sentinel.kill)
        stack.callback(signals.not_at_end, sentinel.kill)
        stack.callback(sentinel.wait)
        stack.callback(sentinel.kill)
        values = {
            "HOST_FILE": folder / "hostfile",
            "HOME": str(folder / "home"),
            "VICTIM": folder / "victim",
            "GRADER_PATH": folder / "grader",
            "PORT": sockets["tcp"].getsockname()[1],
            "UDP": sockets["udp"].getsockname()[1],
            "ABSTRACT": f"abs-{token}",
            "UNIX": folder / "u.sock",
            "LISTEN_PORT": _free_port(),
            "SENTINEL_PID": sentinel.pid,
            "TOKEN": token,
            "SHMKEY": secrets.randbelow(1 << 29) + (1 << 24),
        }
        aims = Targets(folder, canaries, values, sentinel)
        stack.enter_context(_listening(sockets, aims))
        yield aims


def _sockets(stack: contextlib.ExitStack, folder: Path, token: str) -> dict[str, socket.socket]:
    kinds: dict[str, tuple[int, int, Any]] = {
        "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0abs-{token}"),
        "unix": (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "u.sock")),
    }
    sockets = {}
    for name, (family, kind, address) in kinds.items():
        sockets[name] = stack.enter_context(socket.socket(family, kind))
        sockets[name].bind(address)
        sockets[name].setblocking(False)
        if kind == socket.SOCK_STREAM:
            sockets[name].listen()
    return sockets


@contextlib.contextmanager
def _listening(sockets: Mapping[str, socket.socket], aims: Targets) -> Iterator[None]:
    """Start a thread that receives what is sent to the sockets, until the `with` statement ends. It records in `aims`
    the names of the sockets that were reached, and the bytes."""
    done = threading.Event()

    def serve() -> None:
        with selectors.DefaultSelector() as ready:
            for name, listener in sockets.items():
                ready.register(listener, selectors.EVENT_READ, name)
            while not done.is_set():
                for key, _ in ready.select(0.1):
                    with contextlib.suppress(OSError):
                        aims.reached.add(key.data)
                        aims.received.append(_take(sockets[key.data], key.data == "udp"))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _take(listener: socket.socket, datagrams: bool) -> bytes:
    if datagrams:
        return listener.recv(65536)
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(0.5)
        return connection.recv(65536)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
