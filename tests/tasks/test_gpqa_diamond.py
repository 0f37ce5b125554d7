"""GPQA on made-up questions in its columns: orders of options, clusters, prompts, scores."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from kvbench.tasks.gpqa_diamond import LETTERS, ORDERS, option_order
from support.folders import DATA, ROOT

from kvbench.errors import SetupError
from kvbench.registry import tasks
from kvbench.report import stats
from kvbench.sources.data import Data
from kvbench.task import Output
from kvbench.taskkit.names import get_task

SAMPLE = DATA / "tasks" / "gpqa_diamond" / "synthetic_gpqa_format.jsonl"
QUESTIONS = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def source(tmp_path: Path) -> Data:
    (tmp_path / "gpqa_diamond").mkdir()
    shutil.copy(SAMPLE, tmp_path / "gpqa_diamond" / "gpqa_diamond.jsonl")
    return Data(tmp_path, env={}, allow_mismatch=True)


def answer(text: str, thinking: bool | None = True) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)


def test_the_manifest():
    task = get_task("gpqa")
    manifest = task.manifest
    assert task.name == "gpqa_diamond"
    assert manifest is not None
    assert manifest.gated
    assert (manifest.hub, manifest.config, manifest.split, manifest.rows) == (
        "Idavidrein/gpqa",
        "gpqa_diamond",
        "train",
        198,
    )
    assert len(manifest.revision or "") == 40
    assert task.size() == 198 * ORDERS
    assert not (ROOT / "kvbench" / "bundled" / "gpqa_diamond").exists()


def test_every_question_under_every_order(source):
    docs = get_task("gpqa_diamond").docs(source)
    assert len(docs) == len(QUESTIONS) * ORDERS == len({doc.doc_id for doc in docs})
    assert Counter(doc.cluster for doc in docs) == {q["Record ID"]: ORDERS for q in QUESTIONS}
    assert docs == get_task("gpqa_diamond").docs(source)
    for doc in docs:
        row = next(q for q in QUESTIONS if q["Record ID"] == doc.cluster)
        shown = doc.turns[0].user.split("\n\n")[-1].splitlines()
        assert [line[:3] for line in shown] == ["A) ", "B) ", "C) ", "D) "]
        options = [line[3:] for line in shown]
        right = options[LETTERS.index(doc.reference)]
        assert right == row["Correct Answer"]
        assert sorted(options) == sorted([right, *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))])
        assert doc.meta["category"] == row["High-level domain"]
        assert doc.meta["order"].index("0") == LETTERS.index(doc.reference)


def test_a_limit_asks_each_question_before_any_twice(source):
    task, count = get_task("gpqa_diamond"), len(QUESTIONS)
    docs = task.docs(source)
    assert [doc.cluster for doc in docs[:count]] == [q["Record ID"] for q in QUESTIONS]
    assert task.docs(source, limit=count + 2) == docs[: count + 2]


def test_orders_are_pinned():
    """A change of Python or of the rule would make other prompts under the same version."""
    assert [option_order("rec0", i) for i in range(3)] == [[3, 1, 0, 2], [0, 3, 1, 2], [2, 0, 3, 1]]
    places = Counter(option_order(f"rec{q}", i).index(0) for q in range(198) for i in range(ORDERS))
    assert all(330 < places[p] < 470 for p in range(4))  # 396 each expected, standard deviation 17


def test_prompts(source):
    task = get_task("gpqa_diamond")
    doc = task.docs(source, limit=1)[0]
    instruction, question, _ = doc.turns[0].user.split("\n\n")
    assert instruction.startswith("Answer the following multiple choice question. The last line of your response")
    assert "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD." in instruction
    assert question == QUESTIONS[0]["Question"]
    other = task.docs(source, style="foresightkv", limit=1)[0]
    assert other.turns[0].user.startswith(
        "Please solve the following problem step by step and put the final answer within \\boxed{}.\nA ball"
    )
    assert other.reference == doc.reference


def test_scores(source):
    task = get_task("gpqa_diamond")
    doc = task.docs(source, limit=1)[0]
    right, wrong = doc.reference, "A" if doc.reference != "A" else "B"
    score = task.score(doc, answer(f"Answer: {wrong}?</think>Answer: {right}"))
    assert (score.value, score.extracted) == (1.0, right)
    assert score.aux == {"simple_evals": 0.0, "no_answer": 0.0, "right_option": float("ABCD".index(right))}
    assert task.score(doc, answer(f"</think>\\boxed{{{wrong}}}")).value == 0.0
    cut = task.score(doc, answer(f"Answer: {right}, wait"))
    assert (cut.value, cut.extracted, cut.aux["no_answer"], cut.aux["simple_evals"]) == (0.0, None, 1.0, 1.0)


def test_the_standard_error_counts_questions(source):
    """Eight documents of one question are eight samples of it: the error is that of the question means."""
    docs = get_task("gpqa_diamond").docs(source)
    values = [float((QUESTIONS.index(q) * 3 + i) % 5 < 2) for i in range(ORDERS) for q in QUESTIONS]
    by_document = stats.estimate([[v] for v in values], clusters=[doc.cluster for doc in docs])
    samples = [[v for v, doc in zip(values, docs) if doc.cluster == q["Record ID"]] for q in QUESTIONS]
    by_question = stats.estimate(samples)
    assert by_document.mean == pytest.approx(by_question.mean)
    assert by_document.se == pytest.approx(by_question.se)


def test_sampling_and_record():
    qwen, other = get_task("gpqa_diamond").gen("qwen3"), get_task("gpqa_diamond").gen("llama")
    assert (qwen.n, qwen.max_new_tokens, qwen.temperature, qwen.top_p, qwen.top_k) == (1, 32768, 0.6, 0.95, 20)
    assert (other.top_k, other.thinking) == (0, True)
    assert get_task("gpqa_diamond").sources() == {"option_orders": "8", "option_seed": "0"}
    assert tasks.get("gpqa-diamond") is tasks.get("gpqa_diamond")


def test_bad_data(tmp_path: Path):
    file = tmp_path / "gpqa_diamond" / "gpqa_diamond.jsonl"
    file.parent.mkdir()
    source = Data(tmp_path, env={}, allow_mismatch=True)
    file.write_text(f"{json.dumps(QUESTIONS[0])}\n{json.dumps(QUESTIONS[0])}\n", encoding="utf-8")
    with pytest.raises(SetupError, match="some values of 'Record ID' occur twice"):
        get_task("gpqa_diamond").docs(source)
    file.write_text('{"Record ID": "1", "Question": "?"}\n', encoding="utf-8")
    with pytest.raises(SetupError, match=r"have no column '(Inc|C)orrect Answer"):
        get_task("gpqa_diamond").docs(source)
