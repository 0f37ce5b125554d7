"""Let a judge rate every answer of a dialogue about pictures, from 1 to 10 overall and on MMDU's six dimensions.

The judge gets one request per turn: the released prompt (bundled/mmdu), the turn's question, reference answer and
model's answer, and all pictures of the dialogue. The reply ends with a dictionary of scores. If the reply lacks the
score of a dimension, the judge is asked once more; if the second reply lacks one too, the turn has no scores. The
released script drops a turn after the first such reply.
"""

from __future__ import annotations

import re

from kvbench.errors import UserError
from kvbench.scoring.judge.api import Judge
from kvbench.scoring.judge.asking import ask, failed, judged, judged_by
from kvbench.scoring.judge.prompts import Answers
from kvbench.scoring.literals import literals
from kvbench.sources import image_files
from kvbench.sources.data import BUNDLED
from kvbench.task import IMAGE, Doc, Score

FILE = BUNDLED / "mmdu" / "judge_prompt.txt"
SYSTEM = "You are a helpful assistant."
MARK = "<ImageHere>"  # placeholder of an image in the questions that the judge sees
OVERALL = "Overall Score"
DIMENSIONS = (
    *("Creativity", "Richness", "Visual Perception", "Logical Coherence", "Answer Accuracy"),
    *("Image Relationship Understanding", OVERALL),
)
LOWEST, HIGHEST = 1, 10
MAX_TOKENS = 4096  # most tokens of a reply, as in the released script
_DICTIONARY = re.compile(r"\{[^{}]{1,2000}\}")
_VERDICT = re.compile(rf"\{{([^{{}}]*{OVERALL}[^{{}}]*)\}}")

Scores = dict[str, float]  # dimension -> its score


@judged
def rate_dialogue(judge: Judge, doc: Doc, answers: Answers) -> Score:
    """Return the judge's scores of a dialogue: value = mean overall score / 10, aux: the mean on each of 6 dimensions.

    Aux `overall_1`, ... has each turn's overall score, `rated` the number of turns with scores, `invalid` the number of
    the judge's replies without scores. The score has no value if an image cannot be read or no turn has scores. Raises
    SetupError if the dialogue has images and the judge is local (a local judge reads no images), or if Pillow is
    missing for images.
    """
    try:
        images = [image_files.encoded(image) for turn in doc.turns for image in turn.images]
        asked = [
            ask(judge, (SYSTEM, _prompt(doc, answers, turn), images, MAX_TOKENS), _scores)
            for turn in range(len(doc.turns))
        ]
    except UserError as error:  # an image that is missing, broken or changed
        return failed(str(error))
    rated = {turn: a.value for turn, a in enumerate(asked, 1) if a.value is not None}
    if not rated:
        return failed("the judge's replies hold no scores")
    means = {name: sum(scores[name] for scores in rated.values()) / len(rated) for name in DIMENSIONS}
    return Score(
        value=means[OVERALL] / HIGHEST,
        extracted=", ".join(f"{rated[turn][OVERALL]:g}" if turn in rated else "-" for turn in range(1, len(asked) + 1)),
        aux={
            **{name.lower().replace(" ", "_"): mean for name, mean in means.items() if name != OVERALL},
            **{f"overall_{turn}": scores[OVERALL] for turn, scores in rated.items()},
            "rated": float(len(rated)),
            "invalid": float(sum(a.invalid for a in asked)),
        },
        facts=judged_by(asked[-1].judge, "dialogue"),
        note="" if len(rated) == len(asked) else "the judge's replies hold no scores on some turns",
    )


def _prompt(doc: Doc, answers: Answers, turn: int) -> str:
    question = doc.turns[turn].user.replace(IMAGE, MARK)
    return (
        f"{FILE.read_text(encoding='utf-8')}[Question]\n{question}\n\n"
        f"[The Start of Reference Answer]\n{doc.reference[turn]}\n[The End of Reference Answer]\n\n"
        f"[The Start of Assistant’s Answer]\n{_disarm(answers[turn])}\n[The End of Assistant’s Answer]"
    )


def _disarm(answer: str) -> str:
    """Put brackets in place of the braces around a dictionary of scores in an answer. If the judge quotes the answer,
    these scores then do not count as the judge's."""
    return _VERDICT.sub(r"[\1]", answer)


def _scores(reply: str) -> Scores | None:
    """Return the scores in a reply's last dictionary that has a score from 1 to 10 for every dimension; None without
    such a dictionary."""
    for given in literals(reversed(_DICTIONARY.findall(reply))):
        if isinstance(given, dict) and all(_valid(given.get(name)) for name in DIMENSIONS):
            return {name: float(given[name]) for name in DIMENSIONS}
    return None


def _valid(score: object) -> bool:
    return isinstance(score, (int, float)) and not isinstance(score, bool) and LOWEST <= score <= HIGHEST
