"""A results folder from a stranger, opened by every command: nothing in it runs, reaches or overwrites anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from support import hostile_run as hostile

from kvbench.store import read_rows

ASK = "--method full,knorm --budget 32 --interval 8 --task walk/orbit-100 --limit 1 --max-new-tokens 12 --seed 0"
COMMANDS = {
    "report": "report results/RUN",
    "report markdown": "report results/RUN --format markdown",
    "report csv": "report results/RUN --format csv",
    "report json": "report results/RUN --format json",
    "report memory": "report results/RUN --memory",
    "report category": "report results/RUN --by category",
    "report html": "report results/RUN --html results/page.html",
    "show": "show RUN",
    "show json": "show RUN --json",
    "show sample": "show RUN --sample DOC",
    "show html": "show RUN --sample DOC --html results/question.html",
    "replay": "replay --run RUN --method knorm --budget 16 --interval 8 -q",
    "compare": "compare results/base results/RUN --flips",
    "compare replay": "compare results/RUN results/base --replay",
    "compare save": "compare results/RUN --save results/RUN.json",
    "audit compare": "audit --compare results/RUN -q",
    "record": "record RUN -q",
    "dry run": "run --resume RUN --dry-run",
    "score": "score RUN -q",
    "score all": "score RUN --all -q",
    "resume": "run --resume RUN -q",
    "same name": f"run {ASK} --run-name RUN -q",
    "repair": "repair RUN",
    "report again": "report results/RUN --format json",
}
CODES = (0, 2, 3, 4, 5)
# What every spoilt run is opened by; those in FULL are opened by all commands.
FEW = ("report json", "compare", "show", "show sample", "show html", "dry run", "score", "resume", "repair")
FULL = ("plugin", "plugin-inside", "judge", "unsafe", "hub-model", "template", "task-file", "escapes", "segment-pipe")
FULL = (*FULL, "report-link", "link-report.md", "link-run.json", "link-lock", "pipe-rows.parquet", "deep")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, calls: Callable) -> dict:
    """Every command on every spoilt run, in one interpreter, and what was there afterwards."""
    folder = tmp_path_factory.mktemp("hostile")
    user = hostile.outside(folder / "user")
    (made,) = calls(folder, [(f"run {ASK} --run-name base -q".split(), {})])
    assert made.code == 0, made.err
    base = folder / "results" / "base"
    document = read_rows(base)["doc_id"].iloc[0]
    with hostile.Recorder().running() as server:
        ways = hostile.ways(user, server.url)
        for name, spoil in ways.items():
            shutil.copytree(base, folder / "results" / name)
            spoil(folder / "results" / name)
        before = hostile.state(user)
        environment = {
            "AWS_SECRET_ACCESS_KEY": hostile.CANARY,
            "HF_ENDPOINT": server.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder / "hub"),
        }
        lines = {
            (way, name): [word.replace("RUN", way).replace("DOC", str(document)) for word in line.split()]
            for way in ways
            for name, line in COMMANDS.items()
            if way in FULL or name in FEW
        }
        lines["all", "report"] = ["report", "--format", "csv"]
        lines["all", "list"] = ["list", "tasks"]
        lines["all", "list runs"] = ["list", "runs"]
        results = dict(zip(lines, calls(folder, [(line, environment) for line in lines.values()])))
    return {"results": results, "before": before, "after": hostile.state(user), "got": server.got, "folder": folder}


def test_every_command_ends_as_meant(opened: dict) -> None:
    wrong = {
        case: (result.code, result.err)
        for case, result in opened["results"].items()
        if result.code not in CODES or "internal error" in result.err or "Traceback" in result.err
    }
    assert not wrong
    assert opened["results"]["all", "report"].code == opened["results"]["all", "list runs"].code == 0


def test_nothing_outside_a_folder_is_written_or_imported(opened: dict) -> None:
    assert opened["after"] == opened["before"]
    assert not list(opened["folder"].rglob("*.ran"))


def test_nobody_is_asked(opened: dict) -> None:
    assert opened["got"] == []


def test_no_secret_and_no_private_text_comes_out(opened: dict) -> None:
    told = {case: r.out + r.err for case, r in opened["results"].items()}
    assert not [case for case, text in told.items() if hostile.CANARY in text or hostile.PRIVATE in text]
    assert not [case for case, text in told.items() if "\x1b" in text]
    files = [p for p in (opened["folder"] / "results").rglob("*") if p.is_file() and not p.is_symlink()]
    kept = {p: p.read_bytes() for p in files if p.stat().st_nlink == 1}
    assert not [p for p, data in kept.items() if hostile.CANARY.encode() in data or hostile.PRIVATE.encode() in data]


@pytest.mark.parametrize("way", ["plugin", "plugin-inside", "judge"])
@pytest.mark.parametrize("command", ["resume", "dry run", "score", "score all"])
def test_what_is_needed_is_said_in_one_line(opened: dict, way: str, command: str) -> None:
    result = opened["results"][way, command]
    assert result.code == 2
    option = "--plugin" if way == "plugin-inside" else f"--{way}"
    line = result.err.splitlines()[-1]
    assert line.startswith(f"error: run '{way}' used ")
    assert option in line.partition(": kvbench ")[2]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("file", ["run.json", "lock", "rows.parquet", "seal.json"])
def test_what_is_no_file_of_the_run_is_named(opened: dict, kind: str, file: str) -> None:
    command = {"lock": "repair", "run.json": "show"}.get(file, "report json")
    result = opened["results"][f"{kind}-{file}", command]
    assert result.code in (2, 3)
    assert f"{file}' is a {kind}" in result.err or "no run" in result.err


def test_reports_are_written_beside_links_that_stay_unfollowed(opened: dict) -> None:
    for name in hostile.REPORTS:
        assert opened["results"][f"link-{name}", "resume"].code == 0
        path = opened["folder"] / "results" / f"link-{name}" / "report" / name
        assert path.is_file()
        assert not path.is_symlink()
