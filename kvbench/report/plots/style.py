"""The look of every figure: sizes, palettes for light and dark, and the colours, shapes and dashes of methods.

The colours follow Okabe and Ito's palette, which people with any colour vision can tell apart; on a dark ground they
are lighter. The full cache has a colour of its own. If a report has more than seven methods besides the full cache,
colours repeat, and dashes tell up to four methods of one colour apart. If a report has up to eight methods, the full
cache included, they also differ in the shape of their points: its figures with points can be read in black and white.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Theme = Literal["light", "dark"]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
FULL = "full"  # method with the first colour, in every figure
WIDTH = 460  # of a figure without its legend, in CSS pixels; fits a printed column and a phone's screen
NAMES = 220  # largest width of the names beside bars and squares
LETTER = 6.0  # width of a letter of a label
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # vl-convert uses the first; texts in the others are as wide
MARK = "#8c8c8c"  # grey that can be seen on both grounds
COLOURS: dict[Theme, tuple[str, ...]] = {
    "light": ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3a9bd6", "#7a7a29"),
    "dark": ("#f2f2f2", "#4ba3e3", "#ff8a4c", "#2ec49a", "#e39ac4", "#e6b23a", "#8fd0f7", "#c4c46a"),
}
GROUND: dict[Theme, dict[str, str]] = {
    "light": {"paper": "#ffffff", "ink": "#1a1a1a", "soft": "#595959", "line": "#dedede"},
    "dark": {"paper": "#16181d", "ink": "#ededed", "soft": "#b3b3b3", "line": "#3a3d44"},
}
SHADES: dict[Theme, tuple[str, ...]] = {  # of heat maps, from 0 to 1
    "light": ("#f7fbff", "#c6dbef", "#6baed6", "#2171b5", "#08306b"),
    "dark": ("#1d2b3f", "#24507f", "#3f83bd", "#86bce3", "#eaf4fc"),
}
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])


def config(theme: Theme) -> dict[str, Any]:
    """Return the Vega-Lite configuration of a theme."""
    ground = GROUND[theme]
    ink = ground["ink"]
    first, *others = COLOURS[theme]
    titles = dict(titleColor=ink, titleFontWeight="normal", titleFontSize=11)
    return {
        "background": ground["paper"],
        "font": FONT,
        "padding": 8,
        "view": {"stroke": None},
        "axis": dict(domainColor=MARK, tickColor=MARK, gridColor=ground["line"], labelColor=ground["soft"])
        | dict(titles, labelFontSize=11, labelLimit=0, titleLimit=0),
        "legend": dict(titles, labelColor=ink, labelFontSize=11, labelLimit=WIDTH, orient="bottom")
        | dict(symbolSize=60, symbolOpacity=1, symbolStrokeWidth=2, rowPadding=3, columnPadding=14),
        "header": dict(titles, labelColor=ink, labelFontSize=12, labelFontWeight="normal")
        | dict(labelLimit=WIDTH, labelAnchor="start"),
        "title": dict(color=ink, fontSize=13, fontWeight="normal", anchor="start", limit=WIDTH),
        "text": dict(color=ink, fontSize=10),
        "range": {"category": [first, *(others * len(DASHES))], "heatmap": list(SHADES[theme])},
        "style": {
            "on-light": {"color": ink},
            "on-dark": {"color": ground["paper"]},
        },
    }


def methods(names: Sequence[str], shown: Sequence[str]) -> dict[str, Any]:
    """Return the encodings that tell the values of the field `method` apart: `color`, `shape`, and `strokeDash` for
    lines.

    names: all methods of a report, so that a method looks the same in each of its figures. shown: the methods of this
    figure.
    """
    domain = _ordered(names)
    legend = {"title": None, "values": [name for name in domain if name in shown], "columns": across(shown)}
    scales = {"color": "category", "shape": [SHAPES[i % len(SHAPES)] for i in range(len(domain))]}
    looks: dict[str, Any] = {
        channel: {"field": "method", "type": "nominal", "scale": {"domain": domain, "range": to}, "legend": legend}
        for channel, to in scales.items()
    }
    dashes = {"domain": list(range(len(DASHES))), "range": DASHES}
    return looks | {"strokeDash": {"field": "dash", "type": "ordinal", "scale": dashes, "legend": None}}


def dash(name: str, names: Sequence[str]) -> int:
    """Return the pattern of a method's lines as an index in DASHES. The field `dash` of a point holds this index."""
    return max(0, _ordered(names).index(name) - 1) // (len(COLOURS["light"]) - 1) % len(DASHES)


def _ordered(names: Sequence[str]) -> list[str]:
    """Return the names with the full cache first. The full cache is added if it was not run."""
    return [FULL, *(name for name in names if name != FULL)]


def across(names: Sequence[str]) -> int:
    """Return how many names fit into one line of a legend."""
    return max(1, int(WIDTH / (34 + LETTER * max(map(len, names), default=0))))
