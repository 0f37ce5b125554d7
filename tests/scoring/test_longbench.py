"""LongBench's metrics against recorded results of the official ones, and what must not change them."""

from __future__ import annotations

import json
import marshal
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.scoring import longbench
from kvbench.scoring.longbench import METRICS, classification, require, score_row

ROWS = (DATA / "goldens" / "longbench.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in map(json.loads, ROWS)])
def test_goldens(row: dict):
    assert score_row(row["dataset"], row["prediction"], row["answers"], row["all_classes"]) == row["expected"]


def test_every_set_has_a_metric():
    from kvbench.tasks.longbench import SETS

    assert set(METRICS) | longbench.CLASSIFICATION == set(SETS)


def test_the_name_behind_a_removed_one_is_not_looked_at():
    """Both "Other" and "location" are part of the answer; the official loop removes the first and skips the second."""
    names = ["Other", "location", "Other location", "City"]
    assert classification("Other location", "Other location", names) == 1 / 2
    assert classification("Other location", "Other location", ["Other", "City", "Other location"]) == 1.0


def test_the_best_answer_counts_and_none_is_zero():
    assert score_row("hotpotqa", "in Paris", ["London", "Paris"]) == pytest.approx(2 / 3)
    assert score_row("hotpotqa", "in Paris", []) == 0.0


def test_the_first_line_counts_in_few_shot_sets_only():
    assert score_row("triviaqa", "\n\nParis\nLondon", ["Paris"]) == 1.0
    assert score_row("hotpotqa", "\n\nParis\nLondon", ["Paris"]) == pytest.approx(2 / 3)


@pytest.fixture(params=[1000, 3000])
def limit(request):
    """Other code in the process, such as torch's compiler, may have raised the recursion limit."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(request.param)
    yield request.param
    assert sys.getrecursionlimit() == request.param
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("limit")
def test_rouge_does_not_depend_on_the_callers_stack():
    """rouge calls itself once a word: near the interpreter's limit a deep caller would turn a score into 0."""
    text = " ".join(f"w{i}" for i in range(900))

    def deep(levels: int) -> float:
        return deep(levels - 1) if levels else score_row("gov_report", text, [text])

    assert deep(0) == deep(200) == pytest.approx(1.0)
    far = [" ".join(["same", *(f"{mark}{i}" for i in range(600))]) for mark in "xy"]
    assert score_row("gov_report", far[0], [far[1]]) == 0.0  # beyond the limit, as in the official scripts
    assert score_row("gov_report", far[0].replace(" ", ". "), [far[1]]) > 0.0


def test_another_programs_cache_of_words_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """jieba itself would take words and frequencies from the folder for temporary files, unchecked."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "jieba.cache").write_bytes(marshal.dumps(({"瑞金": 1, "大学": 1}, 2)))
    longbench._segmenter.cache_clear()
    assert score_row("multifieldqa_zh", "上海交通大学医学院附属瑞金医院", ["瑞金医院"]) == 0.4
    longbench._segmenter.cache_clear()


@pytest.mark.parametrize(
    ("name", "package"), [("gov_report", "rouge"), ("multifieldqa_zh", "jieba"), ("vcsum", "jieba")]
)
def test_a_missing_or_other_package_is_said(name: str, package: str, monkeypatch: pytest.MonkeyPatch):
    longbench._package.cache_clear()
    real = metadata.version

    def missing(asked: str) -> str:
        if asked == package:
            raise metadata.PackageNotFoundError(asked)
        return real(asked)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SetupError, match=rf"need the package {package}, which is missing\. .*kvbench\[longbench\]"):
        require(name)
    monkeypatch.setattr(metadata, "version", lambda asked: "0.3" if asked == package else real(asked))
    with pytest.raises(SetupError, match=rf"need {package} [\d.]+; 0\.3 is installed"):
        require(name)
    require("hotpotqa")  # needs none
    require("trec")
    monkeypatch.undo()
    longbench._package.cache_clear()


def test_importing_the_scores_loads_no_package():
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in ("jieba", "rouge")}
    before: ModuleType = sys.modules.pop("kvbench.scoring.longbench")
    try:
        __import__("kvbench.scoring.longbench")
        assert not {"jieba", "rouge"} & set(sys.modules)
    finally:
        sys.modules["kvbench.scoring.longbench"] = before
        sys.modules.update(kept)
