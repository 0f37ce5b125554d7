"""The look of every figure: sizes, palettes for light and dark, and what tells methods apart.

The colours are Okabe and Ito's, which people with any colour vision can tell apart, lighter on a dark ground. Beyond
seven methods dashes differ, and shapes differ throughout, so that a figure can be read in black and white too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Theme = Literal["light", "dark"]

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
FULL = "full"  # takes the first colour, in every figure
WIDTH = 460  # of a figure without its legend, in CSS pixels: a column of print, and a phone without zooming
LETTER = 6.0  # width of a letter of a label
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # the first is drawn with, the others have its widths
COLOURS: dict[Theme, tuple[str, ...]] = {
    "light": ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07d00", "#3a9bd6", "#7a7a29"),
    "dark": ("#f2f2f2", "#4ba3e3", "#ff8a4c", "#2ec49a", "#e39ac4", "#e6b23a", "#8fd0f7", "#c4c46a"),
}
GROUND: dict[Theme, dict[str, str]] = {
    "light": {"paper": "#ffffff", "ink": "#1a1a1a", "soft": "#595959", "line": "#dedede", "mark": "#8c8c8c"},
    "dark": {"paper": "#16181d", "ink": "#ededed", "soft": "#b3b3b3", "line": "#3a3d44", "mark": "#8c8c8c"},
}
SHADES: dict[Theme, tuple[str, ...]] = {  # of heat maps, from 0 to 1
    "light": ("#f7fbff", "#c6dbef", "#6baed6", "#2171b5", "#08306b"),
    "dark": ("#1d2b3f", "#24507f", "#3f83bd", "#86bce3", "#eaf4fc"),
}
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "triangle-right", "triangle-left")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])


def config(theme: Theme) -> dict[str, Any]:
    """The Vega-Lite configuration of a theme."""
    ground = GROUND[theme]
    ink, mark = ground["ink"], ground["mark"]
    first, *others = COLOURS[theme]
    titles = dict(titleColor=ink, titleFontWeight="normal", titleFontSize=11)
    return {
        "background": ground["paper"],
        "font": FONT,
        "padding": 8,
        "view": {"stroke": None},
        "axis": dict(domainColor=mark, tickColor=mark, gridColor=ground["line"], labelColor=ground["soft"])
        | dict(titles, labelFontSize=11, labelLimit=0, titleLimit=0),
        "legend": dict(titles, labelColor=ink, labelFontSize=11, labelLimit=WIDTH, orient="bottom")
        | dict(symbolSize=60, symbolOpacity=1, symbolStrokeWidth=2, rowPadding=3, columnPadding=14),
        "header": dict(titles, labelColor=ink, labelFontSize=12, labelFontWeight="normal")
        | dict(labelLimit=WIDTH, labelAnchor="start"),
        "title": dict(color=ink, fontSize=13, fontWeight="normal", anchor="start", limit=WIDTH),
        "text": dict(color=ink, fontSize=10),
        "range": {"category": [first, *(others * len(DASHES))], "ramp": SHADES[theme], "heatmap": SHADES[theme]},
        "style": {"frontier": {"stroke": mark}, "quiet": {"fill": ground["soft"]}},
    }


def methods(names: Sequence[str], shown: Sequence[str], *, line: bool = False) -> dict[str, Any]:
    """Encodings that tell methods apart by colour and shape, and lines by dashes.

    names: of all methods of a report, so that a method looks the same in each of its figures; shown: in this figure.
    """
    domain = [FULL, *(name for name in names if name != FULL)]
    legend = {"title": None, "values": list(shown), "columns": across(shown)}
    ranges: dict[str, Any] = {
        "color": "category",
        "shape": [SHAPES[i % len(SHAPES)] for i in range(len(domain))],
    }
    if line:
        ranges["strokeDash"] = [DASHES[max(0, i - 1) // 7 % len(DASHES)] for i in range(len(domain))]
    return {
        channel: {
            "field": "method",
            "type": "nominal",
            "scale": {"domain": domain, "range": values},
            "legend": legend,
        }
        for channel, values in ranges.items()
    }


def across(names: Sequence[str]) -> int:
    """How many names fit into one line of a legend."""
    return max(1, int(WIDTH / (34 + LETTER * max(map(len, names), default=0))))
