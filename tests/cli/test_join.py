"""``kvbench run --shard`` and ``kvbench join``, as a shell loop calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = "run --model tiny --method full,knorm --budget 32 --interval 8 --task walk/orbit-100 --limit 3 --samples 1"
RUN += " --max-new-tokens 12 -q --run-name first"


@pytest.fixture(scope="module")
def results(calls: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What a shard says, then `join` in an interpreter of its own, then the runs that continue."""
    folder = tmp_path_factory.mktemp("shards")

    def lines(*texts: str) -> list:
        return calls(folder, [(text.split(), {}) for text in texts])

    return {
        "folder": [folder],
        "run": lines(
            f"{RUN} --shard 1/2 --json",
            f"{RUN} --shard 2/2 --dry-run --json",
            "run --resume first-1-of-2 --json -q",
            "run --resume first-1-of-2 --shard 2/2 -q",
            f"{RUN} --shard 9/9 --json",
            "list runs --json",
            "show first-1-of-2",
        ),
        "join": lines("join first-1-of-2", "join first-1-of-2 --json", "join first-1-of-2 -q --run-name other"),
        "again": lines("run --resume first -q --json", f"{RUN} --shard 2/2", "join first-1-of-2 first-2-of-2 --json"),
    }


def document(result: object) -> dict:
    return json.loads(result.out.splitlines()[-1])


def test_a_shard_runs_its_rows_in_a_folder_of_its_own(results: dict[str, list]) -> None:
    first, dry, resumed, other, empty, listed, shown = results["run"]
    assert (first.code, dry.code, resumed.code) == (0, 0, 0), first.err + dry.err + resumed.err
    counts = [(d["run"], d["rows_done"], d["rows_planned"]) for d in map(document, (first, dry, resumed))]
    assert counts == [("results/first-1-of-2", 3, 3), (None, 0, 3), ("results/first-1-of-2", 3, 3)]
    assert other.code == 2
    assert "run 'first-1-of-2' is shard 1/2; you asked for --shard 2/2. Give --shard 1/2" in other.err
    assert (empty.code, document(empty)["rows_planned"]) == (0, 0), empty.err
    runs = {run["name"]: (run["rows"], run["status"]) for run in json.loads(listed.out)}
    assert "shard     1/2" in shown.out
    assert runs == {"first-1-of-2": ("3 of 3", "complete"), "first-9-of-9": ("0 of 0", "complete")}


def test_join_says_what_is_missing_and_how_to_make_it(results: dict[str, list]) -> None:
    first, again, quiet = results["join"]
    assert [result.code for result in results["join"]] == [4, 4, 4], first.err
    assert not first.torch
    assert "1/2    first-1-of-2     3        3      3" in first.out
    assert "walk/orbit-100" in first.out
    for result in (first, again):
        assert "error: shard 2/2 was not given: 3 of 6 rows have no score (3 not run)" in result.err
        assert "'kvbench run --resume first' tries them again." in result.err
    assert "kvbench run --resume other" in quiet.err
    assert quiet.out == ""
    assert document(again) == {
        "run": "results/first",
        "rows_done": 3,
        "rows_planned": 6,
        "statuses": {"ok": 3},
        "shards": [
            {
                "shard": "1/2",
                "run": "results/first-1-of-2",
                "rows": 3,
                "planned": 3,
                "added": 0,
                "different": 0,
            }
        ],
        "missing_shards": ["2/2"],
    }


def test_a_joined_run_continues_and_takes_late_shards(results: dict[str, list]) -> None:
    resumed, late, joined = results["again"]
    assert [result.code for result in results["again"]] == [0, 0, 0], resumed.err + late.err + joined.err
    assert (document(resumed)["rows_done"], document(resumed)["rows_planned"]) == (6, 6)
    assert [shard["added"] for shard in document(joined)["shards"]] == [0, 0]
    assert (Path(results["folder"][0]) / "results" / "first" / "report" / "report.md").is_file()
