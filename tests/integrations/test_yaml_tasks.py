"""kvbench's tasks as YAML files of lm-eval: the same documents, settings and scores as `kvbench run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.folders import DATA

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.integrations import TASKS, yaml_tasks
from kvbench.runner.execute import execute
from kvbench.sources.data import Data
from kvbench.store import read_run, read_texts
from kvbench.task import Score
from kvbench.taskkit.names import get_task

EXCERPTS = {"data": str(DATA / "tasks"), "allow_data_mismatch": True}  # 3 rows of each
FILES = sorted(path for path in TASKS.glob("*.yaml") if not path.name.startswith("_"))
MODEL = {"model": "tiny", "method": "gkv", "budget": 64, "interval": 32}


class _Loader(yaml.SafeLoader):
    """Functions stay names."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


def load(path: Path) -> dict:
    given = yaml.load(path.read_text(), _Loader)
    return (load(TASKS / given.pop("include")) if "include" in given else {}) | given


def run_kvbench(out: Path, task: str, **settings):
    grid = Grid(methods=(MethodChoice(name="gkv"),), budgets=(64,), tasks=(task,))
    result = execute(RunConfig(grids=(grid,), interval=32, **settings), out=out, notice=lambda text: None)
    return read_run(result.run_dir).rows.merge(read_texts(result.run_dir), on="row_key")


def documents(task: str, **settings):
    return yaml_tasks.documents(**EXCERPTS | settings, **{yaml_tasks.TASK: task})["test"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_are_those_of_the_task(path):
    config = load(path)
    name = config["dataset_kwargs"][yaml_tasks.TASK]
    spec, kwargs = get_task(name).gen("llama"), config["generation_kwargs"]
    assert config["task"] == f"kvbench_{name}" == path.stem
    assert (kwargs["max_gen_toks"], tuple(kwargs["until"])) == (spec.max_new_tokens, spec.stop)
    assert kwargs["do_sample"] is (spec.temperature > 0)
    assert kwargs.get("temperature", 0.0) == spec.temperature
    assert kwargs.get("top_p", 1.0) == spec.top_p
    assert config.get("repeats", 1) == spec.n
    assert float(config["metadata"]["version"]) == float(get_task(name).version)
    if spec.n > 1:
        assert config["filter_list"][0]["filter"] == [{"function": "take_first_k", "k": spec.n}]


def test_the_score_is_that_of_kvbench_run(tmp_path, evaluate):
    found = evaluate("kvbench_chain", MODEL, limit=12)
    rows = run_kvbench(tmp_path, "chain", limit=12)
    results = found["results"]["kvbench_chain"]
    assert results["score_partial,none"] == pytest.approx(rows.score_partial.mean())
    assert results["score,none"] == pytest.approx(rows.score.mean())
    assert results["no_answer,none"] == pytest.approx(rows.no_answer.mean())
    assert results["unscored,none"] == 0
    assert 0 < results["score_partial,none"] < 1
    assert found["config"]["kvbench"]["output_tokens"] == rows.output_tokens.sum()


def test_samples_are_those_of_kvbench_run(tmp_path, evaluate):
    """Through the chat template, drawn at the task's temperature, 32 of each question."""
    model = MODEL | EXCERPTS | {"thinking": True, "seed": 5}
    drawn = {"max_gen_toks": 6, "temperature": 3.0, "top_k": 20}  # a Qwen3's own top-k is not in the file
    options = {"limit": 2, "apply_chat_template": True, "gen_kwargs": drawn}
    found = evaluate("kvbench_amc23", model, **options)["samples"]["kvbench_amc23"]
    settings = EXCERPTS | {"limit": 2, "max_new_tokens": 6, "temperature": 3.0, "seed": 5}
    run = run_kvbench(tmp_path, "amc23", **settings)
    for sample in found:
        rows = run[run.doc_id == sample["doc"][yaml_tasks.DOC]].sort_values("sample")
        assert len(rows) == 32
        assert sample["filtered_resps"][0] == list(rows.output)
        assert sample["score"] == rows.score.mean()


def test_a_questions_score_is_the_mean_of_its_answers():
    doc = documents("aime24", model="tiny", version=1.0)[0]
    right = f"<think>hm</think>\\boxed{{{doc['reference']}}}"
    found = yaml_tasks.question_scores(doc, [[right, "\\boxed{-3}", right, "<think>\\boxed{" + doc["reference"] + "}"]])
    assert found == {"score": 0.75, "score_strict": 0.5, "no_answer": 0.25, "unscored": 0.0}
    assert yaml_tasks.question_scores(doc, [right])["score"] == 1.0


def test_the_thinking_block_is_known_from_the_models_arguments():
    """R1 distills write no opening tag: only the setting tells an unfinished block from an answer."""
    made = {thinking: documents("aime24", thinking=thinking)[0] for thinking in (True, None)}
    unfinished = ["so \\boxed{" + made[None]["reference"] + "}"]
    assert yaml_tasks.question_scores(made[True], unfinished)["score_strict"] == 0.0
    assert yaml_tasks.question_scores(made[None], unfinished)["score_strict"] == 1.0


def test_a_model_given_as_an_object_brings_its_settings():
    """lm-eval passes `documents` the model_args; a model that is given as an object has none."""
    yaml_tasks.use_settings(RunConfig(grids=(), **EXCERPTS, thinking=True))
    missing = {yaml_tasks.TASK: "aime24"}
    assert yaml_tasks.documents(**missing)["test"][0]["thinking"] is True
    assert yaml_tasks.documents(**missing, thinking=False)["test"][0]["thinking"] is False


def test_an_answer_that_cannot_be_scored_is_neither_right_nor_wrong(monkeypatch):
    doc = documents("chain")[0]
    scores = iter([Score(value=1.0, partial=0.5), Score(value=None, note="timeout")])
    monkeypatch.setattr("kvbench.taskkit.synthetic_task.SyntheticTask.score", lambda *_: next(scores))
    found = yaml_tasks.question_scores(doc, [["a", "b"]])
    assert found == {"score": 1.0, "score_partial": 0.5, "unscored": 0.5}
    monkeypatch.setattr("kvbench.taskkit.synthetic_task.SyntheticTask.score", lambda *_: Score(value=None))
    assert yaml_tasks.question_scores(doc, ["a"]) == {"unscored": 1.0}


def test_rows_hold_plain_text():
    row = documents("chain")[3]
    doc = get_task("chain").docs(Data(env={}))[3]
    assert (row["prompt"], row[yaml_tasks.DOC]) == (doc.turns[0].user, doc.doc_id)
    assert json.loads(row["meta"]) == dict(doc.meta)
