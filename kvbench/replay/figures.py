"""Turns the figures of all traces of a cell into one row of results: means over tokens, ratios, and standard errors.

Tokens of one trace are not independent, and neither are traces of one question. Standard errors therefore come from a
jackknife over the C questions, which leaves out each question c once. Questions of one cluster count as one question.
f_c is the figure without question c:

    se = sqrt((C - 1) / C * sum over c of (f_c - mean of all f_c)^2)

If all questions have the same number of tokens, this is the clustered standard error of a mean. The formula also serves
for other means, for ratios, and for `gap_closed`: (loss under `random` - loss) / (loss under `random` - loss under the
oracle).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from kvbench.replay.comparison import TraceFigures

LOW_SHARE = 0.8  # ForesightKV's reward uses this share of the tokens: those with the lowest entropy with the full cache
Cell = Sequence[TraceFigures]  # the traces of one method at one budget on one task


def figures(traces: Cell, yardsticks: tuple[Cell, Cell] | None) -> dict[str, Any]:
    """Return the figures of one method at one budget on one task, with their standard errors as ``<name>_se``.

    `traces`, `tokens` and `entries_peak` have no standard error. An undefined figure is None, such as a standard error
    over one question, or `gap_closed` without yardsticks. yardsticks: the figures of the same traces under `random` and
    under the oracle, at the same budget; None if these were not replayed.
    """
    low = _low(traces)
    sums = {
        "tokens": [len(t.loss) for t in traces],
        "loss": [t.loss.sum() for t in traces],
        "full": [t.loss_full.sum() for t in traces],
        "kl": [t.divergence.sum() for t in traces],
        "agrees": [t.agrees.sum() for t in traces],
        "rows": [t.rows for t in traces],
        "cosine": [t.cosine.mean() for t in traces],
        "lost": [t.lost for t in traces],
        "overlap": [t.overlap for t in traces],
        "choices": [t.choices for t in traces],
        "entries": [t.entries for t in traces],
    }
    for name, kind in (("low", True), ("high", False)):
        chosen = [of == kind for of in low]
        sums[f"tokens_{name}"] = [c.sum() for c in chosen]
        sums[f"loss_{name}"] = [t.loss[c].sum() for t, c in zip(traces, chosen)]
        sums[f"full_{name}"] = [t.loss_full[c].sum() for t, c in zip(traces, chosen)]
    if yardsticks is not None:
        for name, others in zip(("random", "golden"), yardsticks):
            sums[name] = [t.loss.sum() for t in others]
    found: dict[str, Any] = {"traces": len(traces), "tokens": int(sum(sums["tokens"]))}
    for name, of in _FIGURES.items():
        wanted = name != "gap_closed" or yardsticks is not None
        value, error = jackknife(sums, numbered(t.trace.cluster for t in traces), of) if wanted else (None, None)
        found |= {name: value, f"{name}_se": error}
    return found | {"entries_peak": max((t.most for t in traces), default=0.0)}


_FIGURES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "loss_ratio": lambda s: s["loss"] / s["full"],
    "loss": lambda s: s["loss"] / s["tokens"],
    "loss_full": lambda s: s["full"] / s["tokens"],
    "loss_increase": lambda s: (s["loss"] - s["full"]) / s["tokens"],
    "loss_ratio_low": lambda s: s["loss_low"] / s["full_low"],
    "loss_increase_low": lambda s: (s["loss_low"] - s["full_low"]) / s["tokens_low"],
    "loss_ratio_high": lambda s: s["loss_high"] / s["full_high"],
    "loss_increase_high": lambda s: (s["loss_high"] - s["full_high"]) / s["tokens_high"],
    "kl": lambda s: s["kl"] / s["tokens"],
    "top1": lambda s: s["agrees"] / s["tokens"],
    "cosine": lambda s: s["cosine"] / s["rows"],
    "mass_lost": lambda s: s["lost"] / s["rows"],
    "overlap": lambda s: s["overlap"] / s["choices"],
    "gap_closed": lambda s: (s["random"] - s["loss"]) / (s["random"] - s["golden"]),
    "entries_mean": lambda s: s["entries"] / s["rows"],
}


def jackknife(
    sums: dict[str, Any], clusters: Sequence[int], figure: Callable[[dict[str, Any]], Any]
) -> tuple[float | None, float | None]:
    """Return a figure and its standard error over clusters of traces. None stands for an undefined number.

    sums: by name, a number for each trace. figure: a function that gets, by the same names, the sums of these numbers
    over traces, and returns the figure. clusters: the number of each trace's cluster, from 0.
    """
    parts = {name: np.bincount(clusters, weights=np.asarray(v, dtype=float)) for name, v in sums.items()}
    count = max(clusters) + 1
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(figure({name: part.sum() for name, part in parts.items()}))
        without = np.asarray(figure({name: part.sum() - part for name, part in parts.items()}))
    spread = float(np.sum((without - without.mean()) ** 2)) if count > 1 else math.nan
    error = math.sqrt((count - 1) / count * spread) if math.isfinite(spread) else math.nan
    return _known(value), _known(error) if math.isfinite(value) else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def numbered(names: Iterable[Any]) -> list[int]:
    """Return a number for each name. Different names are numbered from 0, in the order of their first occurrence."""
    index: dict[Any, int] = {}
    return [index.setdefault(name, len(index)) for name in names]


def _low(traces: Cell) -> list[Any]:
    """Return, for each trace, a mask [n] of the tokens whose predictions with the full cache have the lowest entropy.

    Together, the masks mark the share LOW_SHARE of all tokens. Of tokens with equal entropy, earlier tokens are marked
    first.
    """
    entropy = np.concatenate([t.entropy for t in traces])
    low = np.zeros(len(entropy), dtype=bool)
    low[entropy.argsort(kind="stable")[: int(LOW_SHARE * len(entropy))]] = True
    return np.split(low, np.cumsum([len(t.entropy) for t in traces])[:-1])
