"""The baselines: the suite has every method that can run, and the page says what the tables say."""

from __future__ import annotations

import csv
import re

from support.folders import ROOT

from kvbench import tiny
from kvbench.config.layers import suite_path
from kvbench.eviction.modality import MODALITY
from kvbench.registry import methods

KEPT = ROOT / "results" / "baselines"
PAGE = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
SHOWN = {f"{task} {budget}": (task, budget) for task in ("walk", "chain", "lookup") for budget in ("48", "96")}


def table(name: str) -> list[dict[str, str]]:
    with (KEPT / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def lines(head: str) -> list[dict[str, str]]:
    """The Markdown table of the page whose first line begins with `head`, without stars and escapes."""
    found = [line.strip("| ").replace("\\", "") for line in PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()]
    titles = [title.strip() for title in found[0].split("|")]
    return [dict(zip(titles, (cell.strip().removesuffix(" *") for cell in line.split("|")))) for line in found[2:]]


def test_the_suite_has_every_method_that_runs_on_the_built_in_model() -> None:
    """All but those whose weights the built-in model lacks; once it has them, the suite must have the method too."""
    text = suite_path("baselines").read_text(encoding="utf-8")
    for path in (ROOT / "methods").glob("[!_]*.py"):
        for name in re.findall(r'@methods\.register\("([^"]+)"', path.read_text(encoding="utf-8")):
            assert (f'"{name}"' in text) == runs(name), name


def runs(name: str) -> bool:
    """Whether a method finds all it needs beside the built-in model, which reads no images. An oracle needs the future
    besides."""
    cls = methods.get(name)
    weights = cls().weights()
    return (
        not cls.oracle
        and MODALITY not in cls().columns()
        and (weights is None or (tiny.path() / f"{weights.kind}.safetensors").is_file())
    )


def test_a_method_without_weights_is_no_baseline() -> None:
    assert [runs(name) for name in ("gkv", "headkv", "golden", "text-first")] == [True, True, False, False]
    shipped = {path.stem for path in tiny.path().glob("*.safetensors")}
    for name in ("trimkv", "retention", "foresightkv"):
        assert runs(name) == (name in shipped)


def test_scores_of_the_page_are_those_of_the_table() -> None:
    kept = {(row["method"], row["task"], row["budget"]): row for row in table("table.csv")}
    shown = lines("| method | walk 48 |")
    assert {row["method"] for row in shown} == {method for method, _, _ in kept}
    for row in shown:
        for title, (task, budget) in SHOWN.items():
            cell = kept.get((row["method"], task, budget)) or kept[row["method"], task, ""]
            if row[title] == "nothing evicted":
                assert (cell["entries_after_evict"], cell["mean"]) == ("", "1.0")
            else:
                assert row[title] == f"{float(cell['mean']):.3f} ±{float(cell['se']):.3f}"


def test_memory_of_the_page_is_that_of_the_table() -> None:
    kept = [row for row in table("memory.csv") if row["task"] == "chain"]
    shown = lines("| method | budget | entries |")
    assert [(row["method"], row["budget"].strip("-")) for row in shown] == [(r["method"], r["budget"]) for r in kept]
    assert [row["ratio"] for row in shown] == [f"{float(row['ratio']):.2f}" for row in kept]


def test_no_kept_cell_exceeds_its_memory() -> None:
    kept = table("memory.csv")
    assert len(kept) == 279
    assert all(row["over"] == "False" and int(row["samples"]) == 128 for row in kept)
