"""Losses and cosines that a paper prints, beside the figures of a replay of the same model."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.replay import published
from kvbench.report.published import without_weights
from kvbench.sources.published import Published

FIGURES = {name: 1.5 for figure in published.FIGURES.values() for name in (figure, f"{figure}_se")}


def row(method: str, budget: int, interval: int = 256, task: str = "aime24") -> dict:
    return {"task": task, "method": method, "budget": budget, "interval": interval} | FIGURES


def test_every_loss_and_cosine_of_the_file_is_read() -> None:
    every = published.every()
    assert Counter(p.row.table_or_figure for p in every) == {"Table 1": 6, "Table 2": 16, "Table 7": 8}
    assert {p.method for p in every} == {"golden(within=mean)", "rkv", "snapkv-decode", "h2o", "foresightkv"}
    assert {p.interval for p in every if p.row.table_or_figure == "Table 2"} == {128, 256}
    assert len({(p.figure, p.method, p.row.entries, p.interval, p.row.task) for p in every}) == 30


def test_a_row_stands_beside_the_papers_numbers() -> None:
    lines = published.beside("Qwen/Qwen3-4B", [row("golden(within=mean)", 1024), row("h2o", 2048, 128)])
    found = [(x["method"], x["interval"], x["figure"], x["published"], x["source"][-7:]) for x in lines]
    assert found == [
        ("golden(within=mean)", 256, "loss_ratio", 1.0711, "Table 2"),
        ("h2o", 128, "loss_ratio", 1.1578, "Table 2"),
        ("h2o", 128, "cosine", 0.9845, "Table 7"),  # the paper names no interval
    ]
    assert lines[0]["difference"] == pytest.approx(1.5 - 1.0711)


def test_percent_of_the_full_caches_loss_become_ratios() -> None:
    lines = published.beside("Qwen3-4B", [row("rkv", 1024, task="math500")])
    found = {x["figure"]: x["published"] for x in lines}
    assert found == pytest.approx({"loss_ratio_low": 2.47, "loss_ratio_high": 1.52})


def test_other_models_methods_and_budgets_have_none() -> None:
    assert published.beside("Qwen/Qwen3-8B", [row("h2o", 1024)]) == []
    assert (
        published.beside("Qwen/Qwen3-4B", [row("golden", 1024), row("h2o", 512), row("h2o", 1024, task="walk")]) == []
    )


def test_the_file_of_weights_is_no_part_of_a_method() -> None:
    assert without_weights("foresightkv(sampling=False, scorer=/a/b)") == "foresightkv(sampling=False)"
    assert without_weights("duo(sparsity=0.5, table=x)") == "duo(sparsity=0.5)"
    assert without_weights("gkv(alpha=0.5)") == "gkv(alpha=0.5)"
    assert without_weights("mine(a=1)") == "mine(a=1)"
    [line] = published.beside("Qwen3-4B", [row("foresightkv(scorer=runs/scorer)", 1024)])
    assert (line["figure"], line["published"]) == ("cosine", 0.9736)


def test_the_command_prints_and_stores_them(tmp_path: Path, capsys, monkeypatch) -> None:
    shutil.copytree(tiny.path(), tmp_path / "Qwen3-4B")
    printed = {"metric": "loss ratio vs full cache", "value": "1.25", "unit": "ratio", "budget": "48 (L=16)"}
    printed |= {"paper": "A Paper (arXiv 1)", "table_or_figure": "Table 9", "model": "Qwen3-4B", "method": "H2O"}
    number = published.Printed(Published(**printed, task="math", notes=""), "loss_ratio", "h2o", 16)
    monkeypatch.setattr(published, "every", lambda: (number,))
    monkeypatch.setitem(published.TASKS, "math", "walk")
    command = [
        "replay",
        "--model",
        str(tmp_path / "Qwen3-4B"),
        "--method",
        "h2o,gkv",
        "--budget",
        "48",
        "--task",
        "walk",
    ]
    assert main([*command, "--limit", "1", "--interval", "16", "--json"]) == 0
    out = capsys.readouterr().out
    [line] = json.loads(out.splitlines()[-1])["published"]
    assert (line["method"], line["published"]) == ("h2o", 1.25)
    assert "Published figures beside ours:" in out
    assert "From A Paper (arXiv 1):" in out
