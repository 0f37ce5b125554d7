"""The shared pieces: drafts, boxes, and where an output ends."""

from __future__ import annotations

import pytest

from kvbench.taskkit.synthetic.draft import Draft, filler, number, spread
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import FORM, STEP, boxed, right_steps, said
from kvbench.taskkit.synthetic.vocabulary import END_ID, NAMES, PAD_ID, ids


def draft_of_two_steps():
    draft = Draft()
    draft.ask(" Facts", ":")
    for piece in (" 1", " 2"):
        draft.write(STEP, piece)
        draft.end_step()
    draft.box(*number(7))
    return draft.finish("07")


def test_draft():
    problem = draft_of_two_steps()
    assert problem.prompt == "# Facts:"
    assert problem.steps == (" 1", " 2")
    assert problem.tail == r" \boxed{ 07}"
    assert problem.solution_kinds[:3] == (STEP, STEP, FORM)


@pytest.mark.parametrize(("text", "right"), [("", 0), (" 1", 1), (" 1 3", 1), (" 1 2 9", 2), (" 2 1", 0)])
def test_right_steps(text, right):
    assert right_steps(draft_of_two_steps(), text) == right


@pytest.mark.parametrize(
    ("text", "inside"),
    [(r" \boxed{ 08}", "08"), (r"a \boxed{1} \boxed{2}", "1"), (r"\boxed{ 08", None), ("08", None), (r"\boxed{}", "")],
)
def test_boxed(text, inside):
    assert boxed(text) == inside


def test_said_stops_at_the_end_token():
    assert said(" 1 2<|end|><|pad|><|pad|>") == " 1 2"
    assert said(" 1 2") == " 1 2"


def test_filler_is_seven_tokens_without_names():
    for seed in range(50):
        sentence = filler(Draw(seed))
        assert len(sentence) == len(ids(sentence)) == 7
        assert not {word.strip() for word in sentence} & set(NAMES)


def test_spread_keeps_the_order_of_facts():
    facts = [(f" {name}", " 1", "2", ",") for name in NAMES[:6]]
    pieces = spread(facts, 4, Draw(0))
    assert len(pieces) == 6 * 4 + 4 * 7
    assert [piece.strip() for piece in pieces if piece.strip() in NAMES] == list(NAMES[:6])


def test_ids():
    assert ids(["A", "\n", "<|end|>", "<|pad|>"]) == [65, 10, END_ID, PAD_ID]
    with pytest.raises(KeyError):
        ids([" unknown"])
