"""Baseline files: a side survives them unchanged, and whatever else they hold ends in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.compare import baseline
from kvbench.compare.cell import Side
from kvbench.errors import UserError
from kvbench.store.identity import digest


@pytest.fixture
def saved(side: Callable[..., Side], rows: Callable, tmp_path: Path) -> tuple[Path, Side]:
    kept = side(
        "a",
        rows([[1.0, 0.375], [0.1 + 0.2, 0.0]], options={"alpha": 0.5}),
        rows([1.0], method="full", budget=None, interval=None, entries_after_evict=None, cluster_id="page"),
        rows([0.5], budget=20, budget_share=0.25, status="unscored", score=None, score_partial=None),
    )
    path = tmp_path / "base.json"
    baseline.write(path, kept)
    return path, kept


def test_a_side_survives(saved) -> None:
    path, kept = saved
    assert baseline.read(path).cells == kept.cells
    assert baseline.read(path).sources == kept.sources


def test_a_cell_of_many_shards_survives(side, rows, tmp_path: Path) -> None:
    """A cell states the names of all runs that have its rows."""
    one = side("a", rows([1.0]))
    names = ", ".join(f"nightly-qwen3-4b-{number}-of-999" for number in range(1, 1000))
    cells = {key: replace(cell, run=names) for key, cell in one.cells.items()}
    baseline.write(tmp_path / "b.json", replace(one, cells=cells))
    assert baseline.read(tmp_path / "b.json").cells == cells


def test_a_file_is_small(side, rows, tmp_path: Path) -> None:
    """30 questions x 32 samples: a few KB a cell."""
    baseline.write(tmp_path / "b.json", side("a", rows([[1.0, 0.0] * 16] * 30)))
    assert (tmp_path / "b.json").stat().st_size < 7000


def test_saving_twice_gives_the_same_bytes(saved, tmp_path: Path) -> None:
    """The folder of the second file is made."""
    path, kept = saved
    again = tmp_path / "results" / "baselines" / "again.json"
    baseline.write(again, kept)
    assert again.read_bytes() == path.read_bytes()


def test_an_edited_file_is_refused(saved) -> None:
    path, _ = saved
    path.write_text(path.read_text(encoding="utf-8").replace("0.375", "0.875"), encoding="utf-8")
    with pytest.raises(UserError, match="does not fit its checksum"):
        baseline.read(path)


def hostile(content: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], Any]]:
    def cell(**changes: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda c: c["cells"][0].update(changes)

    def question(place: int, value: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda c: next(iter(c["cells"][0]["questions"].values())).__setitem__(place, value)

    return {
        "another format": lambda c: c.update(format=1),
        "no format": lambda c: c.pop("format"),
        "format true": lambda c: c.update(format=True),
        "unknown key": lambda c: c.update(plugin="evil.py"),
        "missing key": lambda c: c.pop("sources"),
        "cells as a table": lambda c: c.update(cells={}),
        "no cells": lambda c: c.update(cells=[]),
        "a cell twice": lambda c: c["cells"].append(c["cells"][0]),
        "a cell that is text": lambda c: c.update(cells=["x"]),
        "unknown key of a cell": cell(code="x"),
        "short key": cell(key=["tiny"]),
        "budget of a list": cell(key=["m", "t", "g", [], 1, "0"]),
        "budget 0": cell(key=["m", "t", "g", 0, 1, "0"]),
        "interval below 0": cell(key=["m", "t", "g", 1, -1, "0"]),
        "facts of numbers": cell(facts={"device": 1}),
        "unknown fact": cell(facts={"home": "x"}),
        "figures of text": cell(figures={"bound": "x"}),
        "unknown figure": cell(figures={"x": 1.0}),
        "another headline": cell(headline="__class__"),
        "digest of another length": cell(digest="ab"),
        "bounded 1": cell(bounded=1),
        "name of a megabyte": cell(run="x" * 10**6),
        "questions as a list": cell(questions=[]),
        "question without parts": cell(questions={"q": []}),
        "score 2": question(0, [2.0, 1.0]),
        "score true": question(0, [True, 1.0]),
        "score of text": question(0, ["1", 1.0]),
        "marks with markup": question(1, "<b>x"),
        "marks of another number": question(1, "abc"),
        "answers below 0": question(5, -1),
        "more answers than samples": question(5, 99),
        "totals of floats": question(6, 1.5),
        "numbers beyond 64 bits": question(6, 10**30),
    }


@pytest.mark.parametrize("name", hostile({}))
def test_hostile_files(saved, name: str) -> None:
    path, _ = saved
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop("sha256")
    hostile(content)[name](content)
    path.write_text(json.dumps(content | {"sha256": digest(content)}), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        baseline.read(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"'{path}' is not a baseline from 'kvbench compare --save': ")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'{"format": NaN}'])
def test_files_that_are_no_document(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(UserError, match="is not a baseline"):
        baseline.read(tmp_path / "x.json")


def test_a_file_that_is_too_large(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "LARGEST", 1 << 10)
    with pytest.raises(UserError, match="it is larger than 0 MiB"):
        baseline.read(saved[0])
