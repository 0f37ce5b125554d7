"""`kvbench lm-eval`: what it adds to lm-eval's command line, and how it says what is wrong."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint

import pytest
from support.folders import ROOT

from kvbench.integrations import TASKS

ARGS = "model=tiny,method=gkv,budget=64,interval=32"


def test_help_and_path_need_no_lm_eval(calls, tmp_path):
    lines = [(["lm-eval", *a], {}) for a in (["--help"], ["-h"], ["--path"], [])]
    shown, short, path, nothing = calls(tmp_path, lines)
    assert (shown.code, short.out) == (0, shown.out)
    assert "kvbench lm-eval ls tasks" in shown.out
    assert path.out.strip() == str(TASKS)
    assert (nothing.code, nothing.err) == (
        2,
        "error: lm-eval needs arguments; 'kvbench lm-eval --help' has examples.\n",
    )
    assert not nothing.torch


def test_what_is_wrong_is_said_in_one_line_and_at_once(calls, tmp_path):
    """Before lm-eval reads its task files."""
    wrong = {
        "model=tiny,method=gkw,budget=64": (2, "model_args: unknown method 'gkw'. Did you mean 'gkv'"),
        "model=tiny,method=gkv": (2, "model_args: method 'gkv' needs budget."),
        "model=tiny,methd=gkv": (2, "model_args: unknown key 'methd'."),
    }
    lines = [(["lm-eval", "--model_args", text, "--tasks", "kvbench_chain"], {}) for text in wrong]
    lines.append((["lm-eval", "--model", "kvbench", "--config", "none.yaml", "--tasks", "kvbench_chain"], {}))
    *found, config = calls(tmp_path, lines)
    for result, (code, text) in zip(found, wrong.values()):
        assert result.code == code
        assert result.err.splitlines()[-1].startswith(f"error: {text}")
    assert config.code == 2
    assert config.err.splitlines()[-1].startswith("error: lm-eval: FileNotFoundError: ")


@pytest.mark.slow
def test_a_whole_evaluation(kvbench, tmp_path):
    """lm-eval's own table, with a folder of the user's tasks beside kvbench's."""
    (tmp_path / "mine").mkdir()
    mine = f"include: {TASKS / 'kvbench_chain.yaml'}\ntask: my_chain\ngeneration_kwargs: {{until: ['.']}}\n"
    (tmp_path / "mine" / "my_chain.yaml").write_text(mine)
    given = ["--model_args", f"{ARGS},device=cpu", "--tasks", "kvbench_chain,my_chain", "--include_path", "mine"]
    done = kvbench("lm-eval", *given, "--limit", "4", "--output_path", "out", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "|kvbench_chain|" in done.out
    assert "|my_chain" in done.out
    assert "score_partial" in done.out
    assert list((tmp_path / "out").rglob("results_*.json"))


@pytest.mark.slow
def test_unreachable_data_and_unknown_tasks(calls, tmp_path):
    offline = {"HF_HUB_OFFLINE": "1"}
    lines = [(["lm-eval", "--model_args", ARGS, "--tasks", task], offline) for task in ("gsm8k", "kvbench_chan")]
    gsm8k, unknown = calls(tmp_path, lines)
    assert gsm8k.code == 3
    assert "the hub is unreachable" in gsm8k.err.splitlines()[-1]
    assert (unknown.code, unknown.err.splitlines()[-1]) == (
        2,
        "error: lm-eval: ValueError: 'Tasks not found: kvbench_chan'.",
    )


def test_later_versions_of_lm_eval_find_the_model_by_its_entry_point():
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lm_eval.models"]
    model = EntryPoint("kvbench", entries["kvbench"], "lm_eval.models").load()
    assert model.__name__ == "KVBenchLM"
