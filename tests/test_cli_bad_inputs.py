"""Bad input ends in one clear line: exit code and key text of every row of data/bad_inputs.csv, and never a traceback.

Rows with exit code 2 or 3 must be found before torch is imported. Rows that need a run are in test_cli_runs.py.
"""

from __future__ import annotations

import csv
import json
import shlex
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROWS = list(csv.DictReader((Path(__file__).parent / "data/bad_inputs.csv").open(encoding="utf-8", newline="")))
NAMES = [f"{row['id']}-{number}" for number, row in enumerate(ROWS)]
GOOD = [{"id": "q1", "question": "1 + 1?", "answer": 2}, {"id": "q2", "question": "2 + 2?", "answer": 4}]


def _fill(folder: Path) -> None:
    """The files that the rows name."""

    def lines(name: str, *items: object, end: str = "\n") -> None:
        text = end.join(item if isinstance(item, str) else json.dumps(item) for item in items) + end
        (folder / name).write_bytes(text.encode())

    lines("good.jsonl", *GOOD)
    (folder / "empty.jsonl").write_bytes(b"")
    (folder / "blank.jsonl").write_bytes(b"\n" * 12)
    lines("broken.jsonl", *({"question": "?", "answer": i} for i in range(16)), '{"question": "?" "answer": 1}')
    lines("noanswer.jsonl", *GOOD, {"id": "q3", "question": "?"})
    lines("listanswer.jsonl", GOOD[0], {"id": "q2", "question": "?", "answer": [1]})
    lines("duplicate.jsonl", *GOOD, GOOD[0])
    (folder / "utf16.jsonl").write_bytes(json.dumps(GOOD[0]).encode("utf-16"))
    lines("crlf.jsonl", *GOOD, end="\r\n")
    (folder / "nonewline.jsonl").write_text("\n".join(map(json.dumps, GOOD)), encoding="utf-8")
    (folder / "c.yaml").write_text("budget: 64\n", encoding="utf-8")
    (folder / "typo.toml").write_text(
        "# a comment\n" * 8 + '[run]\nmethod = "gkv"\nseed = 1\nbuget = 64\n', encoding="utf-8"
    )
    for name in ("folder", "pickled", "cut", "base"):
        (folder / name).mkdir()
    config = json.dumps({"model_type": "qwen3", "max_position_embeddings": 32768})
    for name in ("pickled", "cut", "base"):
        (folder / name / "config.json").write_text(config, encoding="utf-8")
    (folder / "pickled/pytorch_model.bin").write_bytes(b"x")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    (folder / "cut/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 100)
    (folder / "base/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "base/tokenizer_config.json").write_text("{}", encoding="utf-8")


def _argv(text: str) -> list[str]:
    return [word.replace("\\0", "\0").replace("\\x1b", "\x1b") for word in shlex.split(text)]


@pytest.fixture(scope="module")
def outcomes(calls: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Result of every row. Those that may import torch come last, so that the others show whether they did."""
    folder = tmp_path_factory.mktemp("bad")
    _fill(folder)
    order = sorted(zip(NAMES, ROWS), key=lambda item: item[1]["exit"] == "0")
    lines = [
        (_argv(row["argv"]), dict([row["environment"].split("=")] if row["environment"] else [])) for _, row in order
    ]
    before = sorted(p.name for p in folder.iterdir())
    yield dict(zip([name for name, _ in order], calls(folder, lines)))
    new = {p.name for p in folder.iterdir()} - set(before)
    assert new <= {"results"}, f"files were made outside the results folder: {new}"


@pytest.mark.parametrize(("name", "row"), list(zip(NAMES, ROWS)), ids=NAMES)
def test_bad_input(name: str, row: dict[str, str], outcomes: dict) -> None:
    result = outcomes[name]
    said = result.err if row["exit"] != "0" else result.out + result.err
    assert result.code == int(row["exit"]), said
    for text in row["texts"].split(" || "):
        assert text in said
    assert "Traceback" not in result.err
    assert not any(ord(c) < 32 and c != "\n" for c in result.err)
    if row["exit"] != "0":
        assert result.out == ""
        assert all(line.startswith(("error: ", "warning: ", "note: ")) for line in result.err.splitlines())
        assert result.torch is False, "torch was imported before a usage error was found"


def test_the_first_line_of_several_is_not_repeated(outcomes: dict) -> None:
    result = next(outcomes[name] for name, row in zip(NAMES, ROWS) if row["id"] == "several")
    lines = result.err.splitlines()
    assert len(lines) == len(set(lines)) == 5
