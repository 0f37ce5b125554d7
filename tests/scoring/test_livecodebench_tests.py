"""Test data of LiveCodeBench: their forms, and what a hostile file could do."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path

import pytest
from support.folders import DATA

from kvbench.scoring.livecodebench_tests import Test, TestDataError, read_tests, unpack

SAMPLE = DATA / "tasks" / "livecodebench" / "synthetic_lcb_format.jsonl"
TESTS = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]


def packed(value: object, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def test_every_form() -> None:
    expected = [Test("1\n", "2\n")]
    assert read_tests(json.dumps(TESTS)) == expected
    for protocol in range(6):
        assert read_tests(packed(json.dumps(TESTS), protocol)) == expected


def test_the_sample() -> None:
    rows = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    counts = [len(read_tests(row["public_test_cases"]) + read_tests(row["private_test_cases"])) for row in rows]
    assert counts == [3, 2, 2, 3, 2, 3]


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made"
    for value in (Touches(target), [Touches(target)], (json.dumps(TESTS), Touches(target))):
        with pytest.raises(TestDataError, match=r"refers to posix.mkdir"):
            read_tests(packed(value))
    assert not target.exists()


@pytest.mark.parametrize("value", [TESTS, b"x", 1, None, {"a": 1}, ["x"], len])
def test_only_a_text_comes_out(value: object) -> None:
    with pytest.raises(TestDataError):
        read_tests(packed(value))


@pytest.mark.parametrize(
    "data",
    [
        "",
        "!",
        "{}",
        '"text"',
        "[1]",
        '[{"input": 1, "output": "x"}]',
        '[{"input": "1"}]',
        "[" * 100_000,
        base64.b64encode(b"x").decode(),
        base64.b64encode(zlib.compress(b"x")).decode(),
        base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-3]).decode(),
        base64.b64encode(zlib.compress(b"\x80\x04\x8c\xff.")).decode(),
        packed("no JSON"),
        packed("[" * 100_000),
    ],
)
def test_what_is_not_in_its_form(data: str) -> None:
    with pytest.raises(TestDataError):
        read_tests(data)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = base64.b64encode(zlib.compress(pickle.dumps("0" * 10_000_000))).decode()
    assert len(bomb) < 20_000
    with pytest.raises(TestDataError, match="exceed the limit of 1,000,000 bytes"):
        unpack(bomb, 1_000_000)
    assert len(unpack(bomb)) == 10_000_000
