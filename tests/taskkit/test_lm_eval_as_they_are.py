"""Tasks of lm-eval that docs/tasks.md lists as working as they are: prompts and scores on made rows of their columns.

Tasks whose packages are not installed are skipped: ifeval (langdetect, immutabledict) and minerva_math500
(antlr4-python3-runtime 4.11, while kvbench's own installation brings 4.13).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest

from kvbench.sources.data import Data
from kvbench.task import Output
from kvbench.taskkit.names import get_task

BOOK = {"id": 0, "context": "Ann lives in York.", "input": "Where does Ann live?", "answer": ["York"], "options": ["-"]}
CHOICE = BOOK | {"options": ["Hull", "York", "Leeds", "Ripon"]}
GRAPH = {
    "prompt": "The graph: a -> b. Which nodes?",
    "answer_nodes": ["b", "c"],
    "prompt_chars": 31,
    "problem_type": "bfs",
}
SPANS = {"number": ["7"], "date": [{"day": "", "month": "", "year": ""}], "spans": [[]]}
DROP = {"number": "7", "date": {"day": "", "month": "", "year": ""}, "spans": [], "worker_id": "w", "hit_id": "h"}
TRIVIA = {"question": "Who", "answer": {"value": "Ann", "aliases": ["Ann", "Anna"]}}

CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # task -> a row, a right answer, a wrong one
    "aime24": ({"Problem": "1 + 24?", "Answer": 25}, "So $25$.", "So $26$."),
    "asdiv_cot_llama": ({"body": "Two.", "question": "?", "answer": "2 (a)"}, "The final answer is 2", "It is 3"),
    "babilong_qa1": (
        {"input": "Ann went to the attic.", "question": "Where is Ann?", "target": "attic"},
        "attic",
        "hall",
    ),
    "coqa": (
        {
            "story": "Ann is here.",
            "questions": {"input_text": ["Who?"]},
            "answers": {"input_text": ["Ann"]},
            "additional_answers": {str(n): {"input_text": ["Ann"]} for n in range(3)},
        },
        "Ann",
        "Bob",
    ),
    "drop": (
        {
            "query_id": "q",
            "passage": "Seven.",
            "question": "How many?",
            "answer": DROP,
            "validated_answers": SPANS | {"worker_id": ["v"], "hit_id": ["h"]},
        },
        "7",
        "8",
    ),
    "graphwalks_128k": (GRAPH, "Thus\nFinal Answer: [b, c]", "b, c"),
    "graphwalks_1M": (GRAPH, "Final Answer: [c, b]", "Final Answer: [d]"),
    "gsm8k_cot": ({"question": "1 + 1?", "answer": "#### 2"}, "The answer is 2.", "The answer is 3."),
    "ifeval": (
        {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": None}]},
        "Fine.",
        "Fine, then.",
    ),
    "infinitebench_code_debug": (CHOICE | {"answer": ["York"]}, "B", "A"),
    "infinitebench_code_run": (BOOK | {"input": "Please give func_1(3).", "answer": ["-4"]}, "-4", "4"),
    "infinitebench_kv_retrieval": (BOOK | {"answer": ["7f"]}, "It is 7f", "7e"),
    "infinitebench_longbook_choice_en": (CHOICE, "B", "C"),
    "infinitebench_longbook_qa_chn": (BOOK | {"answer": ["北京"]}, "北京", "上海"),
    "infinitebench_longbook_qa_en": (BOOK, "York", "Hull"),
    "infinitebench_longdialogue_qa_en": (BOOK, "York", "Hull"),
    "infinitebench_math_find": (
        BOOK | {"input": "You should answer. The largest number is", "answer": ["9"]},
        "9",
        "8",
    ),
    "infinitebench_number_string": (BOOK | {"answer": ["7312"]}, "7312", "7321"),
    "infinitebench_passkey": (BOOK | {"answer": ["7312"]}, "The key: 7312", "no"),
    "minerva_math500": (
        {"problem": "1 + 1?", "solution": "So \\boxed{2}.", "answer": "2", "subject": "Algebra", "level": 1},
        "Final Answer: The final answer is $2$. I hope it is correct.",
        "Final Answer: The final answer is $3$. I hope it is correct.",
    ),
    "nq_open": ({"question": "who", "answer": ["Ann"]}, "Ann", "Bob"),
    "triviaqa": (TRIVIA, "Anna", "Bob"),
}
SHOTS = {"babilong_qa1", "gsm8k_cot", "minerva_math500"}  # with examples before the question, written in lm-eval


@pytest.fixture(scope="module")
def paths() -> dict[str, Path]:
    """The files that define the tasks, found in one pass: a pass over lm-eval's 14,000 files per task is slow."""
    root = Path(lm_eval.tasks.__file__).parent
    wanted = {f"task: {name}": name for name in CASES}
    files = ((path, path.read_text(encoding="utf-8").splitlines()) for path in root.rglob("*.yaml"))
    return {wanted[line]: path for path, lines in files for line in lines if line in wanted}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paths: dict[str, Path]) -> None:
    monkeypatch.setattr("kvbench.taskkit.lm_eval_source._by_text", lambda root, name: paths[name])
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def require(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "ifeval":
        for package in ("langdetect", "immutabledict", "nltk"):
            pytest.importorskip(package)
        monkeypatch.setattr("nltk.download", lambda *names: False)  # ifeval's import downloads a model of sentences
    if name == "minerva_math500" and not importlib.metadata.version("antlr4-python3-runtime").startswith("4.11"):
        pytest.skip("needs antlr4-python3-runtime 4.11")


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_task_runs_on_rows_of_its_columns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require(name, monkeypatch)
    row, right, wrong = CASES[name]
    (tmp_path / "lm_eval").mkdir()
    (tmp_path / "lm_eval" / f"{name}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    task = get_task(f"lm_eval:{name}")
    (doc,) = task.docs(Data(tmp_path))
    text = next(
        value
        for key in ("prompt", "context", "input", "story", "passage", "problem", "Problem", "question")
        if isinstance(value := row.get(key), str)
    )
    assert text in doc.turns[0].user
    if name in SHOTS:
        assert doc.turns[0].user.count("\n\n") > 1
    assert task.notes() == []

    def score(answer: str) -> float | None:
        output = Output(text=answer, stop_reason="stop", prompt_tokens=1, output_tokens=1)
        return task.score(doc, output).value

    assert (score(right), score(wrong)) == (1.0, 0.0)
