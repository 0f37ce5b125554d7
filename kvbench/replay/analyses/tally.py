"""Adds up numbers per trace, and returns ratios of the sums with standard errors by `kvbench.replay.figures.jackknife`.

Questions of one cluster count as one question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kvbench.replay.analyses.api import Study

Key = tuple[Any, ...]


class Tally:
    """Named sums, for example "queries". A named sum has a separate value for each key (for example layer and head) and
    each trace."""

    def __init__(self, study: Study) -> None:
        self._clusters = [t.cluster for t in study.traces]
        self._sums: dict[Key, dict[str, NDArray[np.float64]]] = {}

    def add(self, key: Key, traces: Sequence[int], **sums: torch.Tensor | float) -> None:
        """Add numbers to the sums of one key, for some traces. traces: indices into `Study.traces`. sums: what to add,
        by the sum's name: a tensor with one number per trace, or one number for every trace."""
        import numpy as np

        known = self._sums.setdefault(key, {})
        for name, value in sums.items():
            of = known.setdefault(name, np.zeros(len(self._clusters)))
            of[traces] += value if isinstance(value, (int, float)) else value.double().cpu().numpy()

    def figures(self, **ratios: tuple[str, str]) -> Iterator[tuple[Key, dict[str, float | None]]]:
        """Yield each key, in the order of first use, with its ratios (``NAME``) and their standard errors
        (``NAME_se``).

        ratios: by the ratio's name, the names of two sums, numerator and denominator. Undefined values are None: a
        ratio whose denominator is 0, and a standard error over one question.
        """
        from kvbench.replay.figures import jackknife, numbered

        for key, sums in self._sums.items():
            found: dict[str, float | None] = {}
            for name, (above, below) in ratios.items():
                there = sums[below].nonzero()[0]
                if not len(there):
                    found |= {name: None, f"{name}_se": None}
                    continue
                chosen = {part: sums[part][there] for part in (above, below)}
                clusters = numbered(self._clusters[i] for i in there)
                value, error = jackknife(chosen, clusters, lambda s, a=above, b=below: s[a] / s[b])  # type: ignore[misc]
                found |= {name: value, f"{name}_se": error}
            yield key, found

    def total(self, key: Key, name: str) -> float:
        return float(self._sums[key][name].sum())
