"""``kvbench audit --scorers``: all kinds of goldens are compared, and a scorer that differs is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folders import DATA

from kvbench.audit import scorers
from kvbench.audit.scorers import FILES, ScoredGolden, audit, read_goldens
from kvbench.errors import UserError

GOLDENS = DATA / "goldens"
FEW = {"livecodebench.jsonl": 3, "math.jsonl": 20}  # rows of files that take long


@pytest.fixture(scope="module")
def goldens() -> dict[str, list]:
    return {name: rows[: FEW.get(name)] for name, rows in read_goldens(GOLDENS).items()}


@pytest.fixture(scope="module")
def rows(goldens: dict[str, list]) -> list[ScoredGolden]:
    return list(audit(goldens))


@pytest.mark.parametrize("file", sorted(FILES))
def test_our_scorers_agree(file: str, rows: list[ScoredGolden], goldens: dict[str, list]) -> None:
    of_file = [row for row in rows if row.file == file]
    assert len(of_file) == len(goldens[file]) > 0
    assert [(row.id, row.error, row.differences) for row in of_file if not row.equal] == []
    assert all(row.expected for row in of_file)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (1.0, 1, True),
        (0.3333, 1 / 3, False),
        (True, 1.0, False),
        (None, 0.0, False),
        (["a", 1.0], ["a", 1], True),
        ([1], [1, 2], False),
        ({"f1": 0.5}, {"f1": 0.5}, True),
        ({"f1": 0.5}, {"f1": 0.5, "recall": 1.0}, False),
        ("7", 7, False),
    ],
)
def test_what_is_equal(ours: object, theirs: object, same: bool) -> None:
    row = ScoredGolden(file="x", id="x", note="", expected={"value": theirs}, found={"value": ours})
    assert row.equal is same


@pytest.fixture
def one(tmp_path: Path) -> Callable[[dict], ScoredGolden]:
    """The comparison of one golden of gsm8k."""

    def compare(changes: dict) -> ScoredGolden:
        golden = {"id": "g", "note": "n", "output": "#### 18", "gold": "18", "expected_strict": 1.0}
        golden |= {"expected_flexible": 1.0} | changes
        (row,) = audit({"gsm8k_filters.jsonl": [{k: v for k, v in golden.items() if v is not None}]})
        return row

    return compare


def test_a_difference_and_a_broken_golden_are_told(one: Callable[[dict], ScoredGolden]) -> None:
    assert one({}).equal
    wrong = one({"expected_strict": 0.0})
    assert (wrong.equal, wrong.differences, wrong.error) == (False, ["expected_strict"], "")
    assert "the golden has no field 'gold'" in one({"gold": None}).error
    assert "the golden has no field 'expected_flexible'" in one({"expected_flexible": None}).error
    assert one({"gold": 18}).error.startswith("TypeError")


def test_a_statistic_that_cannot_be_had_is_null() -> None:
    golden = {
        "metric": "cluster_se",
        "scores": [[1], [0]],
        "mean": 0.5,
        "se_clustered": 0.5,
        "se_fixed_questions": None,
    }
    (row,) = audit({"passk_stats.jsonl": [golden]})
    assert row.equal, row
    assert row.id == "line 1"


def test_a_folder_without_goldens(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"holds no results of official scorers; expected gpqa_extract\.jsonl, "):
        read_goldens(tmp_path)
    (tmp_path / "ruler.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"ruler\.jsonl:1: not JSON"):
        read_goldens(tmp_path)


def test_the_command(calls: Callable, tmp_path: Path, goldens: dict[str, list]) -> None:
    for folder, changed in (("good", False), ("bad", True)):
        (tmp_path / folder).mkdir()
        for name in ("gsm8k_filters.jsonl", "passk_stats.jsonl"):
            lines = [dict(row) for row in goldens[name]]
            if changed and name.startswith("gsm8k"):
                lines[0]["expected_strict"], lines[1]["output"] = 0.5, None
            (tmp_path / folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "empty").mkdir()
    good, bad, table, empty, nowhere, both = calls(
        tmp_path,
        [
            (["audit", *line.split()], {})
            for line in (
                "--scorers good --json",
                "--scorers bad --json",
                "--scorers bad",
                "--scorers empty",
                "--scorers nowhere",
                "--scorers good gkv",
            )
        ],
    )
    assert [r.code for r in (good, bad, table, empty, nowhere, both)] == [0, 1, 1, 2, 2, 2]
    document = json.loads(good.out)
    assert document["equal"] is True
    assert [file["rows"] for file in document["files"]] == [file["equal"] for file in document["files"]] == [12, 21]
    assert len(document["rows"]) == 33
    wrong = [row for row in json.loads(bad.out)["rows"] if not row["equal"]]
    assert [(row["expected"].get("expected_strict"), bool(row["error"])) for row in wrong] == [
        (0.5, False),
        (None, True),
    ]
    assert "expected_strict is '0.0', expected '0.5'" in table.out
    assert "31 of 33 rows in 2 files: SCORERS DIFFER." in table.out
    assert "holds no results of official scorers" in empty.err
    assert "error: --scorers 'nowhere' is not a folder." in nowhere.err
    assert good.torch is False


def test_every_golden_file_is_copied() -> None:
    assert {path.name for path in GOLDENS.glob("*.jsonl")} == set(scorers.FILES)
