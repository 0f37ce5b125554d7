"""The five mathematics tasks on excerpts of their data, and on the full files where the project has them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.folders import DATA, SHARED

from kvbench.errors import SetupError
from kvbench.sources.data import Data
from kvbench.task import Output
from kvbench.taskkit.names import get_task
from kvbench.taskkit.prompts import INSTRUCTION, STYLES

EXCERPTS = DATA / "tasks"
SHARED_DATA = SHARED / "data"
MATHS = ("aime24", "aime25", "amc23", "math500", "gsm8k")
full = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the full data sets in ../shared/data")


def excerpt(name: str):
    return get_task(name).docs(Data(EXCERPTS, env={}, allow_mismatch=True))


def answer(text: str, thinking: bool | None = True) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)


@pytest.mark.parametrize("name", MATHS)
def test_documents(name: str):
    task, docs = get_task(name), excerpt(name)
    assert len(docs) == 3
    assert len({doc.doc_id for doc in docs}) == 3
    for doc in docs:
        assert doc.turns[0].user.endswith(f"\n\n{INSTRUCTION}")
        assert doc.turns[0].system is None
        assert doc.cluster == doc.doc_id
        assert isinstance(doc.reference, str)
        right = task.score(doc, answer(f"hm</think>It is \\boxed{{{doc.reference}}}."))
        wrong = task.score(doc, answer("hm</think>It is \\boxed{-17.25}."))
        none = task.score(doc, answer("hm"))
        assert (right.value, right.strict, wrong.value, wrong.strict) == (1.0, 1.0, 0.0, 0.0)
        assert (none.strict, none.aux["no_answer"]) == (0.0, 1.0)
        assert ("int_match" in right.aux) is (name in ("aime24", "aime25", "amc23"))


@pytest.mark.parametrize("name", MATHS)
def test_an_excerpt_is_not_taken_for_the_task(name: str):
    with pytest.raises(SetupError, match=f"3 rows instead of {get_task(name).size()}"):
        get_task(name).docs(Data(EXCERPTS, env={}))


@pytest.mark.parametrize("name", MATHS)
def test_styles_are_registered_and_change_the_prompt(name: str):
    task = get_task(name)
    assert task.prompt_styles[0] == "default"
    assert set(task.prompt_styles) < set(STYLES)
    source = Data(EXCERPTS, env={}, allow_mismatch=True)
    turns = {task.docs(source, style=style, limit=1)[0].turns[0] for style in task.prompt_styles}
    assert len(turns) == len(task.prompt_styles)


@pytest.mark.parametrize(
    ("name", "n", "tokens"),
    [("aime24", 32, 32768), ("aime25", 32, 32768), ("amc23", 32, 16384), ("math500", 4, 16384), ("gsm8k", 1, 8192)],
)
def test_sampling(name: str, n: int, tokens: int):
    qwen, other = get_task(name).gen("qwen3"), get_task(name).gen("qwen2")
    assert (qwen.n, qwen.max_new_tokens, qwen.temperature, qwen.top_p, qwen.top_k) == (n, tokens, 0.6, 0.95, 20)
    assert (other.top_k, other.chat, other.thinking) == (0, True, True)
    assert get_task(name).gen("qwen3_moe").top_k == 20


def test_references():
    assert [doc.reference for doc in excerpt("gsm8k")] == ["18", "3", "70000"]
    assert excerpt("amc23")[0].reference == "27.0"
    doc = excerpt("math500")[0]
    assert doc.meta == {"category": "2/Precalculus", "level": "2", "subject": "Precalculus"}
    assert doc.doc_id == "test/precalculus/807.json"


def test_the_stop_strings_of_a_style_join_those_of_the_task(monkeypatch: pytest.MonkeyPatch):
    task = get_task("gsm8k")
    own = replace(task.gen(""), stop=("END",))
    monkeypatch.setattr(type(task), "gen", lambda self, model_type: own)
    doc = task.docs(Data(EXCERPTS, env={}, allow_mismatch=True), style="lm_eval", limit=1)[0]
    assert doc.gen["stop"] == ("END", *STYLES["lm_eval"].stop)


def test_the_style_lm_eval_ends_answers_where_lm_eval_does():
    task = get_task("gsm8k")
    doc = task.docs(Data(EXCERPTS, env={}, allow_mismatch=True), style="lm_eval", limit=1)[0]
    assert doc.gen["stop"] == ("Question:", "</s>", "<|im_end|>", "<|eot_id|>")
    stored = answer(" #### 18\n\nQuestion: And twice?\nAnswer: #### 36", None)  # of a run without these stop strings
    score = task.score(doc, stored)
    assert (score.value, score.aux["lm_eval_strict"], score.aux["lm_eval_flexible"]) == (1.0, 1.0, 1.0)
    assert task.score(excerpt("gsm8k")[0], stored).value == 0.0


def test_the_style_simple_evals_scores_the_answer_behind_its_marker():
    task = get_task("math500")
    doc = replace(task.docs(Data(EXCERPTS, env={}, allow_mismatch=True), style="simple_evals")[0], reference="(1,2)")
    score = task.score(doc, answer("so</think>3, or not.\nAnswer: (1, 2)"))
    assert (score.value, score.strict) == (1.0, 1.0)


def test_gsm8k_side_columns():
    task, doc = get_task("gsm8k"), excerpt("gsm8k")[0]
    aux = task.score(doc, answer("so\n#### 18", None)).aux
    assert (aux["lm_eval_strict"], aux["lm_eval_flexible"]) == (1.0, 1.0)


def hub_rows(name: str) -> list[dict]:
    """The excerpt as the hub's copy spells it."""
    file = next((EXCERPTS / name).iterdir())
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if name == "aime24":
        return [{"id": int(r["id"][-2:]), "problem": r["problem"], "answer": r["answer"], "year": "2024"} for r in rows]
    if name == "aime25":
        return [{"id": str(i), "problem": r["problem"], "answer": r["answer"]} for i, r in enumerate(rows)]
    if name == "amc23":
        return [{"id": i, "question": r["problem"], "answer": float(r["answer"])} for i, r in enumerate(rows)]
    if name == "math500":
        return [{"unique_id": r["id"], **{k: v for k, v in r.items() if k != "id"}} for r in rows]
    return [{"question": r["question"], "answer": r["answer"]} for r in rows]


@pytest.mark.parametrize("name", MATHS)
def test_hub_columns_give_the_same_documents(name: str, monkeypatch: pytest.MonkeyPatch):
    import datasets

    table = datasets.Dataset.from_list(hub_rows(name))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: table)
    monkeypatch.setattr("kvbench.sources.data.hub_data._in_datasets_cache", lambda name: True)
    found = get_task(name).docs(Data(env={}, allow_mismatch=True))
    assert found == excerpt(name)


@pytest.mark.parametrize("name", MATHS)
def test_hub_copies_are_pinned(name: str):
    manifest = get_task(name).manifest
    assert manifest is not None
    assert len(manifest.revision or "") == 40
    assert len(manifest.ids_sha256 or "") == 64


def test_aime25_hub_order_is_paper_one_then_two():
    manifest = get_task("aime25").manifest
    assert manifest is not None
    assert manifest.hub_id is not None
    names = [manifest.hub_id(i, {}) for i in range(30)]
    assert (names[0], names[14], names[15], names[29]) == ("aime25-I-1", "aime25-I-15", "aime25-II-1", "aime25-II-15")


def test_a_missing_column_is_named(tmp_path: Path):
    file = tmp_path / "aime24" / "aime24.jsonl"
    file.parent.mkdir()
    file.write_text('{"id": "1", "question": "?"}\n', encoding="utf-8")
    with pytest.raises(SetupError, match="data of task 'aime24' have no column 'problem'"):
        get_task("aime24").docs(Data(tmp_path, env={}, allow_mismatch=True))


@full
@pytest.mark.parametrize(
    ("name", "count"), [("aime24", 30), ("aime25", 30), ("amc23", 40), ("math500", 500), ("gsm8k", 1319)]
)
def test_full_files(name: str, count: int):
    source = Data(SHARED_DATA, env={})
    docs = get_task(name).docs(source)
    assert len(docs) == get_task(name).size() == count
    assert source.used[name].mismatch == ""
    assert [doc.doc_id for doc in get_task(name).docs(source, limit=5)] == [doc.doc_id for doc in docs[:5]]
    if name == "math500":
        levels = Counter(doc.meta["level"] for doc in docs)
        assert [levels[str(level)] for level in range(1, 6)] == [43, 90, 105, 128, 134]
        assert len({doc.meta["subject"] for doc in docs}) == 7
    if name == "aime24":
        assert sum(doc.reference.startswith("0") for doc in docs) == 7
