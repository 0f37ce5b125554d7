"""The sentences that the task "needle in a haystack" hides, with the questions about them.

A paraphrased needle states a fact about a person. The question asks for the person in other words, without any content
word of the fact, as in NoLiMa (Modarressi et al. 2025, arXiv:2502.05167). Sentences and names are kvbench's own,
because NoLiMa's licence does not allow every use. Facts about three other persons are hidden too, so that the answer is
not simply the only name in the text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A needle and the texts of its prompt.

    Attributes:
        sentence: the needle. others: further sentences hidden in the text, which do not answer the question.
        outputs: the strings that the answer must contain.
        before: text before the haystack. end: text between the haystack and the question.
        question: asks for the needle. answer_prefix: the words with which the model's answer begins.
    """

    sentence: str
    outputs: tuple[str, ...]
    before: str
    question: str
    answer_prefix: str = ""
    end: str = "\n"
    others: tuple[str, ...] = ()


def number(key: str) -> Needle:
    """Return a needle with a random number of seven digits. key: the seed; equal keys give equal needles."""
    digits = str(random.Random(key).randint(10**6, 10**7 - 1))
    return Needle(
        sentence=f"The special magic number is: {digits}.",
        outputs=(digits,),
        before="A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the number afterwards.\n",
        question="What is the special magic number mentioned in the provided text?",
        answer_prefix=" The special magic number mentioned in the provided text is",
    )


# From LLMTest_NeedleInAHaystack (Greg Kamradt, MIT licence).
SANDWICH = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."


def sandwich(key: str) -> Needle:
    return Needle(
        sentence=SANDWICH,
        outputs=("eat a sandwich", "Dolores Park", "sunny day"),
        before="",
        question="What is the best thing to do in San Francisco? Don't give information outside the document or repeat "
        "your findings.",
        end="\n\n",
    )


NAMES = (
    *("Ambrose", "Beatrix", "Casimir", "Dorothea", "Emeric", "Fenella", "Gideon", "Henrietta", "Ignatius", "Jocasta"),
    *("Leopold", "Marigold", "Nikolai", "Ottoline", "Percival", "Quentin", "Rosalind", "Sigmund", "Thaddeus", "Ursula"),
)
FACTS = {  # a fact in the words of the needle -> the same fact in the words of the question
    "eats nothing that comes from an animal": "is a vegan",
    "mends broken pipes and dripping taps for a living": "works as a plumber",
    "gets up before dawn to put loaves into the oven": "is a baker",
    "grew up within sight of the Eiffel Tower": "was born in Paris",
    "has never learned to stay afloat in deep water": "cannot swim",
    "looks at distant stars through a telescope every night": "has astronomy as a hobby",
    "was handed a gold medal after the marathon": "won a long race",
    "crosses the street with a white stick and a guide dog": "is blind",
    "became a parent for the third time in March": "has three children",
    "spends the winter evenings with needles and wool": "likes to knit",
    "has been behind bars since the robbery": "is in prison",
    "wears a crown and lives in a palace": "belongs to a royal family",
}
OTHERS = 3  # persons with a hidden fact about whom the prompt does not ask


def paraphrase(key: str) -> Needle:
    draw = random.Random(key)
    names = [NAMES[place] for place in _different(draw, len(NAMES))]
    facts = [tuple(FACTS.items())[place] for place in _different(draw, len(FACTS))]
    sentences = [f"{name} {fact}." for name, (fact, _) in zip(names, facts, strict=True)]
    return Needle(
        sentence=sentences[0],
        others=tuple(sentences[1:]),
        outputs=(names[0],),
        before="Facts about some people are hidden within the following text. Make sure to memorize them. I will quiz "
        "you about one of these people afterwards.\n",
        question=f"Which person mentioned in the provided text {facts[0][1]}?",
        answer_prefix=" The name of this person is",
    )


def _different(draw: random.Random, size: int) -> list[int]:
    """Draw `OTHERS` + 1 different numbers from 0 to `size` - 1, the same in every version of Python."""
    left = list(range(size))
    return [left.pop(int(draw.random() * len(left))) for _ in range(OTHERS + 1)]
