"""A figure: a Vega-Lite specification with its data inline, and its title and caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.console import redact, terminal

Spec = dict[str, Any]
Point = dict[str, Any]  # one value of a figure's data
LONGEST = 400  # characters of a text in a figure; the time to draw a text grows with the square of its length


@dataclass(frozen=True)
class Figure:
    """A figure that can be drawn in any theme. In its texts, secrets (API keys) are replaced by ``***``, and control
    and text-direction characters are escaped.

    `name`: the stem of its files. `caption`: names the axes, the number of questions, the error bars, and the cells
    that are not shown. `spec`: a Vega-Lite specification without `config`; the figure is drawn with `config` from
    `style.config(theme)`. A text from a row may stand in its data, domains and titles, but in no Vega expression: such
    expressions are executed.
    """

    name: str
    title: str
    caption: str
    spec: Spec

    def __post_init__(self) -> None:
        known: dict[str, str] = {}
        for field in ("title", "spec"):
            object.__setattr__(self, field, _cleaned(getattr(self, field), known))
        object.__setattr__(self, "caption", _plain(self.caption))


def distinct(points: Sequence[Point], field: str) -> list[Any]:
    """Return the distinct values of a field, in order of first appearance."""
    return list(dict.fromkeys(point[field] for point in points))


def _cleaned(value: Any, known: dict[str, str]) -> Any:
    """Return the value with all its texts cleaned. A control character in a text would end the process that draws the
    figure. known: the clean form of each text that was cleaned before."""
    if isinstance(value, str):
        if value not in known:
            known[value] = _clipped(_plain(value), len(known))
        return known[value]
    if isinstance(value, dict):
        return {key: _cleaned(member, known) for key, member in value.items()}
    return [_cleaned(member, known) for member in value] if isinstance(value, (list, tuple)) else value


def _plain(text: str) -> str:
    return terminal.clean(redact.hide_keys(text))


def _clipped(text: str, number: int) -> str:
    """Return the text, cut if it is longer than LONGEST characters. A cut text ends with `number`, so that cut texts
    stay distinct."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({number})"
