"""RULER's scores: the share of references that occur in an output as substrings, ignoring case.

Equal to `scripts/eval/synthetic/constants.py` and `postprocess_pred` of NVIDIA/RULER (commit c3f5e3b). Substring match
is lenient ("no" occurs in "noteworthy"); `whole_words` requires whole words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvbench.task import Score

_CONTROL = re.compile(r"[\x00-\x1f]")


def postprocess(text: str) -> str:
    """Return an output without blanks at its ends, and with every control character up to U+001F replaced by a line
    end."""
    return _CONTROL.sub("\n", text.strip()).strip()


def hits_in(prediction: str, references: Sequence[str]) -> list[bool]:
    """Return for each reference whether it occurs in an output, ignoring case; nothing is postprocessed."""
    return [reference.lower() in prediction.lower() for reference in references]


def whole_words(prediction: str, references: Sequence[str]) -> list[bool]:
    """Return for each reference whether it occurs as whole words in an output, ignoring case. Neither side of an
    occurrence may touch a letter, a digit or an underscore."""
    patterns = (rf"(?<!\w){re.escape(reference.lower())}(?!\w)" for reference in references)
    return [re.search(pattern, prediction.lower()) is not None for pattern in patterns]


def score_output(
    text: str, references: Sequence[str], *, any_reference: bool = False, aux: Mapping[str, float] | None = None
) -> Score:
    """Score an output by the share of references in it; with `any_reference`, 1 if any reference is in it, else 0. The
    score's `strict` is computed in the same way, but a reference counts only if it occurs as whole words."""
    prediction = postprocess(text)
    hits, strict = hits_in(prediction, references), whole_words(prediction, references)
    return Score(
        value=float(any(hits)) if any_reference else share(hits),
        strict=float(any(strict)) if any_reference else share(strict),
        extracted="; ".join(reference for reference, hit in zip(references, hits) if hit) or None,
        aux=aux or {},
    )


def share(hits: Sequence[bool]) -> float:
    """Return the share of references that were found, from 0 to 1. hits: for each reference whether it was found."""
    return sum(hits) / len(hits)


def string_match_all(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the mean of `share` over all outputs, in per cent with two decimals. predictions: the outputs. references:
    for each output the references to find in it."""
    return _percent([share(hits_in(text, expected)) for text, expected in zip(predictions, references, strict=True)])


def string_match_part(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the share of outputs in which at least one reference occurs, in per cent with two decimals."""
    pairs = zip(predictions, references, strict=True)
    return _percent([float(any(hits_in(text, expected))) for text, expected in pairs])


def _percent(rows: Sequence[float]) -> float:
    return round(sum(rows) / len(rows) * 100, 2)
