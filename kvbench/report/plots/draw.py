"""Draws figures with vl-convert (extra `report`): SVG in which text stays text, and PDF and PNG from that SVG.

Equal figures give equal bytes. The converter alone does not guarantee this: it counts ids over the life of a process,
and it orders a PDF's objects at random. Both are corrected here.
"""

from __future__ import annotations

import importlib.util
import re

from kvbench.errors import SetupError
from kvbench.report.plots import pdf as pdf_file
from kvbench.report.plots import style
from kvbench.report.plots.figure import Figure
from kvbench.report.plots.style import Theme

VERSION = "6.4"  # of Vega-Lite
_TAG = re.compile(r'<[a-zA-Z](?:[^<>"]|"[^"]*")*>')
_ID = re.compile(r'( id="| (?:clip-path|fill|stroke)="url\(#)([\w-]+)')


def check() -> None:
    """Raise SetupError when vl-convert is not installed."""
    if importlib.util.find_spec("vl_convert") is None:
        raise SetupError("plots need vl-convert: pip install 'kvbench[report]'.")


def svg(figure: Figure, theme: Theme = "light") -> str:
    """Draw the figure as SVG. Ids in the SVG begin with the figure's name and the theme, so that one page can hold
    several SVGs. Raises SetupError without vl-convert."""
    check()
    import vl_convert

    drawn: str = vl_convert.vegalite_to_svg(
        figure.spec | {"config": style.config(theme)}, vl_version=VERSION, allowed_base_urls=[]
    )
    return _own_ids(drawn, f"{figure.name}-{theme}")


def pdf(drawn: str) -> bytes:
    """Return the PDF of a figure. drawn: the figure as SVG, from `svg`."""
    import vl_convert

    return pdf_file.canonical(vl_convert.svg_to_pdf(drawn))


def png(drawn: str, scale: float = 2) -> bytes:
    """Return the PNG of a figure. drawn: the figure as SVG, from `svg`."""
    import vl_convert

    pixels: bytes = vl_convert.svg_to_png(drawn, scale=scale)
    return pixels


def _own_ids(drawn: str, prefix: str) -> str:
    """Return the SVG with its ids renamed to PREFIX-1, PREFIX-2 and so on. Text outside tags stays unchanged."""
    numbers: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return match[1] + numbers.setdefault(match[2], f"{prefix}-{len(numbers) + 1}")

    return _TAG.sub(lambda tag: _ID.sub(named, tag[0]), drawn)
