from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.ruler import MadeUp, reader

from kvbench.sources.data import Data
from kvbench.task import Output
from kvbench.taskkit.names import expand, get_task
from kvbench.taskkit.ruler.material import Sources
from kvbench.taskkit.ruler.needles import FACTS, NAMES, SANDWICH


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


def test_names():
    assert expand("niah@*") == [f"niah@{2**i}" for i in range(10, 16)]
    assert get_task("niah/essay-sandwich@2k").name == "niah/essay-sandwich@2048"
    spec = get_task("niah").gen("qwen3")
    assert (spec.n, spec.max_new_tokens, spec.temperature, spec.thinking) == (1, 64, 0.0, False)


def test_the_grid_with_a_template():
    task = get_task("niah@1024")
    task.reader = reader(chat=True)
    docs = task.docs(Data(env={}))
    assert len(docs) == len({doc.doc_id for doc in docs}) == 55
    assert len({doc.meta["category"] for doc in docs}) == 11
    assert len({doc.cluster for doc in docs}) == 5
    for doc in docs:
        assert 980 < len(task.reader.ids(task.reader.text(doc, thinking=False))) + 64 <= 1024
        right = task.score(doc, answer(f"It is {doc.reference[0]}."))
        assert (right.value, right.aux) == (1.0, {"needle_at": float(doc.meta["needle_at"])})
        assert task.score(doc, answer("It is 1.")).value == 0.0
    places = [doc.meta["needle_at"] for doc in docs[:11]]
    assert places == sorted(places)
    assert task.docs(Data(env={}), limit=7) == docs[:7]
    more = task.docs(Data(env={}), limit=60)
    assert (more[:55], len({doc.turns for doc in more})) == (docs, 60)
    assert len({doc.cluster for doc in more}) == 6  # the fewest that a test between methods needs


def test_the_sandwich():
    task = get_task("niah/sandwich")
    task.reader = reader()
    doc = task.docs(Data(env={}), limit=1)[0]
    assert SANDWICH in doc.turns[0].context
    whole = task.score(doc, answer(SANDWICH))
    assert (whole.value, whole.aux["rouge1_recall"]) == (1.0, 1.0)
    part = task.score(doc, answer("Eat a sandwich!"))
    assert part.value == pytest.approx(1 / 3)
    assert 0 < part.aux["rouge1_recall"] < 0.5
    for text in ("", "...", "\n"):
        assert task.score(doc, answer(text)).aux["rouge1_recall"] == 0.0


LINKS = {"a", "and", "as", "at", "from", "for", "has", "in", "is", "of", "the", "to", "was", "with"}


def test_a_question_on_a_fact_has_other_words_than_the_sentence():
    for said, asked in FACTS.items():
        assert not (set(said.lower().split()) - LINKS) & (set(asked.lower().split()) - LINKS)
    assert len(set(FACTS.values())) == len(FACTS)
    assert len(set(NAMES)) == len(NAMES)


def test_paraphrased_needles():
    task = get_task("niah/paraphrase")
    task.reader = reader(chat=True)
    docs = task.docs(Data(env={}))
    assert len({doc.turns[0].question for doc in docs}) == len(FACTS)
    for doc in docs:
        (name,) = doc.reference
        context = doc.turns[0].context
        named = [other for other in NAMES if f"{other} " in context]
        assert (len(named), context.count(name)) == (4, 1)
        fact = next(said for said, asked in FACTS.items() if asked in doc.turns[0].question)
        assert f"{name} {fact}." in context
        assert name not in doc.turns[0].question
        assert task.score(doc, answer(f" {name}.")).value == 1.0
        assert task.score(doc, answer(" nobody")).value == 0.0


def test_essays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = MadeUp()
    monkeypatch.setattr(Sources, "sentences", lambda self, text: made.sentences(text))
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "PaulGrahamEssays.json").write_text(json.dumps({"text": made.essays()}))
    source = Data(tmp_path, env={})
    task = get_task("niah/essay@2k")
    task.reader = reader()
    docs = task.docs(source, limit=33)
    assert len({doc.cluster for doc in docs}) == 3
    assert source.used["niah/essay@2048"].source == "--data"
    assert task.manifest
    assert get_task("niah").manifest is None
