"""MRCR's score: the similarity of an answer to the wanted message, from 0 to 1. It is 0 unless the answer begins with
the random characters that the question asks for.

The rule is the grader on the card of the data set openai/mrcr: `difflib.SequenceMatcher.ratio`, answer first, after the
random characters were removed from both texts.
"""

from __future__ import annotations

from difflib import SequenceMatcher


def score_copy(text: str, wanted: str, prefix: str) -> dict[str, float]:
    """Score an answer.

    text: the answer. wanted: `prefix` and the message to copy. Returns `score`, the official one; `similarity`, the
    same without the condition on the prefix; `prefix`, 1 if the answer begins with it.
    """
    begins = text.startswith(prefix)
    similarity = SequenceMatcher(None, text.removeprefix(prefix), wanted.removeprefix(prefix)).ratio()
    return {"score": similarity if begins else 0.0, "similarity": similarity, "prefix": float(begins)}
