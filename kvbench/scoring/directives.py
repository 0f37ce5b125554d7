"""Instructions about the form of an answer, each with a function that checks whether an answer follows it, as in IFEval
(Zhou et al. 2023).

The wordings are kvbench's own, and the checks only resemble IFEval's, so scores are not comparable with IFEval's.
An answer without text follows no instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Directive:
    """An instruction about the form of an answer.

    text: the instruction's wording; {} stands for its argument, such as a number of words. check: takes an answer and
    the argument, and returns whether the answer follows the instruction.
    """

    text: str
    check: Callable[[str, str], bool]

    def follows(self, answer: str, argument: str) -> bool:
        return bool(answer.strip()) and self.check(answer, argument)


def _count(word: str, answer: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE))


def _bullets(answer: str, argument: str) -> bool:
    return len(re.findall(r"(?m)^\s*\*[^*\S\n]", answer)) == int(argument)


DIRECTIVES = {
    "no_comma": Directive("Do not use any comma.", lambda answer, _: "," not in answer),
    "lower_case": Directive("Write everything in lower case.", lambda answer, _: answer == answer.lower()),
    "ending": Directive(
        'End with the exact words "{}" and nothing after them.', lambda answer, words: answer.strip().endswith(words)
    ),
    "often": Directive('Use the word "{}" at least three times.', lambda answer, word: _count(word, answer) >= 3),
    "never": Directive('Never use the word "{}".', lambda answer, word: not _count(word, answer)),
    "bullets": Directive('Give exactly {} bullet points, each on a line that begins with "* ".', _bullets),
    "title": Directive(
        "Put a title in double angular brackets, such as <<my title>>.",
        lambda answer, _: re.search(r"<<[^\n<>]+>>", answer) is not None,
    ),
    "placeholders": Directive(
        "Leave at least {} placeholders in square brackets, such as [name].",
        lambda answer, number: len(re.findall(r"\[[^\[\]\n]+\]", answer)) >= int(number),
    ),
    "short": Directive("Use fewer than {} words.", lambda answer, number: len(answer.split()) < int(number)),
}
