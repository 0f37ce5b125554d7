"""Side columns of the mathematics score, normalised answers, and time-outs."""

from __future__ import annotations

import logging

import pytest

from kvbench.scoring import math as module
from kvbench.scoring.math import int_match, normalise_answer, score_math


@pytest.mark.parametrize(
    ("answer", "box", "right"),
    [
        ("025", "25", True),
        ("27.0", "27", True),
        ("204", " 204 ", True),
        ("-1.0", "-1", True),
        ("204", "204.0", False),  # not a plain integer
        ("204", "205", False),
        ("204", None, False),
        ("27.5", "27", False),
        (r"\frac{1}{2}", "1", False),
        ("1", "9" * 5000, False),
    ],
)
def test_int_match(answer: str, box: str | None, right: bool):
    assert int_match(answer, box) is right


def test_aux_columns():
    score = score_math("The answer is 204", "204", thinking=False, integer=True)
    assert (score.value, score.strict) == (1.0, 0.0)
    assert score.aux == {"no_answer": 1.0, "timeout": 0.0, "int_match": 0.0}
    assert score.extracted == "204"
    score = score_math(r"\boxed{204}", "204", thinking=False)
    assert score.aux == {"no_answer": 0.0, "timeout": 0.0}
    assert score_math(r"\boxed{}", "204", thinking=False).aux["no_answer"] == 1.0


@pytest.mark.parametrize(
    ("line", "reference", "extracted"),
    [
        ("Answer: 3\\sqrt{2}", "3\\sqrt{2}", "3\\sqrt{2}"),
        ("Answer: (1, 2)", "(1,2)", "(1, 2)"),
        ("**Answer:** x^2+1", "1+x^2", "x^2+1"),
        ("answer: Evelyn.", "\\text{Evelyn}", "Evelyn"),
        ("Answer: $\\boxed{7}$", "7", "7"),
        ("Answer:\n\\[\n.5\n\\]", "0.5", ".5"),
        ("Answer: 5\nAnswer: $70,000", "70000", "70,000"),
        ("**Final Answer:**\n\nAnswer: 42", "42", "42"),
        ("Answer: Answer: 5", "5", "5"),
        ("Answer: $Answer: 6", "6", "6"),
        ("Answer: Answer:", "5", "5"),  # no answer behind the last one: the last box
        ("is it.", "5", "5"),  # no marker
        ("Answer:\n$$", "5", "5"),  # no answer behind it: the last box
    ],
)
def test_an_answer_behind_a_marker(line: str, reference: str, extracted: str):
    score = score_math("<think>Answer: 1</think>\\boxed{5} " + line, reference, thinking=True, marker="Answer:")
    assert (score.value, score.strict, score.extracted) == (1.0, 1.0, extracted)


def test_empty_output_is_wrong_and_no_error():
    score = score_math("", "204", thinking=True)
    assert (score.value, score.strict, score.extracted) == (0.0, 0.0, None)


def test_long_answers_are_cut_for_the_table():
    assert len(score_math("\\boxed{" + "1" * 600 + "}", "1", thinking=False).extracted or "") == module.LONGEST


def test_a_timeout_of_math_verify_is_wrong_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    import math_verify.parser

    def forever(*args, **kwargs):
        while True:
            pass

    monkeypatch.setattr(module, "SECONDS", 1)
    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", forever)
    with caplog.at_level(logging.WARNING):
        score = score_math(r"\boxed{1}", "1", thinking=False)
    assert (score.value, score.strict, score.aux["timeout"]) == (0.0, 0.0, 1.0)
    assert "ran out of time" in score.note
    assert not caplog.records  # its warning would quote the whole output


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("025", "25"),
        ("25.0", " 25"),
        ("1,234", "1234"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left(1,2\right)", "(1, 2)"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\textbf{(B)}", "(B)"),
        (r"3\text{ cm}", r"3 \mathrm{cm}"),
    ],
)
def test_normalised_answers_agree(one: str, other: str):
    assert normalise_answer(one) == normalise_answer(other)


def test_normalised_answers_differ():
    assert len({normalise_answer(a) for a in ("1", "2", "0.5", r"\frac{1}{2}", "(1,2)", "-1", "x")}) == 7
