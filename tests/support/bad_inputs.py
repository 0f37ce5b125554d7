"""What the rows of data/bad_inputs.csv need around them: files, models, a hub, and runs in every state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from kvbench import tiny
from kvbench.registry import tasks
from kvbench.store.lock import RunLock
from support import vision
from support.hub import COMMIT, Repo

GOOD = [{"id": "q1", "question": "1 + 1?", "answer": 2}, {"id": "q2", "question": "2 + 2?", "answer": 4}]
SHORT = "--task walk/orbit-100 --limit 1 --samples 1 --interval 8 --max-new-tokens 8 -q"
FIRST = [  # what rows work on; row B102 makes the run r1
    f"run --model tiny --method knorm,random --budget 32 {SHORT.replace('--limit 1', '--limit 5')} --run-name five",
    "run --model tiny --method full --task-file good.jsonl --max-new-tokens 4 -q --run-name ours",
    "run --model tiny --method full --task-file others/good.jsonl --max-new-tokens 4 -q --run-name theirs",
    f"run --model ./copy --method knorm --budget 32 {SHORT} --run-name r2",
    "weights import gates.safetensors --method trimkv --model ./small --out gates",
]


def repos() -> dict[str, Repo]:
    """A hub with a gated model and with data sets that are gated, ship code, or have moved."""

    def pinned(task: str) -> str:
        return str(tasks.get(task).manifest.revision)  # type: ignore[attr-defined]

    rows = {"data/test.jsonl": b'{"q": "a"}\n'}
    return {
        "org/gated": Repo({"config.json": b"{}", "model.safetensors": b""}, gated=True),
        "datasets/Idavidrein/gpqa": Repo(rows, pinned("gpqa_diamond"), gated=True),
        "datasets/openai/gsm8k": Repo({"gsm8k.py": b"raise SystemExit('ran')"} | rows, pinned("gsm8k")),
        "datasets/HuggingFaceH4/MATH-500": Repo(rows, COMMIT),
    }


def fill(folder: Path) -> None:
    """The files and model folders that the rows name."""

    def lines(name: str, *items: object, end: str = "\n") -> None:
        text = end.join(item if isinstance(item, str) else json.dumps(item) for item in items) + end
        (folder / name).write_bytes(text.encode())

    lines("good.jsonl", *GOOD)
    (folder / "others").mkdir()
    lines("others/good.jsonl", *({**item, "id": f"other {item['id']}"} for item in GOOD))
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "blank.jsonl").write_bytes(b"\n" * 12)
    lines("broken.jsonl", *({"question": "?", "answer": i} for i in range(16)), '{"question": "?" "answer": 1}')
    lines("noanswer.jsonl", *GOOD, {"id": "q3", "question": "?"})
    lines("listanswer.jsonl", GOOD[0], {"id": "q2", "question": "?", "answer": [1]})
    lines("duplicate.jsonl", *GOOD, GOOD[0])
    (folder / "utf16.jsonl").write_bytes(json.dumps(GOOD[0]).encode("utf-16"))
    lines("crlf.jsonl", *GOOD, end="\r\n")
    (folder / "nonewline.jsonl").write_text("\n".join(map(json.dumps, GOOD)), encoding="utf-8")
    lines("long.jsonl", {"question": "many words " * 100_000, "answer": "1"})
    os.mkfifo(folder / "pipe")
    (folder / "c.yaml").write_text("budget: 64\n", encoding="utf-8")
    lines("nul.toml", 'model = "a\\u0000b"', 'method = "full"', 'task = "walk"')
    (folder / "both.toml").write_text("seed = 5\n", encoding="utf-8")
    (folder / "typo.toml").write_text(
        "# a comment\n" * 8 + '[run]\nmethod = "gkv"\nseed = 1\nbuget = 64\n', encoding="utf-8"
    )
    lines("t.jinja", "{% for m in messages %}", "{{ m.content }}{% endfor %}", "{{ x } }}")
    (folder / "nowhere").symlink_to("nothing")
    (folder / "target").mkdir()
    (folder / "target/keep.txt").write_text("mine")
    (folder / "linked").symlink_to("target")
    (folder / "folder").mkdir()
    _models(folder)
    _images(folder)


def _models(folder: Path) -> None:
    qwen = {"model_type": "qwen3", "max_position_embeddings": 32768}
    for name in ("pickled", "cut", "base"):
        _write(folder / name / "config.json", qwen)
    (folder / "pickled/pytorch_model.bin").write_bytes(b"x")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (folder / "cut/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)
    (folder / "base/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    _write(folder / "base/tokenizer_config.json", {})
    _write(folder / "own-code/config.json", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}})
    _write(folder / "own-code/tokenizer.json", {})
    (folder / "own-code/mine.py").write_text("raise SystemExit('the code of a folder ran')")
    _write(folder / "mamba/config.json", {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2})
    for name in ("own-code", "mamba"):
        save_file({"w": np.zeros(1, np.float32)}, folder / name / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.path() / name, folder / "mamba")
    for name in ("copy", "mixed", "endless", "other"):
        own = ("*.py", "__pycache__", "card.json") + (("trimkv.*",) if name == "other" else ())
        shutil.copytree(tiny.path(), folder / name, ignore=shutil.ignore_patterns(*own))
    tokenizer = json.loads((folder / "mixed/tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"more{number}": number for number in range(len(vocabulary), 600)}
    _write(folder / "mixed/tokenizer.json", tokenizer)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / "endless" / name).read_text(encoding="utf-8"))
        _write(folder / "endless" / name, {k: v for k, v in content.items() if not k.startswith("eos")})
    gate, state = "model.layers.{}.self_attn.retention_gate.", {}
    for layer in range(2):
        for name, shape in {
            "linear1.weight": (4, 8),
            "linear1.bias": (4,),
            "linear2.weight": (1, 4),
            "bias": (1,),
        }.items():
            state[gate.format(layer) + name] = np.zeros(shape, np.float32)
    save_file(state, folder / "gates.safetensors")
    small = {
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 8,
        "head_dim": 8,
    }
    _write(folder / "small/config.json", qwen | small | {"vocab_size": 9})
    save_file({"w": np.zeros(1, np.float32)}, folder / "small/model.safetensors")


def _images(folder: Path) -> None:
    """A model that sees, questions with images, a template that places one image of a message, quantised weights."""
    vision.repository(folder / "sees")
    whole = vision.picture().data
    (folder / "whole.png").write_bytes(whole)
    (folder / "torn.png").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_bytes(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    for name, images in (("none", ["nothere.png"]), ("torn", ["torn.png"]), ("text", ["text.png"])):
        _write(folder / f"{name}.jsonl", {"question": "Which?", "answer": "3", "images": images})
    _write(folder / "two.jsonl", {"question": "Which?", "answer": "3", "images": ["whole.png"] * 2})
    once = vision.TEMPLATE.replace("part.type == 'image' %}", "part.type == 'image' and loop.first %}")
    (folder / "once.jinja").write_text(once.replace("{% else %}{{ part", "{% elif part.type == 'text' %}{{ part"))
    own = ("*.py", "__pycache__", "card.json")
    shutil.copytree(tiny.path(), folder / "gptq", ignore=shutil.ignore_patterns(*own))
    config = json.loads((folder / "gptq/config.json").read_text(encoding="utf-8"))
    _write(folder / "gptq/config.json", config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})


def _write(file: Path, content: Mapping[str, object]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def _reseal(run: Path, table: pa.Table) -> None:
    """Put another table of rows under a run's seal."""
    pq.write_table(table, run / "rows.parquet")
    seal = json.loads((run / "seal.json").read_text())
    seal["sha256"]["rows.parquet"] = hashlib.sha256((run / "rows.parquet").read_bytes()).hexdigest()
    (run / "seal.json").write_text(json.dumps(seal))


@contextlib.contextmanager
def damaged_runs(results: Path) -> Iterator[None]:
    """Copies of the run r1: held by this process, held by a dead one, and with tables that are not its own."""
    for name in ("busy", "stale", "newer", "halved", "foreign"):
        shutil.copytree(results / "r1", results / name)
    table = pq.read_table(results / "newer/rows.parquet")
    _reseal(results / "newer", table.replace_schema_metadata({"kvbench.format": "99"}))
    _reseal(results / "foreign", pa.table({"a": [1]}))
    whole = (results / "halved/rows.parquet").read_bytes()
    (results / "halved/rows.parquet").write_bytes(whole[: len(whole) // 2])
    lock = RunLock(results / "busy/lock", "busy")
    lock.acquire()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    holder = json.loads((results / "busy/lock").read_text())
    (results / "stale/lock").write_text(json.dumps(holder | {"pid": gone.pid}))
    try:
        yield
    finally:
        lock.release()


def interrupted(folder: Path, argv: list[str], number: int) -> tuple[int, str, str]:
    """A run that gets a signal once its first row is on disk: exit code, stdout, stderr."""
    name = argv[argv.index("--run-name") + 1]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbench", *argv],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KVBENCH_NO_PROGRESS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if any(file.stat().st_size > 1000 for file in (folder / "results" / name / "journal").glob("*")):
            process.send_signal(number)
            break
        time.sleep(0.01)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


SIGNALS = {"signal INT": signal.SIGINT, "signal TERM": signal.SIGTERM}
