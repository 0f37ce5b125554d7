"""The share of a text's words that another text repeats in their order: the recall of ROUGE-L (Lin 2004).

Words are runs of the letters a to z and digits in lower case, as in the package rouge-score without its stemmer.
"""

from __future__ import annotations

import re


def rouge_l_recall(reference: str, text: str) -> float:
    """Return the number of words in the longest common subsequence of both texts, divided by the number of words of
    `reference`. Returns 0 if `reference` has no word."""
    wanted, words = _words(reference), _words(text)
    row = [0] * (len(words) + 1)  # row[n]: length of the subsequence common to all `word` so far and to words[:n]
    for word in wanted:
        diagonal = 0
        for n, other in enumerate(words, 1):
            diagonal, row[n] = row[n], diagonal + 1 if word == other else max(row[n], row[n - 1])
    return row[-1] / len(wanted) if wanted else 0.0


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
