"""The command line as a user meets it: help, lists, terminals of every kind. None of it needs torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.cli.index import flowing

COMMANDS = ("run", "join", "list", "show", "report", "repair", "bench", "audit", "doctor")
LIGHT = [
    line.split()
    for line in (
        *("", "--help", "--version", *(f"{name} --help" for name in COMMANDS)),
        *("list methods", "list methods g-kv", "list tasks", "list tasks walk", "list models", "list models tiny"),
        *("list methods --json", "list tasks --json", "list methods h2o --json"),
        *("list tasks gpqa --json", "list tasks mt_bench/thinking --json"),
        *("list methods streaming-llm+gkv --json", "list methods gkv+full", "show x --method gkv"),
        *(
            "run --budget 48 64",
            "run -m gkv tova --task walk",
            "run --slots 2 --batch-size 2",
            "list tasks --plugin no.py",
        ),
        *("list methds", "list", "bench --method gvk --sequences 0", "audit --parity nowhere"),
        *("show nothing", "report nothing", "run --method", "run stray", "list models ./no"),
    )
]


@pytest.fixture(scope="module")
def light(calls: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    results = calls(tmp_path_factory.mktemp("light"), [(argv, {}) for argv in LIGHT])
    return {" ".join(argv): result for argv, result in zip(LIGHT, results)}


@pytest.mark.parametrize("line", [" ".join(argv) for argv in LIGHT])
def test_light_commands_never_import_torch(light: dict, line: str) -> None:
    result = light[line]
    assert result.torch is False
    assert "Traceback" not in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_the_command_does_and_gives_examples(light: dict, command: str) -> None:
    result = light[f"{command} --help"]
    assert result.code == 0
    assert f"kvbench {command} " in result.out
    assert "Example" in result.out


def test_no_command_prints_help_on_stdout(light: dict) -> None:
    assert light[""].code == 0
    assert "Usage: kvbench" in light[""].out
    assert light[""].err == ""


def test_list_methods_shows_each_with_its_nature(light: dict) -> None:
    methods = {entry["name"]: entry for entry in json.loads(light["list methods --json"].out)}
    assert (methods["full"]["phase"], methods["full"]["bounded"]) == (None, False)
    gkv = {k: methods["gkv"][k] for k in ("kind", "phase", "scope", "bounded", "trained")}
    assert gkv == {"kind": "attention", "phase": "prompt+decode", "scope": "head", "bounded": True, "trained": False}
    assert methods["gkv"]["aliases"] == ["g-kv"]
    assert methods["gkv"]["min budget"] == 17
    assert all(name in light["list methods"].out for name in methods)
    one = light["list methods g-kv"].out
    assert "window=16" in one
    assert "2512.00504" in one


def test_list_shows_two_methods_under_one_budget(light: dict) -> None:
    both = json.loads(light["list methods streaming-llm+gkv --json"].out)
    assert both["about"].startswith("streaming-llm evicts the prompt and gkv the generated entries")
    assert (both["phase"], both["scope"], both["min budget"]) == ("prompt+decode", "head", 17)
    assert {"gkv.window=16", "streaming-llm.sinks=4"} <= {option["option"] for option in both["options"]}


def test_list_tasks_and_models(light: dict) -> None:
    tasks = {entry["name"]: entry for entry in json.loads(light["list tasks --json"].out)}
    assert tasks["aime24"]["questions"] == 30
    assert "walk" in tasks
    assert "variants" in light["list tasks walk"].out
    assert {name: tasks[name]["data"] for name in ("walk", "gpqa_diamond", "mt_bench", "gsm8k", "file")} == {
        "walk": "generated",
        "gpqa_diamond": "hub (gated)",
        "mt_bench": "bundled",
        "gsm8k": "hub",
        "file": "--task-file",
    }
    assert (tasks["longproc_html_to_tsv"]["data"], tasks["lm_eval:NAME"]["data"]) == ("web", "lm-eval")
    assert tasks["ruler"]["data"] == "generated, hub, web"
    assert (tasks["walk/orbit-100"]["summary"], tasks["file"]["questions"]) == ("variant of walk", None)
    assert "hub (gated)" in light["list tasks"].out
    places = {
        name: json.loads(light[f"list tasks {name} --json"].out)["data"] for name in ("gpqa", "mt_bench/thinking")
    }
    assert places == {"gpqa": "Idavidrein/gpqa (gated)", "mt_bench/thinking": "bundled"}
    assert "num_hidden_layers" in light["list models tiny"].out


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("list methds", 2, "cannot list 'methds'. Did you mean 'methods'? There are methods, tasks, recipes, models, "),
        ("list", 2, "missing argument"),
        ("run --method", 2, "'--method' requires an argument"),
        ("run stray", 2, "unexpected extra argument"),
        ("run --budget 48 64", 2, "extra argument(s) (64). Did you mean --budget 48,64?"),
        ("run -m gkv tova --task walk", 2, "Did you mean -m gkv,tova?"),
        ("run --slots 2 --batch-size 2", 2, "--slots and --batch-size are one setting; give one of them."),
        (
            "list methods gkv+full",
            2,
            "method 'full' takes no budget and cannot be combined; give it alone.",
        ),
        ("list tasks --plugin no.py", 2, "--plugin 'no.py' does not exist; give the path of a Python file."),
        ("show x --method gkv", 2, "--method 'gkv' picks among the answers to one question; give --sample ID with it."),
        ("bench --method gvk --sequences 0", 2, "error: unknown method 'gvk'"),
        ("bench --method gvk --sequences 0", 2, "error: --sequences must be 1 or more, or 'max'; got 0."),
        ("audit --parity nowhere", 2, "--parity 'nowhere' is not a folder."),
        ("show nothing", 2, "no run 'nothing'."),
        ("list models ./no", 3, "model folder './no' does not exist."),
    ],
)
def test_usage_errors_of_other_commands(light: dict, line: str, code: int, text: str) -> None:
    assert light[line].code == code
    assert text.lower() in light[line].err.lower()
    assert light[line].out == ""


@pytest.mark.parametrize(
    "env",
    [
        {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LANG": "C", "LC_ALL": "C"},
        {"PYTHONIOENCODING": "ascii"},
        {"COLUMNS": "20"},
        {"COLUMNS": "1"},
        {"TERM": "dumb"},
    ],
    ids=["C locale", "C coerced", "ascii", "20 columns", "1 column", "dumb"],
)
def test_any_terminal(kvbench: Callable, env: dict[str, str]) -> None:
    for argv in (["list", "methods"], ["--help"], ["list", "methods", "gkv"]):
        result = kvbench(*argv, env=env)
        assert result.code == 0, result.err
        assert "Traceback" not in result.err
        if "LANG" in env and argv[0] == "list":
            assert result.out.isascii()


def test_a_narrow_terminal_still_gets_readable_tables(kvbench: Callable) -> None:
    for columns in ("20", "1"):
        assert max(map(len, kvbench("list", "models", env={"COLUMNS": columns}).out.splitlines())) >= 50


@pytest.mark.parametrize("line", ["list methods", "list tasks", "list methods gkv", "data check", "doctor"])
def test_tables_in_a_pipe_fit_100_columns(kvbench: Callable, line: str) -> None:
    result = kvbench(*line.split())
    assert "\n" in result.out
    assert max(map(len, result.out.splitlines())) <= 100


def test_closed_pipe_ends_quietly() -> None:
    command = f"{sys.executable} -m kvbench list methods gkv | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_bug_is_one_line_and_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from kvbench.cli import app as cli
    from kvbench.cli.commands import list as list_command

    def broken() -> None:
        raise ZeroDivisionError("\x1bno")

    monkeypatch.setattr(list_command, "_models", broken)
    assert cli.main(["list", "models"]) == 1
    assert capsys.readouterr().err == (
        "error: internal error, please report it: ZeroDivisionError: \\x1bno. --debug shows where.\n"
    )
    assert cli.main(["list", "--debug", "models"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_doctor(kvbench: Callable, tmp_path: Path) -> None:
    result = kvbench("doctor", "--json", cwd=tmp_path)
    document = json.loads(result.out.splitlines()[-1])
    found = {check["check"]: check for check in document["checks"]}
    assert result.code == 0, result.err
    assert found["torch"]["found"]
    assert "context" in found["built-in model"]["found"]
    (tmp_path / "file").write_text("")
    result = kvbench("doctor", "--out", "file", cwd=tmp_path, env={"KVBENCH_DATA": "nowhere"})
    assert result.code == 3
    assert "2 of" in result.err
    assert "data folder, results folder" in result.err


def test_the_text_below_the_options_flows_and_its_examples_stay_indented(light: dict) -> None:
    assert flowing("Exit code: 0\npass.\n\nExamples:\n  a b\n  c\n") == "\nExit code: 0 pass.\n\nExamples:\n  a b\n  c"
    assert re.search(r"^ +Examples:\s+\n   kvbench report results/demo\b", light["report --help"].out, re.MULTILINE)
