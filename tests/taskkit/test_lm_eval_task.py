"""Tasks of lm-eval by name: their prompts and scores are lm-eval's own, checked against its own evaluation."""

from __future__ import annotations

import json
import logging
import pickle
from dataclasses import replace

import pytest

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import SetupError, UserError
from kvbench.runner.execute import execute
from kvbench.scoring.pool import ScorePool
from kvbench.sources.data import Data
from kvbench.store import read_run, read_texts
from kvbench.task import Output
from kvbench.taskkit.lm_eval_source import definition, generation
from kvbench.taskkit.names import get_task, is_gated

# Answers that the two filters of gsm8k tell apart.
ANSWERS = ["so #### {}", "It is {} dollars.", "#### 99", "no idea"]


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def rows(count: int, start: int = 0) -> list[dict]:
    return [
        {"question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}"}
        for i in range(start, start + count)
    ]


@pytest.fixture
def folder(tmp_path):
    """A data folder with rows to ask and others to show as examples."""

    def write(name: str, asked: list[dict], examples: list[dict] | None = None) -> Data:
        (tmp_path / "lm_eval").mkdir(exist_ok=True)
        for suffix, part in (("", asked), (".fewshot", examples)):
            if part is not None:
                lines = "".join(json.dumps(row) + "\n" for row in part)
                (tmp_path / "lm_eval" / f"{name}{suffix}.jsonl").write_text(lines)
        return Data(tmp_path)

    return write


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1)


def by_lm_eval(data: Data, limit: int, model, **options):
    """The same rows as lm-eval itself loads and evaluates them."""
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    names = {"test": "gsm8k.jsonl", "train": "gsm8k.fewshot.jsonl"}
    files = {split: str(data.path / "lm_eval" / name) for split, name in names.items()}
    local = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}
    task = ConfigurableTask(config=definition("gsm8k").resolved() | local)
    none = TaskManager(include_defaults=False)  # it would read all of lm-eval's files
    return lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=none, limit=limit, bootstrap_iters=0, **options
    )


def test_prompts_and_scores_are_lm_evals(folder, monkeypatch, tmp_path):
    from lm_eval.api.model import LM

    class Canned(LM):
        """Answers the i-th question with the i-th text."""

        loglikelihood = loglikelihood_rolling = None

        def generate_until(self, requests):
            return [ANSWERS[i].format(2 * i) for i in range(len(requests))]

    monkeypatch.setattr(Canned, "__abstractmethods__", frozenset())
    data = folder("gsm8k", rows(9), rows(20, start=100))
    task = get_task("lm_eval:gsm8k")
    docs = task.docs(data, limit=4)
    results = by_lm_eval(data, 4, Canned())
    samples = {(s["doc_id"], s["filter"]): s for s in results["samples"]["gsm8k"]}
    for i, doc in enumerate(docs):
        strict, flexible = samples[i, "strict-match"], samples[i, "flexible-extract"]
        assert doc.turns[0].user == strict["arguments"][0][0]
        assert doc.turns[0].user.count("Question:") == 6
        score = task.score(doc, answer(ANSWERS[i].format(2 * i)))
        assert score.value == strict["exact_match"]
        assert score.aux["exact_match,flexible-extract"] == flexible["exact_match"]
        assert score.extracted == strict["filtered_resps"][0]
    assert [samples[i, "strict-match"]["exact_match"] for i in range(4)] == [1.0, 0.0, 0.0, 0.0]
    assert [samples[i, "flexible-extract"]["exact_match"] for i in range(4)] == [1.0, 1.0, 0.0, 0.0]
    assert task.notes() == []
    assert task.version == "3.0+lm-eval-0.4.13"


def test_a_run_is_what_lm_eval_gets_from_the_same_model(folder, tmp_path):
    from kvbench.integrations.lm_eval import KVBenchLM

    data = folder("gsm8k", rows(6), rows(8, start=100))
    grid = Grid(methods=(MethodChoice(name="gkv"),), budgets=(128,), tasks=("lm_eval:gsm8k",))
    config = RunConfig(grids=(grid,), interval=16, limit=3, data=str(data.path), max_new_tokens=24)
    result = execute(config, out=tmp_path / "out", notice=lambda text: None)
    run = read_run(result.run_dir).rows.merge(read_texts(result.run_dir), on="row_key").sort_values("doc_id")
    model = KVBenchLM(model="tiny", method="gkv", budget=128, interval=16)
    found = by_lm_eval(data, 3, model, gen_kwargs={"max_gen_toks": 24})["samples"]["gsm8k"]
    strict = [s for s in found if s["filter"] == "strict-match"]
    assert list(run.prompt) == [s["arguments"][0][0] for s in strict]
    assert list(run.output) == [s["resps"][0][0] for s in strict]
    assert list(run.score) == [s["exact_match"] for s in strict]
    assert set(run.task) == {"lm_eval:gsm8k"}


def test_scored_in_another_process_without_data(folder):
    task = get_task("lm_eval:gsm8k")
    docs = task.docs(folder("gsm8k", rows(3), rows(8, start=100)))
    with ScorePool() as pool:
        scores = [pool.submit(task, doc, answer(f"#### {2 * i}")).result() for i, doc in enumerate(docs)]
    assert [s.value for s in scores] == [1.0, 1.0, 1.0]
    assert len(pickle.dumps(task)) < 5000


def test_examples_from_the_asked_rows_are_told_and_marked(folder):
    task = get_task("lm_eval:gsm8k")
    docs = task.docs(folder("gsm8k", rows(8)), limit=4)
    for doc in docs:
        assert doc.turns[0].user.count(doc.reference["question"]) == 1  # not among its own examples
    assert task.version.endswith("+fewshot-from-asked-rows")
    (note,) = task.notes()
    assert "no lm_eval/gsm8k.fewshot.jsonl" in note


def test_kvbenchs_own_file_of_the_same_data(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    own = [{"id": f"gsm8k-{i}", **row, "final": "0"} for i, row in enumerate(rows(7))]
    (tmp_path / "gsm8k" / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    data = Data(tmp_path)
    docs = get_task("lm_eval:gsm8k").docs(data)
    assert [doc.reference for doc in docs] == rows(7)
    assert data.used["lm_eval:gsm8k"].location.endswith("gsm8k_test.jsonl")


def test_too_few_rows_for_the_examples(folder):
    with pytest.raises(SetupError, match="data of task 'lm_eval:gsm8k' do not fit"):
        get_task("lm_eval:gsm8k").docs(folder("gsm8k", rows(3)))


def test_rows_without_the_columns(folder):
    with pytest.raises(SetupError, match="data of task 'lm_eval:gsm8k' do not fit"):
        get_task("lm_eval:gsm8k").docs(folder("gsm8k", [{"problem": "x"}] * 8))


def test_a_folder_without_the_rows(tmp_path):
    with pytest.raises(SetupError, match=r"no data for task 'lm_eval:gsm8k': looked for .*lm_eval/gsm8k\.jsonl"):
        get_task("lm_eval:gsm8k").docs(Data(tmp_path))


def test_offline_without_data():
    with pytest.raises(SetupError, match=r"hub is unreachable.*folder that holds lm_eval/gsm8k\.jsonl"):
        get_task("lm_eval:gsm8k").docs(Data(env={}))


def test_through_the_chat_template(folder):
    """One user message with all examples; what the answer begins with follows the assistant's header."""
    data = folder("gsm8k_cot_llama", [{"question": "2 + 2?", "answer": "#### 4"}] * 3)
    (raw,) = get_task("lm_eval:gsm8k_cot_llama").docs(data, limit=1)
    task = get_task("lm_eval:gsm8k_cot_llama")
    (doc,) = task.docs(data, style="plain", limit=1)
    turn = doc.turns[0]
    assert turn.question.count("Problem:") == 9
    assert turn.question.rstrip().endswith("[answer] is the response to the problem.")
    assert "2 + 2?" in turn.question
    assert raw.turns[0].question.startswith(turn.question[:40])
    assert task.version.endswith("+answer-behind-thinking")


@pytest.mark.parametrize(
    ("text", "thinking", "value"),
    [
        ("<think>\nThe final answer is 5, no.\n</think>\n\nThe final answer is 4.", True, 1.0),
        ("The final answer is 4, no.</think>The final answer is 5.", True, 0.0),
        ("<think>\nThe final answer is 4.", True, 0.0),
        ("<think>\nThe final answer is 4.", False, 1.0),  # a block that the task did not ask for
        ("The final answer is 4.", False, 1.0),
    ],
)
def test_the_text_behind_a_thinking_block_is_scored(folder, text, thinking, value):
    task = get_task("lm_eval:gsm8k_cot_llama")
    (doc,) = task.docs(folder("gsm8k_cot_llama", [{"question": "2 + 2?", "answer": "#### 4"}]), style="plain")
    assert task.gen("qwen3").thinking is False
    assert task.score(doc, replace(answer(text), thinking=thinking)).value == value


def test_raw_prompts_keep_the_score_of_lm_eval(folder):
    """It reads the whole text, with a stray closing tag too."""
    task = get_task("lm_eval:gsm8k_cot_llama")
    (doc,) = task.docs(folder("gsm8k_cot_llama", [{"question": "2 + 2?", "answer": "#### 4"}]))
    assert task.score(doc, answer("The final answer is 4.</think>\n\nSo that is it.")).value == 1.0
    assert "answer-behind-thinking" not in task.version


def test_votes_over_several_answers_are_left_out(folder):
    task = get_task("lm_eval:gsm8k_cot_self_consistency")
    (doc,) = task.docs(folder("gsm8k_cot_self_consistency", rows(1)))
    assert (task.gen("llama").n, task.gen("llama").temperature) == (64, 0.2)
    assert "maj@64, maj@8 need several answers" in task.notes()[0]
    score = task.score(doc, answer("The answer is 0."))
    assert (score.value, score.extracted) == (1.0, "0")
    assert set(score.aux) == {"no_answer"}


def test_metrics_of_a_whole_corpus_are_refused(folder):
    with pytest.raises(UserError, match=r"no metric that rates single answers .* \(its metrics: bleu, ter, chrf\)"):
        get_task("lm_eval:wmt14-en-fr").docs(folder("wmt14-en-fr", [{"translation": {"en": "a", "fr": "b"}}] * 2))


def test_a_number_outside_the_scale_is_no_score(folder, monkeypatch):
    task = get_task("lm_eval:gsm8k")
    (doc,) = task.docs(folder("gsm8k", rows(1), rows(8, start=100)))
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(ConfigurableTask, "process_results", lambda *_: {"exact_match": 23.5})
    score = task.score(doc, answer("x"))
    assert (score.value, score.note) == (None, "lm-eval's exact_match,strict-match is 23.5, not a number from 0 to 1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hellaswag", "compares the likelihoods of given answers"),
        ("lambada_openai", "compares the likelihoods of given answers"),
        ("wikitext", "perplexity of whole texts"),
        ("humaneval", "runs model-written programs"),
        ("squadv2", "is defined by a Python program"),
    ],
)
def test_tasks_that_kvbench_run_cannot_ask(name, message):
    with pytest.raises(UserError, match=message):
        get_task(f"lm_eval:{name}").gen("llama")


@pytest.mark.slow
def test_names_that_are_none():
    """lm-eval's index of all its files is read for these."""
    with pytest.raises(UserError, match=r"no task 'gsm9k'\. Did you mean 'gsm8k'"):
        get_task("lm_eval:gsm9k").gen("llama")
    with pytest.raises(UserError, match="'mmlu' is a group of tasks"):
        get_task("lm_eval:mmlu").gen("llama")


def test_generation_settings():
    spec = generation({"until": "\n", "max_new_tokens": 7, "do_sample": True, "temperature": 0.5, "top_p": 0.9})
    assert (spec.stop, spec.max_new_tokens, spec.temperature, spec.top_p) == (("\n",), 7, 0.5, 0.9)
    greedy = generation({"until": ["a", ""], "do_sample": False, "temperature": 0.7, "top_k": 4})
    assert (greedy.stop, greedy.max_new_tokens, greedy.temperature, greedy.top_k) == (("a",), 256, 0.0, 0)
    assert generation({"do_sample": True}).temperature == 1.0
    assert generation({"temperature": 0.3}).temperature == 0.3
    assert generation({"num_beams": 1}).temperature == 0.0
    with pytest.raises(UserError, match="settings 'num_beams', 'typical_p', which"):
        generation({"num_beams": 2, "typical_p": 0.4})


def test_a_task_is_made_without_lm_eval(monkeypatch):
    """Reports ask every task for its headline."""
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    assert get_task("lm_eval:anything").headline == "score"


def test_the_data_of_a_gated_task_are_gated_in_lm_eval_too():
    assert is_gated("lm_eval:gpqa_diamond_cot_zeroshot")
    assert get_task("lm_eval:gpqa_main_generative_n_shot").gated
    assert not is_gated("lm_eval:gsm8k")
    assert not is_gated("lm_eval:no-such-task")
