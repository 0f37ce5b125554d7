"""``--protect``: every method under each protection, in rows, labels, files, replay and `EvictionCache`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from kvbench.errors import UserError
from kvbench.eviction.api import Protect
from kvbench.integrations import model_args

FILE = """
[run]
method = ["full", "gkv", "random"]
budget = 48
interval = 32
limit = 2
task = "walk/orbit-100"
protect = ["own", "recent=16, prompt=50%"]
"""
SESSION = {
    "run": "run --config c.toml --run-name r1 -q --json",
    "again": "run --config c.toml --run-name r1 -q --json",
    "resumed": "run --resume r1 --protect none -q",
    "flag": "run --config c.toml --protect sinks=4+recent=20 --dry-run --json",
    "option": "run --config c.toml --method-opt gkv.protection=recent=30 --dry-run --json",
    "matched": "report results/r1 --matched --json",
    "plain": "report results/r1 --json",
    "replay": "replay --run r1 --method gkv --budget 48 --protect recent=20 --limit 1 -q --json",
    "window": "run --method gkv,h2o --budget 48 --task walk --protect recent=4",
    "word": "run --method gkv --budget 48 --task walk --protect newest=4",
    "small": "run --method gkv --budget 20 --task walk --protect prompt+recent=20",
    "page": "report results/r1 --matched --html page.html",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("protect")
    (path / "c.toml").write_text(FILE)
    return path


@pytest.fixture(scope="module")
def session(folder: Path, calls: Callable) -> dict:
    found = dict(zip(SESSION, calls(folder, [(line.split(), {}) for line in SESSION.values()])))
    failed = {name for name, result in found.items() if result.code}
    assert failed == {"resumed", "window", "word", "small", "page"}, {n: found[n].err for n in failed}
    return found


def methods(result) -> list[str]:
    return [cell["method"] for cell in json.loads(result.out.splitlines()[-1])["plan"]]


def test_rows_have_the_protection_among_their_options(session: dict, folder: Path) -> None:
    rows = pd.read_parquet(folder / "results" / "r1" / "rows.parquet")
    found = {(m, json.loads(o).get("protection")) for m, o in zip(rows["method"], rows["options"])}
    other = "prompt=50%+recent=16"
    assert found == {("full", None), ("gkv", None), ("gkv", other), ("random", None), ("random", other)}
    assert json.loads(session["again"].out.splitlines()[-1])["rows_done"] == len(rows) == 10
    assert "--protect cannot be given for an existing run" in session["resumed"].err


def test_flags_replace_the_file_and_an_option_wins_for_its_method(session: dict) -> None:
    assert session["flag"].code == 0
    plan = json.loads(session["flag"].out.splitlines()[-1])["plan"]
    assert len(plan) == 3
    plan = json.loads(session["option"].out.splitlines()[-1])["plan"]
    assert len(plan) == 4  # full, gkv with its own option, random twice


def test_reports(session: dict) -> None:
    (table,) = json.loads(session["matched"].out)["tables"]
    assert {line["method"] for line in table["cells"]} == {"gkv", "random"}
    labels = {c["method"] for t in json.loads(session["plain"].out)["tables"] for c in t["cells"]}
    assert "gkv(protection=prompt=50%+recent=16)" in labels
    assert "leave out --matched" in session["page"].err


def test_replay_takes_it(session: dict) -> None:
    document = json.loads(session["replay"].out.splitlines()[-1])
    assert "gkv(protection=recent=20)" in json.dumps(document)


def test_what_does_not_fit_is_one_line(session: dict) -> None:
    assert "--protect does not fit method 'gkv': the protection must keep the newest 16 tokens" in session["window"].err
    assert "--protect must be own, none, or some of prompt" in session["word"].err
    assert "--budget must be at least 21; got 20" in session["small"].err


def test_lm_eval_s_model_args_take_it() -> None:
    arguments = {"method": "gkv", "budget": 48, "protect": "recent=20+sinks=2"}
    read = model_args.read(arguments, device=None, batch_size=None)
    assert read.choice.label == "gkv(protection=sinks=2+recent=20)"
    assert read.method().keeps_always(48) == Protect(sinks=2, recent=20)
    with pytest.raises(UserError, match="model_args: protect does not fit method 'gkv'"):
        model_args.read(arguments | {"protect": "none"}, device=None, batch_size=None)
