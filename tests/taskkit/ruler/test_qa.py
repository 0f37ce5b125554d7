from __future__ import annotations

import pytest
from support.ruler import MadeUp, room

from kvbench.errors import SetupError, UserError
from kvbench.taskkit.ruler.make import make_rows
from kvbench.taskkit.ruler.qa import QuestionAnswering, hotpotqa, squad


def documents(context: str) -> list[str]:
    _, *parts = context.split("\n\nDocument ")
    assert [part.partition(":\n")[0] for part in parts] == [str(i + 1) for i in range(len(parts))]
    return [part.partition(":\n")[2].removesuffix("\n\n") for part in parts]


def test_squad_rows():
    material = MadeUp()
    rows = make_rows("qa_1", room("qa_1", 1024), material, 20)
    answerable = [
        (paragraph["context"], asked, [p["context"] for p in article["paragraphs"]])
        for article in material.squad()["data"]
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
        if not asked["is_impossible"]
    ]
    for row, (own, asked, article) in zip(rows, answerable):
        shown = documents(row.prompt.context)
        assert own in shown
        assert set(article) <= set(shown)  # the article's other paragraphs come before those of other articles
        assert len(shown) == len(set(shown))
        assert row.prompt.question.endswith(f"\n\nQuestion: {asked['question']}")
        assert row.prompt.outputs == tuple(answer["text"] for answer in asked["answers"])
    clusters = [row.prompt.cluster for row in rows]
    assert clusters[0] == clusters[1] != clusters[2]  # two answerable questions on each paragraph


def test_hotpotqa_rows():
    material = MadeUp()
    for row, asked in zip(make_rows("qa_2", room("qa_2", 2048), material, 5), material.hotpotqa()):
        shown = documents(row.prompt.context)
        assert all(f"{title}\n{''.join(sentences)}" in shown for title, sentences in asked["context"])
        assert row.prompt.outputs == (asked["answer"],)
        assert row.prompt.cluster == ""


def test_few_documents_are_repeated():
    questions = QuestionAnswering(room=room("qa_1", 4096), material=MadeUp(), documents="squad")
    shown = documents(questions.draw(0, 310).context)
    assert len(shown) == 310
    assert sorted(shown.count(text) for text in set(shown)) == [2] * 140 + [3] * 10


def test_more_rows_than_questions():
    with pytest.raises(UserError, match="task 'qa_2' has 40 questions, fewer than 41"):
        make_rows("qa_2", room("qa_2", 2048), MadeUp(), 41)


@pytest.mark.parametrize(("parse", "data"), [(squad, {}), (squad, {"data": [{}]}), (hotpotqa, [{"context": 3}])])
def test_data_of_another_form(parse, data):
    material = MadeUp()
    material.squad = material.hotpotqa = lambda: data
    subtask, name = ("qa_1", "squad") if parse is squad else ("qa_2", "hotpotqa")
    with pytest.raises(SetupError, match=f"data of task '{subtask}' do not have the form of {name}"):
        make_rows(subtask, room(subtask, 2048), material, 1)
