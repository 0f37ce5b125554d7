"""The suites that ship with kvbench: each parses, plans and runs on a random model of its paper's architecture."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.folders import DATA, ROOT
from support.runs import model_folder

from kvbench import registry
from kvbench.cli import suites as suite_list
from kvbench.cli.app import main
from kvbench.config.layers import ABOUT, about, suites
from kvbench.config.run_config import RunConfig
from kvbench.report.published import every
from kvbench.sources.published import FILE

OWN = ("baselines", "demo", "first", "protection", "smoke")  # of no paper
REPLAYS = ("foresightkv-table1", "foresightkv-table2", "foresightkv-table7")
# Tasks of which the tests have rows; other suites run with all their tasks.
PART = {
    "foresightkv-table1": "math500,longbench/gov_report",
    "lookaheadkv-longbench": "longbench/qasper,longbench/trec",
    "lookaheadkv-longproc": "longproc_html_to_tsv",
    "lookaheadkv-ruler": "ruler/niah_multikey_3@4k",
    "trimkv-long": "longbench/qasper,longproc_countdown,scbench/kv,longmemeval",
}
DRAFT = ("lookaheadkv-longbench", "lookaheadkv-ruler", "lookaheadkv-longproc", "lookaheadkv-mtbench")
PAPERS = [name for name in suites() if name not in OWN]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models, of Qwen3 with random weights of every trained method and of Qwen2 without."""
    from kvbench.engine.model.load import load
    from kvbench.engine.model.random_weights import draw
    from kvbench.engine.model.weights import Base, save_weights

    path = tmp_path_factory.mktemp("suites")
    model_folder(path / "qwen2", "qwen2")
    loaded = load(str(model_folder(path / "qwen3")), device="cpu", dtype="float32")
    for name in ("foresightkv", "trimkv", "lookaheadkv", "duo"):
        weights = registry.methods.get(name)().weights()
        tensors, base = draw(weights, loaded.model), Base(name="random", config=loaded.model.config)
        save_weights(path / "qwen3" / f"{weights.kind}.safetensors", weights.kind, tensors, base, made={})
    (path / "attn").mkdir()
    weights = registry.methods.get("foresightkv")(features="attn").weights()
    save_weights(path / "attn/foresightkv.safetensors", weights.kind, draw(weights, loaded.model), base, made={})
    return path


def line(name: str) -> str:
    """The options that make a suite run on the folder's models and rows."""
    model = "qwen2" if name.startswith("gkv") else "qwen3"
    part = f" --task {PART[name]}" if name in PART else ""
    part += " --method-opt foresightkv.scorer=attn" * name.endswith("-attn")
    return f"--suite {name} --model {model}{part}" + " --method-opt speckv.draft=qwen3" * (name in DRAFT)


@pytest.fixture
def ask(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Result]:
    """Run a command line in the folder, with the rows of the tests as task data."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KVBENCH_DATA", str(DATA / "tasks"))
    monkeypatch.setenv("KVBENCH_ALLOW_DATA_MISMATCH", "true")
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1")

    def run(text: str) -> Result:
        if "mtbench" in text:  # its rows are bundled
            monkeypatch.delenv("KVBENCH_DATA", raising=False)
        code = main(text.split())
        return Result(code, *capsys.readouterr())

    return run


def last(result: Any) -> Any:
    assert result.code == 0, result.err
    return json.loads(result.out.splitlines()[-1])


@pytest.mark.parametrize("name", list(suites()))
def test_a_suite_says_what_it_is(name: str) -> None:
    told = about(name)
    assert set(told) <= set(ABOUT)
    assert all(told.values())
    if name in OWN:
        assert told["what"]
    else:
        assert "arXiv" in told["table"]
        assert told["same"]
        assert told["differs"]
    if name not in OWN:
        document = tomllib.loads(suites()[name].read_text(encoding="utf-8"))
        blocks = [document["run"], *document.get("grid", [])]
        methods = [method for block in blocks if "method" in block for method in [*block["method"]]]
        trained = {"foresightkv", "trimkv", "lookaheadkv"} & {m for m in methods if isinstance(m, str)}
        assert all(f"{method} weights" in told["needs"] for method in trained)


def test_the_list_has_every_suite(calls: Callable, tmp_path: Path) -> None:
    lines = ["list suites --json", "list suites gkv-table1 --json", "list suites gkv-tabel1", "list suites other.toml"]
    every, one, unknown, path = calls(tmp_path, [(line.split(), {}) for line in lines])
    listed = {entry["name"]: entry for entry in last(every)}
    assert list(listed) == list(suites())
    assert listed["gkv-table1"]["table"] == "G-KV (arXiv 2512.00504), Table 1"
    assert listed["gkv-table1"]["cells"] == 2 * (1 + 3)
    assert listed["foresightkv-fig3"]["cells"] == 2 * (1 + 4 * 3)
    assert every.torch is False
    full = last(one)
    assert (full["tasks"], full["budgets"], full["intervals"]) == (["amc23", "aime24"], ["512", "1024", "2048"], [128])
    assert "4,096 new tokens" in full["same"]
    assert "Did you mean 'gkv-table1'" in unknown.err
    assert path.err.startswith("error: 'other.toml' does not ship with kvbench")


@pytest.mark.parametrize("name", [name for name in PAPERS if name not in REPLAYS])
def test_a_suite_plans_and_runs_to_the_end(ask: Callable[[str], Result], folder: Path, name: str) -> None:
    plan = last(ask(f"run {line(name)} --limit 1 --dry-run --json"))["plan"]
    if name not in PART:
        assert len(plan) == suite_list.one(name)["cells"]
    if name == "foresightkv-table10":  # every method at its paper's own interval
        found = {(cell["method"], cell["budget"], cell["interval"]) for cell in plan}
        assert {("gkv", "1024", 128), ("foresightkv", "4096", 256), ("rpc(form=native)", None, 256)} <= found
        assert ("duo(sparsity=0.75)", None, 256) in found
    document = last(ask(f"run {line(name)} --limit 1 --max-new-tokens 64 --samples 1 --run-name {name} -q --json"))
    assert document["rows_done"] == document["rows_planned"] == len(plan)
    assert not document["failed"]
    record = json.loads((folder / "results" / name / "run.json").read_text())
    assert RunConfig.from_dict(record["config"]).max_new_tokens == 64


@pytest.mark.parametrize("name", REPLAYS)
def test_replays_compare_the_suite_s_methods_at_its_intervals(ask: Callable[[str], Result], name: str) -> None:
    rows = last(ask(f"replay {line(name)} --limit 1 --max-new-tokens 64 --budget 96 -q --json"))["rows"]
    given = suite_list.one(name)
    assert {row["method"] for row in rows} == {*given["methods"], "golden", "random"}
    assert {row["interval"] for row in rows} == set(given["intervals"])
    assert {row["task"] for row in rows} == set(PART.get(name, ",".join(given["tasks"])).split(","))
    assert {(row["budget"], row["traces"]) for row in rows} == {(96, 1)}


@pytest.mark.parametrize(
    ("more", "method"),
    [
        ("--suite foresightkv-table2 --config c.toml", "rkv"),
        ("--suite foresightkv-table7 --method gkv --budget 64 --interval 16", "gkv"),
    ],
)
def test_files_and_flags_override_a_replayed_suite(
    ask: Callable[[str], Result], folder: Path, more: str, method: str
) -> None:
    (folder / "c.toml").write_text('budget = 64\ninterval = 16\nlimit = 1\nmethod = ["rkv"]\n')
    rows = last(ask(f"replay {more} --model qwen3 --task aime24 --max-new-tokens 40 -q --json"))["rows"]
    assert {(row["method"], row["budget"], row["interval"]) for row in rows} == {
        (each, 64, 16) for each in (method, "golden", "random")
    }
    assert {row["traces"] for row in rows} == {1 if method == "rkv" else 3}


@pytest.mark.parametrize(
    ("suite", "method", "option"),
    [
        ("foresightkv-fig3", "foresightkv", "scorer"),
        ("trimkv-math", "trimkv", "gates"),
        (
            "lookaheadkv-longproc --task longproc_html_to_tsv --method-opt speckv.draft=qwen2",
            "lookaheadkv",
            "lookahead",
        ),
    ],
)
def test_missing_weights_are_one_line_with_the_training(
    ask: Callable[[str], Result], suite: str, method: str, option: str
) -> None:
    result = ask(f"run --suite {suite} --model qwen2 --limit 1 --dry-run")
    (error,) = [text for text in result.err.splitlines() if text.startswith("error: ")]
    assert result.code == 2
    assert f"--method-opt {method}.{option}=PATH" in error
    assert f"'kvbench train {method} --model" in error


def test_an_oracle_s_suite_is_for_replay(ask: Callable[[str], Result]) -> None:
    result = ask("run --suite foresightkv-table2 --model qwen3 --dry-run")
    assert result.code == 2
    assert "Use 'kvbench replay --method golden', where" in result.err


def test_the_page_of_suites_has_each_of_them() -> None:
    text = (ROOT / "docs" / "suites.md").read_text(encoding="utf-8")
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(PAPERS)
    counted = f"{len(every())} of the {len(FILE.read_text(encoding='utf-8').splitlines()) - 1} numbers"
    assert counted in text
