"""Run folders as a stranger might send them, and what must not happen when kvbench opens them.

base = Path("results/walk")                      # a genuine run
case = outside / ...                             # files of the user that a folder may try to reach
for name, spoil in ways(outside, url).items():   # copies of the run, each spoilt in one way, with valid hashes
    spoil(copy)

A `Recorder` is a server on this machine that keeps every request it gets, as a judge and as the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kvbench.store.identity import canonical_json

CANARY = "canary-0815-aws-secret"  # in the variable that a folder names as the judge's key
PRIVATE = "the user's private words"  # in files that a folder names or links to
PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
from kvbench.eviction.api import Method
from kvbench.registry import methods

Path(__file__).with_suffix(".ran").write_text("imported")

@methods.register("evil")
@dataclass(frozen=True)
class Evil(Method):
    def score(self, view):
        return view.positions.float()
"""
FILES = ("run.json", "rows.parquet", "texts.parquet", "seal.json", "lock")
REPORTS = ("report.md", "report.csv", "report.json")

Spoil = Callable[[Path], None]


@dataclass
class Recorder:
    """Answers everything with 404 and keeps what it was sent."""

    got: list[str] = field(default_factory=list)
    url: str = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[Recorder]:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if self.raw_requestline and self.parse_request():
                    recorder.got.append(f"{self.requestline} {dict(self.headers)}")
                    self.send_error(404)
                self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def edit(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a run.json and make its hashes anew, as somebody who means it would."""
    record = json.loads((run / "run.json").read_text())
    change(record)
    if "hashes" in record:
        kept = {part: value for part, value in record.items() if part not in ("hash", "hashes")}
        record["hashes"] = {part: _hash({part: value}) for part, value in kept.items()}
        record["hash"] = _hash({**kept, "hash": None, "hashes": record["hashes"]})
    (run / "run.json").write_text(json.dumps(record))


def _hash(value: object) -> str:
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def append(run: Path, payload: bytes) -> None:
    """One more record in the journal, with its checksum."""
    (segment,) = sorted((run / "journal").iterdir())[:1]
    with segment.open("ab") as file:
        file.write(b"%08x %s\n" % (zlib.crc32(payload), payload))


def first_row(run: Path) -> dict[str, Any]:
    (segment,) = sorted((run / "journal").iterdir())[:1]
    row: dict[str, Any] = json.loads(segment.read_bytes().splitlines()[0][9:])
    return row


def outside(folder: Path) -> Path:
    """Files of the user, beside the results."""
    folder.mkdir()
    for name in (*FILES, *REPORTS, "template.jinja", "segment.jsonl"):
        (folder / name).write_text(f"{PRIVATE} in {name}")
    (folder / "evil.py").write_text(PLUGIN)
    (folder / "folder").mkdir()
    (folder / "folder" / "kept.md").write_text(PRIVATE)
    return folder


def state(folder: Path) -> dict[str, Any]:
    """Every file below a folder with its content, none of them followed."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        plain = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = path.read_bytes() if plain else os.lstat(path).st_mode
    return found


def ways(user: Path, url: str) -> dict[str, Spoil]:
    """Ways to spoil a run, by name."""
    found: dict[str, Spoil] = {
        "plugin": lambda run: edit(run, lambda r: _plugin(r, str(user / "evil.py"))),
        "plugin-inside": _plugin_inside,
        "judge": lambda run: edit(run, lambda r: _judge(r, f"{url}/v1")),
        "unsafe": lambda run: edit(run, lambda r: r["environment"].update(unsafe_run_code=True)),
        "hub-model": lambda run: edit(run, lambda r: r["config"].update(model="evil/model")),
        "hub-draft": lambda run: edit(run, _draft),
        "hub-task": lambda run: edit(
            run, lambda r: r["config"]["grids"][0].update(tasks=["gsm8k", "lm_eval:arc_easy"])
        ),
        "template": lambda run: edit(run, lambda r: _template(r, user, None)),
        "template-hash": lambda run: edit(run, lambda r: _template(r, user, "0" * 64)),
        "task-file": lambda run: edit(run, lambda r: r["config"].update(task_file=str(user / "run.json"))),
        "data": lambda run: edit(run, lambda r: r["environment"].update(data=str(user))),
        "data-variable": lambda run: edit(run, lambda r: r["environment"].update(data_variable="/dev/zero")),
        "escapes": lambda run: edit(run, lambda r: r["environment"].update(plugin=["\x1b[2J\n--plugin x.py", "-x"])),
        "deep": lambda run: _whole(run, b'{"config":' * 100_000),
        "deep-list": lambda run: _whole(run, b"[" * 100_000 + b"]" * 100_000),
        "huge": lambda run: _whole(run, b'{"format": 1' + b"0" * 100_000 + b"}"),
        "infinite": lambda run: _text(run, '"seed": 0', '"seed": 1e400'),
        "nan": lambda run: _text(run, '"seed": 0', '"seed": NaN'),
        "surrogate": lambda run: edit(run, lambda r: r["config"].update(model="\ud800")),
        "huge-seed": lambda run: edit(run, lambda r: r["config"].update(seed=10**4000)),
        "hardlink": lambda run: os.link(user / "lock", run / "lock"),
        "leftover-folder": lambda run: (run / ".rows.parquet.1-01234567.tmp").mkdir(),
        "lock-deep": lambda run: _bytes(run / "lock", b"[" * 4096),
        "lock-huge": lambda run: _bytes(run / "lock", b'{"host":"h","boot":"b","pid":1e400,"ticks":1,"since":1}'),
        "seal-deep": lambda run: _bytes(run / "seal.json", b"[" * 100_000),
        "journal-link": lambda run: _moved(run / "journal", user / "folder"),
        "journal-file": lambda run: _instead(run / "journal", lambda path: path.write_text("x")),
        "segment-link": lambda run: (run / "journal" / "z.jsonl").symlink_to(user / "segment.jsonl"),
        "segment-pipe": lambda run: os.mkfifo(run / "journal" / "z.jsonl"),
        "segment-device": lambda run: (run / "journal" / "z.jsonl").symlink_to("/dev/zero"),
        "report-link": lambda run: _instead(run / "report", lambda path: path.symlink_to(user / "folder")),
        "report-file": lambda run: _instead(run / "report", lambda path: path.write_text("x")),
        "plugin-hash": lambda run: edit(run, lambda r: r["environment"].update(plugins=[{"path": "x", "sha256": 5}])),
    }
    for name in FILES:
        found[f"link-{name}"] = lambda run, n=name: _instead(run / n, lambda path: path.symlink_to(user / n))
        found[f"pipe-{name}"] = lambda run, n=name: _instead(run / n, os.mkfifo)
        found[f"folder-{name}"] = lambda run, n=name: _instead(run / n, Path.mkdir)
    for name in REPORTS:
        found[f"link-{name}"] = lambda run, n=name: _instead(run / "report" / n, lambda path: path.symlink_to(user / n))
        found[f"pipe-{name}"] = lambda run, n=name: _instead(run / "report" / n, os.mkfifo)
    found |= {f"type-{name}": lambda run, c=change: edit(run, c) for name, change in _types().items()}
    return found | {
        f"record-{name}": lambda run, m=make: append(run, m(first_row(run))) for name, make in _records().items()
    }


def _plugin(record: dict[str, Any], path: str) -> None:
    sha256 = hashlib.sha256(PLUGIN.encode()).hexdigest()
    record["environment"].update(plugin=[path], plugins=[{"path": path, "sha256": sha256}])


def _plugin_inside(run: Path) -> None:
    """A plug-in that travels with the folder, named from where kvbench is started."""
    (run / "journal" / "evil.py").write_text(PLUGIN)
    edit(run, lambda r: _plugin(r, f"results/{run.name}/journal/evil.py"))


def _judge(record: dict[str, Any], url: str) -> None:
    record["environment"].update(judge=url, judge_model="m", judge_key_env="AWS_SECRET_ACCESS_KEY", judge_mode="single")
    record["config"]["grids"][0]["tasks"] = ["mt_bench"]


def _draft(record: dict[str, Any]) -> None:
    record["config"]["grids"][0]["methods"] = [{"name": "speckv", "options": {"draft": "evil/draft"}}]


def _template(record: dict[str, Any], user: Path, sha256: str | None) -> None:
    record["config"]["chat_template"] = str(user / "template.jinja")
    record["environment"]["chat_template"] = sha256 and {"path": "template.jinja", "sha256": sha256}


def _types() -> dict[str, Callable[[dict[str, Any]], object]]:
    """Parts of a run.json that are of another type than any run's."""
    parts = {
        "config": ([], None, {"grids": 5}, {"grids": [5]}, {"grids": [{}]}, {}),
        "environment": ([], {"tasks": []}, {"tasks": {"walk/orbit-100": 5}}, {"versions": []}, {"plugins": 5}),
        "planned": ("x", -1, 1.5, 10**30),
        "name": (5, "../x", "\x1b"),
        "created": (5, None),
        "format": ("1", True, None, -1, 10**30),
        "command": ("x", [5]),
    }
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        f"{part}-{i}": lambda r, p=part, v=value: r.update({p: v})
        for part, values in parts.items()
        for i, value in enumerate(values)
    }
    grid = {"methods": [{"name": "knorm", "options": {}}], "budgets": [32], "tasks": ["walk/orbit-100"], "limit": 2}
    grids = {
        "limit": grid | {"limit": -5},
        "method": grid | {"methods": [{"name": "\x1b[2J", "options": {}}]},
        "option": grid | {"methods": [{"name": "knorm", "options": {"no": 5}}]},
        "options": grid | {"methods": [{"name": "knorm", "options": {"no": [5]}}]},
        "budget": grid | {"budgets": [True, "x"]},
        "task": grid | {"tasks": ["../../etc/passwd"]},
        "long-task": grid | {"tasks": ["ruler/vt@999999999k"]},
    }
    changes |= {f"grid-{name}": lambda r, g=g: r["config"].update(grids=[g]) for name, g in grids.items()}
    layers = ({}, {"element_bytes": "x", "layers": [5]}, {"element_bytes": 4, "layers": [{"kv_heads": "x"}]})
    changes |= {f"kv-{i}": lambda r, v=v: r["environment"].update(kv_cache=v) for i, v in enumerate(layers)}
    return changes


def _records() -> dict[str, Callable[[dict[str, Any]], bytes]]:
    """Records with a right checksum that are no row."""

    def row(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
        return lambda record: json.dumps(record | {"row": record["row"] | {"row_key": "f" * 24} | changes}).encode()

    def text(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
        return lambda record: json.dumps(record | {"text": changes}).encode()

    return {
        "deep": lambda record: b'{"kind":"row","row":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "deep-options": row(options="[" * 100_000),
        "deep-turns": text(turns="[" * 100_000),
        "list": lambda record: b"[]",
        "row-list": lambda record: b'{"kind":"row","row":[]}',
        "key": row(row_key=5),
        "no-status": row(status=None),
        "no-method": row(method=None),
        "no-document": row(doc_id=None),
        "no-sample": row(sample=None),
        "passes": row(score_pass=2**31 - 1),
        "fewer-passes": row(score_pass=-1),
        "status": row(status=["ok"]),
        "huge": row(budget=10**30),
        "text-number": row(score="1"),
        "nan": row(score=float("nan")),
        "options": row(options='{"a": NaN}'),
        "options-list": row(options="[1]"),
        "created": row(created="yesterday"),
        "surrogate": row(doc_id="\ud800"),
        "unknown": row(no_such_column=1),
        "turns": text(prompt="p", output="o", turns='{"a": 1}'),
        "texts": lambda record: json.dumps(record | {"text": [1]}).encode(),
    }


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    """Something else in the place of a file or folder, which is kept beside it for nobody."""
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            inner.unlink()
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()
    path.parent.mkdir(exist_ok=True)
    make(path)


def _moved(path: Path, target: Path) -> None:
    _instead(path, lambda place: place.symlink_to(target))


def _whole(run: Path, data: bytes) -> None:
    (run / "run.json").write_bytes(data)


def _text(run: Path, old: str, new: str) -> None:
    text = (run / "run.json").read_text()
    assert old in text
    (run / "run.json").write_text(text.replace(old, new))


def _bytes(path: Path, data: bytes) -> None:
    path.write_bytes(data)
