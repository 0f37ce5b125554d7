"""The three tasks for the built-in model: documents, sampling, scores and floors."""

from __future__ import annotations

import pytest

from kvbench.sources.data import Data
from kvbench.task import Output
from kvbench.taskkit.names import get_task, task_names
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS

NAMES = [name for name in task_names() if name.split("/")[0] in ("walk", "chain", "lookup")]


def output(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1)


@pytest.mark.parametrize("name", NAMES)
def test_the_true_solution_is_right_and_an_empty_one_is_not(name: str):
    task = get_task(name)
    doc = task.docs(Data(env={}), limit=1)[0]
    problem = VARIANTS[task.variant].generate(HELD_OUT)
    assert doc.turns[0].user == problem.prompt
    context, question = doc.turns[0].context, doc.turns[0].question
    assert context.startswith("# Facts:")
    assert context.endswith((",\n", ".\n"))
    assert question.startswith(("Ask:", "Plan:"))
    assert doc.meta["category"] == task.variant
    right, wrong = task.score(doc, output(problem.solution)), task.score(doc, output(""))
    assert (right.value, right.partial, right.extracted) == (1.0, 1.0, problem.answer)
    assert (wrong.value, wrong.partial, wrong.extracted) == (0.0, 0.0, None)
    assert wrong.aux == {"no_answer": 1.0}
    half = task.score(doc, output("".join(problem.steps[: (len(problem.steps) + 1) // 2])))
    assert half.partial == pytest.approx((len(problem.steps) + 1) // 2 / len(problem.steps))


@pytest.mark.parametrize("name", NAMES)
def test_sampling_is_greedy_raw_and_long_enough(name: str):
    task = get_task(name)
    spec = task.gen("qwen3")
    assert (spec.n, spec.temperature, spec.chat, spec.thinking) == (1, 0.0, False, None)
    assert spec.max_new_tokens > len(VARIANTS[task.variant].generate(HELD_OUT).solution_pieces)
    assert task.cheap_score
    assert task.headline == "score_partial"


def test_defaults():
    assert [get_task(name).variant for name in ("walk", "chain", "lookup")] == ["orbit-300", "chain-4", "lookup-8"]


def test_number_of_problems():
    task, data = get_task("lookup"), Data(env={})
    docs = task.docs(data)
    assert len(docs) == 128
    assert len({doc.doc_id for doc in docs}) == len({doc.turns[0].user for doc in docs}) == 128
    assert task.docs(data, limit=3) == docs[:3]
    assert len(task.docs(data, limit=200)) == 200
    assert task.size() == 128
    assert data.used == {}


def test_floor_is_a_share_that_grows_with_the_budget():
    floors = [get_task("walk").floor(budget, 32) for budget in (32, 64, 128, 1000)]
    assert all(floor is not None and 0 <= floor <= 1 for floor in floors)
    assert floors == sorted(floors, key=lambda floor: floor or 0.0)
    assert floors[-1] == 1.0
    assert get_task("aime24").floor(64, 32) is None
