"""Runs whose data, files or model are not what they should be: what is told, recorded and refused (B050 to B077)."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench import tiny
from kvbench.cli.app import main

RUN = "run --method knorm --budget 32 --interval 8 --max-new-tokens 8 --samples 1 --limit 2 -q"
RAW = "--no-chat-template"
GPQA = {
    "Correct Answer": "a",
    "Incorrect Answer 1": "b",
    "Incorrect Answer 2": "c",
    "Incorrect Answer 3": "d",
    "High-level domain": "X",
    "Subdomain": "Y",
}
REFUSED = {
    "B050": (
        "--task aime24 --data d --chat-template t.jinja",
        2,
        "error: chat template t.jinja, line 3: unexpected '}'.",
    ),
    "B053": (
        "--task walk --model ./mamba",
        2,
        "error: architecture 'MambaForCausalLM' is not supported: 2 of 2 layers have neither a KV cache",
    ),
    "B068 pipe": ("--task-file pipe", 2, "error: --task-file pipe is a pipe, not a file."),
    "B070": (
        "--task gpqa",
        3,
        "error: task 'gpqa_diamond' is not on this machine and the hub is unreachable. 'kvbench data fetch "
        "gpqa_diamond' on a connected machine makes a folder with gpqa_diamond/gpqa_diamond.jsonl for --data or "
        "KVBENCH_DATA. 'gpqa_diamond' is gated: accept the terms on the hub's page and set HF_TOKEN on the "
        "connected machine.",
    ),
    "all that is missing, offline": (
        "--task aime24,walk/orbit-100,gpqa,longbench,niah/essay@1k,longbench_e/lcc",
        3,
        "error: the data of 25 tasks are not on this machine and the hub is unreachable. 'kvbench data fetch aime24 "
        "gpqa_diamond longbench niah/essay@1024 longbench_e/lcc' on a connected machine makes a folder with them for "
        "--data or KVBENCH_DATA. 'gpqa_diamond' is gated: accept the terms on the hub's page and set HF_TOKEN on the "
        "connected machine.",
    ),
    "all that is missing, in a folder": (
        "--task amc23,gpqa,aime24,lm_eval:gsm8k --data d",
        3,
        "error: --data has no data for 2 tasks. 'kvbench data fetch amc23 aime24 --out d' on a connected machine adds "
        "them.",
    ),
    "the rest beside a task of lm-eval": (
        "--task lm_eval:nq_open,amc23,aime24 --data d",
        3,
        "looked for 'd/lm_eval/nq_open.jsonl'. Give a folder that has it.\nerror: --data has no data for 2 tasks. "
        "'kvbench data fetch amc23 aime24 --out d' on a connected machine adds them.",
    ),
    "no folder": ("--task gsm8k --data nowhere", 3, "error: --data 'nowhere' does not exist."),
    "no file": (
        "--task amc23 --data d",
        3,
        "error: --data has no data for task 'amc23': looked for 'd/amc23/amc23.jsonl'.",
    ),
    "other rows": (
        "--task gsm8k --data d",
        3,
        "(--data) are not the expected ones: 2 rows instead of 1319. Point --data or KVBENCH_DATA to the right data; "
        "--allow-data-mismatch uses the present data and records the mismatch.",
    ),
    "no JSON": (
        "--task math500 --data d",
        3,
        "error: d/math500/math500.jsonl:1: not JSON (expected value at column 1).",
    ),
    "B075": ("--task mt_bench", 2, "error: task 'mt_bench' needs a judge: "),
    "B076": (
        "--task mt_bench --judge none --judge-key sk-canary",
        2,
        "error: keys are not taken from the command line",
    ),
}


def put(file: Path, *rows: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    put(path / "d/gsm8k/gsm8k_test.jsonl", *({"id": str(i), "question": "?", "answer": "#### 1"} for i in range(2)))
    put(path / "d/math500/math500.jsonl", "<html>not found</html>\n")
    samples = [GPQA | {"Record ID": f"r{i}", "Question": f"q{i}"} for i in range(3)]
    put(path / "d/gpqa_diamond/synthetic_gpqa_format.jsonl", *samples)
    put(path / "t.jinja", "{% for m in messages %}\n{{ m.content }}{% endfor %}\n{{ x } }}\n")
    put(path / "long.jsonl", {"question": "many words " * 40_000, "answer": "1"})
    put(
        path / "mamba/config.json",
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    )
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "mamba/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.path() / name, path / "mamba")
    os.mkfifo(path / "pipe")
    return path


@pytest.fixture(scope="module")
def session(calls: Callable, folder: Path) -> dict:
    lines = {name: line for name, (line, _, _) in REFUSED.items()} | {
        "taken": "--task gsm8k --data d --allow-data-mismatch --run-name taken",
        "resumed": "--task gsm8k --data d --allow-data-mismatch --run-name taken",
        "refused anew": "--task gsm8k --data d --run-name taken",
        "sample": "--task gpqa --data d --run-name sample",
        "B069": "--task-file long.jsonl --run-name long",
        "unused": "--task gsm8k --data d --allow-data-mismatch --data-revision main --dry-run",
    }
    argv = [[*RUN.split(), *line.split(), *([RAW] if name != "B050" else [])] for name, line in lines.items()]
    return dict(zip(lines, calls(folder, [(words, {}) for words in argv])))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(session: dict, name: str) -> None:
    result = session[name]
    _, code, text = REFUSED[name]
    assert result.code == code, result.err
    assert text in result.err
    assert "Traceback" not in result.err
    assert "sk-canary" not in result.err
    assert result.out == ""


def data_of(folder: Path, run: str, task: str) -> dict:
    return json.loads((folder / "results" / run / "run.json").read_text())["environment"]["tasks"][task]["data"]


def test_other_rows_are_taken_when_that_is_asked_and_recorded(session: dict, folder: Path) -> None:
    assert session["taken"].code == 0, session["taken"].err
    assert "warning: data of task 'gsm8k' differ: 2 rows instead of 1319." in session["taken"].err
    found = data_of(folder, "taken", "gsm8k")
    assert (found["mismatch"], found["sample"], found["rows"]) == ("2 rows instead of 1319", False, 2)
    assert session["resumed"].code == 0
    assert (session["refused anew"].code, session["unused"].code) == (3, 0)


def test_a_sample_is_told_and_recorded(session: dict, folder: Path) -> None:
    assert session["sample"].code == 0, session["sample"].err
    text = "a sample: 3 of 198 rows (gpqa_diamond/synthetic_gpqa_format.jsonl)"
    assert f"warning: data are samples, not the real data: 'gpqa_diamond': {text}." in session["sample"].err
    found = data_of(folder, "sample", "gpqa_diamond")
    assert (found["mismatch"], found["sample"], found["rows"]) == (text, True, 3)


def test_a_prompt_that_is_too_long_is_a_row_without_a_score(session: dict) -> None:  # B069
    assert session["B069"].code == 4
    assert "error: 1 of 1 row has no score (1 prompt_too_long)" in session["B069"].err


def test_the_settings_may_stand_in_a_file_and_in_the_environment(calls: Callable, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("allow_data_mismatch = true\n")
    put(tmp_path / "x/gsm8k/gsm8k_test.jsonl", {"id": "a", "question": "?", "answer": "#### 1"})
    line = f"{RUN} {RAW} --task gsm8k --data x --dry-run"
    by_file, by_variable, wrong = calls(
        tmp_path,
        [
            ([*line.split(), "--config", "c.toml"], {}),
            (line.split(), {"KVBENCH_ALLOW_DATA_MISMATCH": "true", "KVBENCH_DATA_REVISION": "main"}),
            (line.split(), {"KVBENCH_ALLOW_DATA_MISMATCH": "perhaps"}),
        ],
    )
    assert (by_file.code, by_variable.code, wrong.code) == (0, 0, 2), by_file.err + by_variable.err
    assert "environment variable KVBENCH_ALLOW_DATA_MISMATCH: 'perhaps' is not" in wrong.err
    assert "not known and has no effect" not in by_variable.err


@pytest.mark.parametrize(("task", "code"), [("walk", 2), ("walk,file", 0), ("file/q", 0)])
def test_a_task_file_is_not_ignored(task: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "1+1?", "answer": 2}) + "\n")
    line = f"run --method full --limit 1 --max-new-tokens 8 --dry-run --task {task} --task-file {file}"
    assert main(line.split()) == code
    told = "holds task 'file/q', but the run has only the tasks walk. Add file/q to --task"
    assert (told in capsys.readouterr().err) == (code == 2)
