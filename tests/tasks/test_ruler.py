from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support.ruler import MadeUp, reader

from kvbench.errors import SetupError, UserError
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Task
from kvbench.taskkit.names import expand, get_task
from kvbench.taskkit.ruler.recipes import OFFLINE, SUBTASKS


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def loaded(name: str, **about: object) -> Task:
    task = get_task(name)
    task.reader = reader(**about)
    return task


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


def test_names():
    assert expand("ruler@8k") == [f"ruler/{name}@8192" for name in SUBTASKS]
    assert expand("ruler_offline") == [f"ruler_offline/{name}@4096" for name in OFFLINE]
    assert len(expand("ruler/niah_*@*")) == 8 * 6
    assert [get_task("ruler").size(), get_task("niah").size()] == [500, 55]
    assert [get_task(f"ruler/{name}").manifest is None for name in SUBTASKS] == [name in OFFLINE for name in SUBTASKS]
    assert [get_task(f"ruler/cwe@{k}k").manifest is None for k in (4, 32, 64, 128)] == [True, True, False, False]
    for name, members in (("ruler", SUBTASKS), ("ruler_offline", OFFLINE)):
        ((_, weights),) = get_task(name).averages.items()
        assert weights == dict.fromkeys(members, 1.0)


@pytest.mark.parametrize(
    ("name", "tokens"), [("niah_multivalue", 128), ("vt", 30), ("cwe", 120), ("fwe", 50), ("qa_1", 32), ("qa_2", 32)]
)
def test_sampling(name: str, tokens: int):
    spec = get_task(f"ruler/{name}").gen("qwen3")
    assert (spec.n, spec.max_new_tokens, spec.temperature, spec.chat, spec.thinking) == (1, tokens, 0.0, True, False)


@pytest.mark.parametrize("name", OFFLINE)
def test_prompts_with_template_and_answer_fill_the_length(name: str):
    task = loaded(f"ruler_offline/{name}@4096", chat=True)
    docs = task.docs(Data(env={}), limit=3)
    assert [doc.doc_id for doc in docs] == [f"{name}-{i}" for i in range(3)]
    for doc in docs:
        text = task.reader.text(doc, thinking=False)
        assert text.endswith("</think>\n\n" + doc.turns[0].answer_prefix)
        assert 3500 < len(task.reader.ids(text)) + task.gen("").max_new_tokens <= 4096
        assert doc.meta["category"] == name
        assert ("needle_at" in doc.meta) is name.startswith("niah")
        right = task.score(doc, answer(f"{', '.join(doc.reference)}."))
        assert (right.value, right.strict) == (1.0, 1.0)
        assert right.aux == ({"needle_at": float(doc.meta["needle_at"])} if name.startswith("niah") else {})
        assert task.score(doc, answer("I do not know.")).value == 0.0


def test_a_second_loading_counts_nothing(monkeypatch: pytest.MonkeyPatch):
    first = loaded("ruler/vt@4096").docs(Data(env={}), limit=3)
    task = loaded("ruler/vt@4096")
    monkeypatch.setattr(type(task.reader), "count", lambda self, text: 1 / 0 if len(text) > 4 else 1)
    assert task.docs(Data(env={}), limit=2) == first[:2]


def test_partial_and_any():
    task = get_task("ruler/niah_multivalue")
    doc = Doc(doc_id="x", turns=(), reference=("1111111", "2222222", "3333333", "4444444"))
    assert task.score(doc, answer("1111111 and 3333333")).value == 0.5
    doc = Doc(doc_id="x", turns=(), reference=("Paris", "the city of Paris"))
    assert get_task("ruler/qa_1").score(doc, answer("paris")).value == 1.0
    assert get_task("ruler/qa_2").score(doc, answer("London")).value == 0.0


def test_a_task_travels_to_scoring_processes():
    task = loaded("ruler/qa_1@8k")
    doc = Doc(doc_id="x", turns=(), reference=("Paris",))
    assert pickle.loads(pickle.dumps(task)).score(doc, answer("Paris")).value == 1.0


def test_documents_of_a_folder(tmp_path: Path):
    import json

    made = MadeUp()
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "squad.json").write_text(json.dumps(made.squad()))
    source = Data(tmp_path, env={}, allow_mismatch=True)
    docs = loaded("ruler/qa_1@2048").docs(source, limit=4)
    assert [doc.cluster for doc in docs][:2] == [docs[0].cluster] * 2
    assert docs[0].turns[0].question.startswith("Answer the question based on the given documents.")
    assert source.used["ruler/qa_1@2048"].mismatch.startswith("sha256")
    with pytest.raises(SetupError, match="is not the expected file of task 'ruler/qa_1@2048'"):
        loaded("ruler/qa_1@2048").docs(Data(tmp_path, env={}), limit=4)


def test_what_cannot_be_made():
    with pytest.raises(UserError, match="makes prompts of 131072 tokens; the model's context is 40960"):
        loaded("ruler/vt@131072", context=40960).docs(Data(env={}), limit=1)
    with pytest.raises(UserError, match="makes its prompts with a model's tokenizer; give the run a model"):
        get_task("ruler/vt").docs(Data(env={}), limit=1)
    with pytest.raises(UserError, match="'ruler/cwe@512' does not fit into 512 tokens"):
        loaded("ruler/cwe@512").docs(Data(env={}), limit=1)
