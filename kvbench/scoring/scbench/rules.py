"""SCBench's rules for answers that are texts, numbers or options; each returns a score from 0 to 1.

Two official rules treat each character of a reference text as a reference of its own: `any_character` (many-shot
questions) and `f1_of_characters` (Chinese questions). The column `score` follows these two rules, for comparison with
published numbers; `whole_word` and `f1_zh` compare with the whole reference and give the column `score_strict`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvbench.scoring.scbench.packages import package
from kvbench.scoring.words import WITHOUT_MARKS_ZH

LETTERS = "ABCD"
_NUMBER = re.compile(r"\d+\.\d+|\d+")
_ANSWER_IS = ("answer is:", "answer:", "answer is", "option is")
_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))


def contains(prediction: str, answer: str) -> float:
    """1 if the reference is in the output, as it is written."""
    return float(answer in prediction)


def share(prediction: str, answers: Sequence[str]) -> float:
    """Share of the references that are in the output without regard to case, rounded to two decimals."""
    return round(sum(answer.lower() in prediction.lower() for answer in answers) / len(answers), 2)


def mentions(prediction: str, answer: str) -> float:
    """1 if the reference is in the output without regard to case."""
    return float(answer.upper() in prediction.strip().upper())


def any_character(prediction: str, answer: str) -> float:
    """1 if any character of the reference is in the output without regard to case."""
    return float(any(character in prediction.strip().upper() for character in answer.upper()))


def whole_word(prediction: str, answer: str) -> float:
    """1 if the reference is in the output without regard to case and is not part of a longer word."""
    return float(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prediction, re.IGNORECASE) is not None)


def first_integer(prediction: str, answer: Any) -> float:
    """1 if the first run of digits in the output is the reference."""
    found = re.search("[0-9]+", prediction)
    return float(found is not None and found[0] == str(answer))


def first_number(prediction: str, answer: float) -> float:
    """1 if the first number in the output, without its sign, is the reference. If the reference is an integer, the
    number's decimals are cut before the comparison."""
    found = _NUMBER.search(prediction)
    if found is None:
        return 0.0
    number = float(found[0])
    if isinstance(answer, int) and math.isfinite(number):  # int() fails on infinity, which 400 digits give
        number = int(number)
    return float(number == answer)


def option(prediction: str, answer: tuple[str, str]) -> float:
    """1 if the output chooses the right option, whose text and letter are `answer`.

    The choice is found by the first rule that applies:

    - a letter from A to D at the beginning of the output;
    - the whole output, if it is the right text or letter;
    - the text behind the first phrase of `_ANSWER_IS` that occurs;
    - the first word that is a substring of "ABCD", such as "B".
    """
    text = prediction.strip()
    if text[:1] and text[0] in LETTERS:
        return float(text[0] in answer)
    if text in answer:
        return float(bool(text))
    text = re.sub(" +", " ", text.translate(_MARKS))
    for prefix in _ANSWER_IS:
        _, found, after = text.partition(prefix)
        if found:
            return float(bool(after) and after[1:].startswith(answer))
    return next((float(word in answer) for word in text.split() if word in LETTERS), 0.0)


def rouge(prediction: str, answer: str) -> float:
    """ROUGE-Lsum F of the package rouge-score, without stemming."""
    scorer = package("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"], use_stemmer=False)
    return float(scorer.score(answer, prediction)["rougeLsum"].fmeasure)


def f1_of_characters(prediction: str, answer: str) -> float:
    """The best F1 (`f1_zh`) of the output against any single character of the reference."""
    return max((f1_zh(prediction, character) for character in answer), default=0.0)


def f1_zh(prediction: str, answer: str) -> float:
    """F1 of the characters of output and reference, without case, blanks and punctuation."""
    found, wanted = (Counter("".join(t.lower().translate(WITHOUT_MARKS_ZH).split())) for t in (prediction, answer))
    same = (found & wanted).total()
    return 2 * same / (found.total() + wanted.total()) if same else 0.0
