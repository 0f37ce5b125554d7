"""MRCR's score: the similarity of an answer to the wanted message, from 0 to 1.

The score is 0 unless the answer begins with the random characters that the question asks for. The rule is the grader on
the card of the data set openai/mrcr. It removes the random characters from both texts, then takes
`difflib.SequenceMatcher.ratio` with the answer as the first text.
"""

from __future__ import annotations

from difflib import SequenceMatcher


def score_copy(text: str, wanted: str, prefix: str) -> dict[str, float]:
    """Return three scores of an answer, each from 0 to 1.

    text: the answer. prefix: the random characters with which it must begin. wanted: `prefix` followed by the message
    to copy. The scores: `score`, the official one; `similarity`, which does not demand the prefix; `prefix`, 1 if the
    answer begins with the prefix, else 0.
    """
    begins = text.startswith(prefix)
    similarity = SequenceMatcher(None, text.removeprefix(prefix), wanted.removeprefix(prefix)).ratio()
    return {"score": similarity if begins else 0.0, "similarity": similarity, "prefix": float(begins)}
