"""``kvbench compare`` on real runs of the built-in model: equal runs, a wrong constant, files and formats."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.cli.app import main
from kvbench.cli.commands.compare import _plain
from kvbench.compare import planted
from kvbench.compare.decisions import decided
from kvbench.compare.reading import read_side
from kvbench.errors import UserError
from kvbench.runner import inputs
from kvbench.sources import hub

PLUGIN = '''
"""gkv under another name, with a constant that a test changes."""
from dataclasses import dataclass

from kvbench.eviction.api import ScoreOut
from kvbench.methods.gkv import GKV
from kvbench.registry import methods

WEIGHT = {weight}


@methods.register("mine")
@dataclass(frozen=True)
class Mine(GKV):
    paper = "none"

    def score(self, view) -> ScoreOut:
        made = super().score(view)
        return ScoreOut((WEIGHT * made.score).masked_fill(made.score.isinf(), float("-inf")), made.columns)
'''
CELL = "--budget 32 --interval 16 --task walk/orbit-100 --samples 1 -q"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, calls: Callable) -> Path:
    """Runs of gkv, twice; of a plug-in, before and after a constant changed."""
    path = tmp_path_factory.mktemp("compare")
    runs = [
        f"run --method full,gkv --limit 24 {CELL} --run-name main",
        f"run --method full,gkv --limit 24 {CELL} --run-name again",
    ]
    done = calls(path, [(line.split(), {}) for line in runs])
    for weight, run in ((1.0, "before"), (-1.0, "after")):
        (path / "mine.py").write_text(PLUGIN.format(weight=weight), encoding="utf-8")
        line = f"run --method full,mine --limit 24 {CELL} --plugin mine.py --run-name {run}"
        done += calls(path, [(line.split(), {})])
    assert [result.code for result in done] == [0] * 4, [result.err for result in done]
    return path


@pytest.fixture
def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """compare("main", "again") -> (exit code, stdout, stderr)"""
    monkeypatch.chdir(folder)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["compare", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_same_command_twice(compare) -> None:
    code, out, err = compare("main", "again")
    assert code == 0, err
    assert "2 cells: 2 same." in out
    assert not err


def test_one_wrong_constant_of_a_method(compare) -> None:
    code, out, err = compare("before", "after")
    assert code == 5, err
    assert "worse p<0.001" in out
    assert "fail: mine(" in err
    assert "the mean score fell by" in err
    assert "Differs, as a regression run allows: source of the method" in out


def test_the_plug_in_is_the_method_that_it_copies(compare) -> None:
    code, out, err = compare("main", "before", "--map", "gkv=mine")
    assert (code, err) == (0, "")
    assert "2 cells: 2 same." in out


def test_a_method_that_is_not_there(compare) -> None:
    code, _, err = compare("main", "before")
    assert code == 4
    assert "fail: gkv at 32 on walk/orbit-100: the new side has no such cell" in err


def test_against_a_baseline_file(compare, folder: Path) -> None:
    code, _, err = compare("main", "--save", "main.json")
    assert code == 0
    assert err.startswith("wrote main.json (2 cells, ")
    assert (folder / "main.json").stat().st_size < 8000
    assert compare("main.json", "again")[0] == 0
    code, _, err = compare("main.json", "after", "--map", "gkv=mine")
    assert code == 5
    code, _, err = compare("after", "main.json", "--map", "mine=gkv", "--strict")
    assert code == 0


def test_json(compare) -> None:
    code, out, _ = compare("before", "after", "--json", "--flips")
    document = json.loads(out)
    assert (code, document["exit_code"]) == (5, 5)
    [table] = document["tables"]
    cells = {cell["method"].partition("(")[0]: cell for cell in table["cells"]}
    assert cells["full"]["verdict"] == "same"
    assert cells["mine"]["verdict"] == "worse"
    assert cells["mine"]["difference"] < -0.3
    assert cells["mine"]["p"] <= 2 * cells["mine"]["p_sign_flip"] + 1e-3
    assert document["flips"][0]["answers"][0]["tail"]


def test_junit(compare) -> None:
    code, out, _ = compare("before", "after", "--format", "junit")
    assert code == 5
    suites = ET.fromstring(out)
    assert suites.attrib == {"tests": "2", "failures": "1", "skipped": "0", "errors": "0"}
    [failure] = suites.iter("failure")
    assert failure.get("message", "").startswith("worse p<0.001. the mean score fell")


def test_github(compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, out, err = compare("before", "after", "--format", "github")
    assert (code, err) == (5, "")
    first, *rest = out.splitlines()
    assert first.startswith("::error title=kvbench compare::mine(")
    mark = rest[0].removeprefix("::stop-commands::")
    assert rest[-1] == f"::{mark}::"
    assert rest[1] == "# kvbench compare"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = compare("main", "again", "--format", "github")
    assert out.splitlines()[0] == "::notice title=kvbench compare::2 cells: 2 same."
    assert (tmp_path / "summary.md").read_text(encoding="utf-8").startswith("# kvbench compare")


def test_github_reads_no_older_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "##[" not in _plain("a ##[error]b")


def test_a_replay_asks_for_nothing_that_a_folder_names(compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does it load a model for sides that cannot be compared."""
    seen = []

    def read(config, say, before=None):
        seen.append((hub.may_ask(config.model), config.model))
        raise UserError("stop here.")

    monkeypatch.setattr(inputs, "read_inputs", read)
    assert compare("main", "again", "--replay")[::2] == (2, "error: stop here.\n")
    assert seen == [(False, "tiny")]
    code, _, err = compare("main", "again", "--replay", "--map", "gkv=none")
    assert code == 2
    assert "has no such method or model" in err
    assert len(seen) == 1


def test_a_replay_without_answers_of_the_full_cache_says_what_to_run(make_run: Callable, rows: Callable) -> None:
    run = read_side(str(make_run("a", rows([1.0] * 6))))
    works = {"walk": SimpleNamespace(task=SimpleNamespace(name="walk"), prompts=[])}
    model = SimpleNamespace(tokenizer=None)
    loaded = SimpleNamespace(works=works, context=100, load_model=lambda config: model)
    with pytest.raises(UserError, match=r"that replay can read\. Run 'a' again with the method full too\.$"):
        decided(run, SimpleNamespace(tasks=["walk"], seed=0), loaded)


def test_flips_show_both_answers(compare) -> None:
    for format in ("text", "markdown"):
        _, out, _ = compare("before", "after", "--flips", "--format", format)
        assert "questions changed their score" in out
        assert "orbit-100-" in out
    _, out, _ = compare("main", "again", "--flips")
    assert out.endswith("No question changed its score.\n")


def test_plan(compare) -> None:
    code, out, _ = compare("after", "--plan", "--margin", "0.05")
    assert code == 0
    assert "at 64" in out
    assert compare("after", "--plan", "--margin", "0.05", "--save", "planned.json")[0] == 0
    code, _, err = compare("after", "--plan")
    assert (code, err) == (2, "error: --plan needs a margin above 0, as in --margin 0.02.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("main",), "error: give a second run: kvbench compare BASE NEW. --save and --plan take BASE alone.\n"),
        (("main", "again", "--margin", "2"), "error: --margin '2' is not a number from 0 to 1.\n"),
        (("main", "again", "--format", "xml"), "error: --format 'xml': choose text, json, markdown, junit, github.\n"),
        (("main", "again", "--map", "gkv"), "error: --map 'gkv': write BASE=NEW, as in --map gkv=mine.\n"),
        (("main", "again", "--save", "x"), "error: --save takes BASE alone; leave out 'again'.\n"),
        (
            ("main", "--plan", "--margin", "0.05", "--format", "markdown"),
            "error: --format 'markdown' needs a comparison, but --plan compares nothing. Choose text or json.\n",
        ),
        (("main", "--save", "x.json", "--strict"), "error: --save takes BASE alone; leave out --strict.\n"),
        (("main", "--save", "x.json", "--margin", "0.3"), "error: --save takes BASE alone; leave out --margin.\n"),
        (("main", "--save", "x.json", "--gate", "g.toml"), "error: --save takes BASE alone; leave out --gate.\n"),
        (
            ("main", "again", "--flips", "--format", "junit"),
            "error: --format 'junit' does not show --flips. Choose text, json, markdown or github.\n",
        ),
        (("main", "--plan", "--map", "gkv=mine"), "error: --plan takes BASE alone; leave out --map.\n"),
        (("main", "again", "--task", "walk"), "error: --task belongs to --replay; add --replay or leave out --task.\n"),
        (
            ("main", "again", "--gate", "none.toml"),
            "error: cannot read 'none.toml' (no such file or directory). Check its path and permissions.\n",
        ),
        (("main", "nothing"), "error: no run 'nothing'."),
    ],
)
def test_wrong_usage(compare, words, message) -> None:
    code, out, err = compare(*words)
    assert (code, out) == (2, "")
    assert err.startswith(message)


def test_no_torch(folder: Path, calls: Callable) -> None:
    results = calls(folder, [(["compare", "main", "again", "--flips"], {}), (["compare", "--help"], {})])
    assert [(result.code, result.torch) for result in results] == [(0, False), (0, False)]


def test_planted_faults_are_caught(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    assert main(["audit", "--compare", "main", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {fault["name"]: fault["found"] for fault in document["faults"]} == {
        "nothing": 0,
        "a drop of the score": 5,
        "one more entry after an eviction": 5,
        "a sample without a score": 4,
        "no such cell": 4,
        "another prompt": 2,
        "another task version": 2,
    }


def test_a_fault_that_is_not_caught_fails_the_audit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setitem(planted.FAULTS, "a drop of the score", (5, lambda cell: cell))
    assert main(["audit", "--compare", "main"]) == 1
    assert "MISSED, wanted 5" in capsys.readouterr().out


def test_replay_names_the_layer_that_decides_differently(folder: Path, calls: Callable) -> None:
    """Decisions of the plug-in before its constant changed are in a file; the file mine.py is the later one."""
    lines = [
        ("compare main --save kept.json --replay", 0),
        ("compare kept.json again --replay", 0),
        ("compare kept.json after --replay --plugin mine.py --map gkv=mine", 5),
        ("compare main results/again/rows.parquet --replay", 2),
    ]
    saved, same, other, several = calls(folder, [(line.split(), {}) for line, _ in lines])
    assert [result.code for result in (saved, same, other, several)] == [code for _, code in lines], other.err
    assert "Decisions on the same answers are equal in every layer." in same.out
    said = " ".join(other.out.split())  # as wide as the output may be
    assert "differ first at question orbit-100-1000000000, after " in said
    assert "tokens: layer 0 keeps other entries" in said
    assert several.err.startswith("error: --replay reads the answers of one run again; 'results/again/rows.parquet'")
