"""MathVista's scoring on texts made by hand: direct answers, extraction by rule, the official form, and odd cases."""

from __future__ import annotations

import pytest

from kvbench.scoring.mathvista import Wanted, by_rule, direct, distance, is_right, normalise

SIDES = Wanted("145°", "text", None, ("135°", "140°", "145°", "150°"))
YES = Wanted("Yes", "text", None, ("Yes", "No"))
COUNT = Wanted("14", "integer", None, ())
ONE, TWO = Wanted("1.2", "float", 1, ()), Wanted("1.45", "float", 2, ())
LIST = Wanted("[2014, 2016]", "list", None, ())
PARTS = Wanted("8/11", "text", None, ("3/11", "8/11", "6/11"))
ROOT = Wanted(r"5 \sqrt { 3 }", "text", None, ("5", r"5 \sqrt { 3 }", "10"))
RATIO = Wanted(r"\frac { 4 } { 5 }", "text", None, ("4", r"\frac { 3 } { 5 }", r"\frac { 4 } { 5 }"))
LENGTH = Wanted("10√{3}cm", "text", None, ("5cm", "10cm", "10√{3}cm", "20cm"))
POWER = Wanted("x^2", "text", None, ("x", "x^2", "3", "5"))
FIVE = Wanted("5", "text", None, ("5", "25"))
TOWN = Wanted("New York", "text", None, ("York", "New York"))


@pytest.mark.parametrize(
    ("extraction", "wanted", "form"),
    [
        ("C", SIDES, "145°"),
        ("(c) 145", SIDES, "145°"),
        ("(C)", SIDES, "145°"),
        ("(A) or (C)", SIDES, "135°"),  # the first letter
        ("145", SIDES, "145°"),  # the nearest option
        ("E", SIDES, "135°"),  # no option: the nearest, the first of equals
        ("(E)", SIDES, "135°"),
        ("", SIDES, "135°"),
        ("c", SIDES, "135°"),  # a small letter without brackets is a text
        ("yes", YES, "Yes"),
        (" Yes ", YES, "Yes"),
        ("14", COUNT, "14"),
        ("14.0", COUNT, "14"),
        ("14.9", COUNT, "14"),  # cut, not rounded
        (" 14 ", COUNT, "14"),
        ("1e3", COUNT, "1000"),
        ("14%", COUNT, None),
        ("14 cm", COUNT, None),
        ("1,400", COUNT, None),
        ("inf", COUNT, None),
        ("nan", COUNT, None),
        ("", COUNT, None),
        ("1.2", ONE, "1.2"),
        ("1.24", ONE, "1.2"),
        ("1.25", ONE, "1.2"),  # the nearest even digit of the binary number
        ("1", ONE, "1.0"),
        ("1.450", TWO, "1.45"),
        ("$1.45", TWO, None),
        ("x", TWO, None),
        ("[2014, 2016]", LIST, "[2014, 2016]"),
        ("[2014,2016]", LIST, "[2014,2016]"),  # officially compared as text
    ],
)
def test_the_official_form(extraction: str, wanted: Wanted, form: str | None):
    assert normalise(extraction, wanted) == form


def test_a_float_without_precision_has_no_form():
    assert normalise("1.2", Wanted("1.2", "float", None, ())) is None


@pytest.mark.parametrize(
    ("text", "wanted", "quoted", "plain"),
    [
        ("145°", SIDES, "145°", "145°"),
        ("C", SIDES, None, None),
        ("14", COUNT, "14", "14"),
        ("14.5", COUNT, None, None),
        ("1.20", ONE, "1.2", "1.2"),
        ('The answer is "14".', COUNT, "14", None),
        ('So. The answer is "B". Or "C".', SIDES, 'B". Or "C', None),  # greedy, as published
        ("", SIDES, None, None),
    ],
)
def test_answers_that_need_no_extraction(text: str, wanted: Wanted, quoted: str | None, plain: str | None):
    assert direct(text, wanted, quoted=True) == quoted
    assert direct(text, wanted) == plain


@pytest.mark.parametrize(
    ("text", "wanted", "answer"),
    [
        ("Angles add up to 180°.\nSo the answer is (C) 145°.", SIDES, "C"),
        ("The correct option is **C**.", SIDES, "C"),
        ("**Answer:** C", SIDES, "C"),
        ("(A) is too small, (B) too.\n\nC. 145°", SIDES, "C"),
        ("\\boxed{C}", SIDES, "C"),
        ("\\boxed{\\text{(C)}}", SIDES, "C"),
        ("It is 145°", SIDES, "145°"),
        ("A triangle has 180 degrees, so I cannot say", SIDES, None),
        ("The answer is E.", SIDES, None),
        ("The answer is (F), that is (C)", SIDES, "C"),
        ("答案是 C", SIDES, "C"),
        ("So the correct option letter is **C**.", SIDES, "C"),
        ("Option A is too small. Therefore, option C is correct.", SIDES, "C"),
        ("Hence, option **C** is the correct answer. Not option A.", SIDES, "C"),
        ("Option C is not correct, I cannot say", SIDES, None),
        ("Thus, the answer would be C", SIDES, "C"),
        ("I choose option C.", SIDES, "C"),
        ("The answer is C. I choose to stop here.", SIDES, "C"),
        ("yes, they are", YES, "Yes"),
        ("There is nothing to see, not even a yesterday", YES, None),
        ("", SIDES, None),
        ("There are 3 rows of 4, and 2 more: 14.", COUNT, "14"),
        ("The answer is 14 apples.\n\nI counted them twice.", COUNT, "14"),
        ("The answer is clear.\nI count 14", COUNT, "14"),
        ("about 1,400 people", COUNT, "1400"),
        ("−14", COUNT, "-14"),
        ("it is 35%", COUNT, "35"),
        ("Answer: $1.45", TWO, "1.45"),
        ("\\boxed{1.45\\,\\text{m}}", TWO, "1.45"),
        ("x = .5", ONE, ".5"),
        ("\\boxed{14\\text{ cm}^2}", COUNT, "14"),
        ("\\boxed{14\\text{ cm}^{2}}", COUNT, "14"),
        ("The area is 14 cm^2.", COUNT, "14"),
        ("There are 14 molecules of CO2", COUNT, "14"),
        ("The answer is 14. It follows from 7 x 2.", COUNT, "14"),
        ("Answer: 14 (out of 20)", COUNT, "14"),
        ("The answer is 7 x 2 = 14, by 2 rules.", COUNT, "14"),
        ("The answer is **\\(-14\\)**.", COUNT, "-14"),
        ("It costs US$14", COUNT, "14"),
        ("\\boxed{1{,}400}", COUNT, "1400"),
        ("\\boxed{1,\\!400}", COUNT, "1400"),
        ("a range of 2-14", COUNT, "14"),
        ("\\boxed{\\frac{1}{2}}", ONE, "0.5"),
        ("\\boxed{-\\dfrac { 1 } { 2 }}", ONE, "-0.5"),
        ("So it is 1/2.", ONE, "0.5"),
        ("\\boxed{\\frac{1}{0}}", ONE, "1"),
        ("\\boxed{0.5\\text{ m/s}^2}", ONE, "0.5"),
        ("The answer is option C.", SIDES, "C"),
        ("The answer is the correct choice: C", SIDES, "C"),
        ("\\boxed{\\text{C}}", SIDES, "C"),
        ("The answer is $\\mathbf{C}$.", SIDES, "C"),
        ("The correct option is C because 180° are too many", SIDES, "C"),
        ("**Answer: B** 8 of 11 parts", PARTS, "B"),
        ("Answer: 8/11, see part (a)", PARTS, "8/11"),
        ("3/11 and 5/11 make it (B)", PARTS, "B"),
        ("The answer is $10", Wanted("$10", "text", None, ("$1", "$10")), "$10"),
        ("[2014, 2016], not [{{}: 1}]", LIST, "[2014, 2016]"),
        ("many", COUNT, None),
        ("between [2010, 2011] and [2014,2016].", LIST, "[2014, 2016]"),
        ("The answer is 2014 and 2016", LIST, None),
        ("[what]", LIST, None),
        (r"\boxed{5\sqrt{3}}", ROOT, r"5 \sqrt { 3 }"),
        (r"The answer is $5\sqrt{3}$.", ROOT, r"5 \sqrt { 3 }"),
        (r"Therefore, $x = 5 \sqrt 3$.", ROOT, r"5 \sqrt { 3 }"),
        (r"So $x = 5\sqrt{2}$, I think", ROOT, None),
        ("It is 5√2", ROOT, None),
        ("It is 5.2", ROOT, None),
        ("It is 5 cm", ROOT, "5"),
        (r"\boxed{\frac{4}{5}}", RATIO, r"\frac { 4 } { 5 }"),
        ("The answer is 4/5.", RATIO, r"\frac { 4 } { 5 }"),
        (r"It is \frac{4}{7}", RATIO, None),
        ("The answer is 10√3 cm.", LENGTH, "10√{3}cm"),
        (r"\boxed{10\sqrt{3}}", LENGTH, "10√{3}cm"),  # the nearest
        (r"\boxed{10 \text{ cm}}", LENGTH, "10cm"),
        (r"\boxed{\text{none}}", LENGTH, None),
        (r"\boxed{145^\circ}", SIDES, "145°"),
        (r"\boxed{145^{\circ}}", SIDES, "145°"),
        ("So it is 145 degrees", SIDES, "145°"),
        ("It is x^2", POWER, "x^2"),
        ("It is x^4", POWER, None),
        ("It is 3/5", POWER, None),
        ("It is New York", TOWN, "New York"),
        ("It is newyork", TOWN, None),
        ("Hence option C.", SIDES, "C"),
        ("Thus, C is correct.", SIDES, "C"),
        ("Therefore, **C**.", SIDES, "C"),
        ("Therefore, C.\n\nI am sure.", SIDES, "C"),
        ("So C = 5 is small", SIDES, None),
        ("Therefore, I.", SIDES, None),
        ("Option C is correct.\n\nSo, I", SIDES, "C"),
        ("So C is right angled, and D is too", SIDES, None),
        ("So C is the right answer, I think", SIDES, "C"),
        ("So C is right.", SIDES, "C"),
        ("Thus, C must be the right choice here", SIDES, "C"),
        ("So C is the correct option, I think", SIDES, "C"),
        (r"The answer is 5 \\", ROOT, "5"),
        ("The answer is 5 \\", ROOT, "5"),
        ("The answer is 5/8", ROOT, None),
        ("The answer is yes/true.", YES, "Yes"),
        ("The answer is New York\n/ York", TOWN, "New York"),
        ("The answer is 5 times.", ROOT, "5"),
        *(
            (rf"So it is $\boxed{{{formula}}}$.", FIVE, None)
            for formula in (r"5\pi", r"\sqrt{5}", r"5 \times 10^3", "5×10", "5x", "5.7", "√5", r"5\sqrt{x}")
        ),
        *(
            (rf"\boxed{{{length}}}", ROOT, "5")
            for length in ("5cm", r"5\text{cm}", r"5\,\mathrm{cm}", r"5\text{m}", r"5\text{cm}^2", "5.0", "4.96")
        ),
        (r"\boxed{7}", YES, None),
    ],
)
def test_extraction_by_rule(text: str, wanted: Wanted, answer: str | None):
    assert by_rule(text, wanted) == answer


def test_what_is_right():
    assert is_right("C", SIDES)
    assert is_right("1.2449", ONE)
    assert not is_right(None, SIDES)
    assert not is_right("B", SIDES)
    assert not is_right("14 cm", COUNT)


def test_hostile_texts_take_no_time():
    long = "answer is " * 20_000 + "[" * 20_000 + "1" * 20_000
    assert by_rule(long, LIST) is None
    assert by_rule(long, COUNT) is not None
    wordings = ("answer is (the ", "option C ", "I choose  ", "so C x ", "so C,  ", "so C is the a ")
    for piece in ("\\text{", "\\frac{1}{2", "^ ", "1,", "- ", *wordings):
        assert by_rule(piece * 20_000, SIDES) is None
        by_rule(piece * 20_000, COUNT)
    assert not is_right("9" * 5000, COUNT)
    assert not is_right("[" + "9" * 5000 + "]", LIST)


def test_edit_distance():
    cases = {("", ""): 0, ("a", ""): 1, ("", "ab"): 2, ("kitten", "sitting"): 3, ("ab", "ba"): 2, ("145", "145°"): 1}
    assert {pair: distance(*pair) for pair in cases} == cases
