"""Plots of rows as SVG: lines, stacked bars and heat maps in panels, drawn by matplotlib (extra `report`).

The same rows give the same bytes on one machine, independent of a matplotlibrc. Text stays text, so that it can be
searched and read aloud. Names are data: they are not parsed as mathematics, and control characters appear escaped.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvbench.console import terminal
from kvbench.errors import SetupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = dict[str, dict[str, list[tuple[float, float | None]]]]  # panel -> line -> points
Bars = dict[str, dict[str, dict[str, float]]]  # panel -> bar -> part -> length
Heat = Mapping[str, Mapping[str, Mapping[str, float | None]]]  # panel -> row -> column -> 0 to 1

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")  # Okabe and Ito
DASHES = ("-", "--", ":", "-.")
MARKERS = "os^Dv<>P"
ACROSS = 2  # panels of lines side by side
WIDTH, HEIGHT = 8.8, 3.2  # inches, as all that follow: a plot of lines, one of its panels
LINE, CELL, NAMES = 0.24, 0.42, 2.2  # a bar, a row of a map or of the legend; a column of a map; names at the left
PANEL, HEAD = 1.1, 1.0  # title and axis of a panel of bars or of a map; title and legend of a plot
LETTER, HANDLE = 0.075, 0.7  # of the legend
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "font.size": 9,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvbench",  # else ids of elements are random
    "text.parse_math": False,  # names may contain $
}


def check() -> None:
    """Raise SetupError when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError("plots need matplotlib: pip install 'kvbench[report]'.")


def lines(panels: Lines, *, title: str, x: str, y: str, log: bool = False) -> str:
    """Return a plot of lines; y begins at 0 and all panels share its range. log: the x axis is logarithmic, to base 2.

    Points whose y is None are left out.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    known = {
        name: {line: sorted((a, b) for a, b in points if b is not None) for line, points in panel.items()}
        for name, panel in panels.items()
    }
    names = list(dict.fromkeys(line for panel in known.values() for line in panel))
    styles = {name: _style(i) for i, name in enumerate(names)}
    most = max((b for panel in known.values() for points in panel.values() for _, b in points), default=0.0) or 1.0
    across = min(ACROSS, max(1, len(known)))
    down = max(1, -(-len(known) // across))
    legend = LINE * (len(names) // _across(WIDTH, names))
    with _figure(title, WIDTH, down * HEIGHT + HEAD + legend) as (figure, out):
        places = figure.subplots(down, across, squeeze=False).flat
        for axes, name in itertools.zip_longest(places, known):
            if name is None:
                axes.remove()
                continue
            for line, points in known[name].items():
                axes.plot([a for a, _ in points], [b for _, b in points], **styles[line])
            axes.set(title=_plain(name), xlabel=_plain(x), ylabel=_plain(y), ylim=(0, 1.04 * most))
            there = sorted({a for points in known[name].values() for a, _ in points})
            if log:
                axes.set_xscale("log", base=2)
                axes.set_xticks(there, labels=[f"{value:g}" for value in there])
            else:
                whole = all(value == int(value) for value in there)
                axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=whole))
        _legend(figure, [Line2D([], [], **styles[name]) for name in names], names)
    return out.getvalue()


def bars(panels: Bars, *, title: str, x: str) -> str:
    """Return a plot of horizontal stacked bars; all panels share the range of x."""
    from matplotlib.patches import Patch

    parts = list(dict.fromkeys(part for panel in panels.values() for bar in panel.values() for part in bar))
    colours = {part: COLOURS[i % len(COLOURS)] for i, part in enumerate(parts)}
    with _figure(title, NAMES + 5.5, _height(panels)) as (figure, out):
        for axes, (name, panel) in _stack(figure, panels):
            ends = [0.0] * len(panel)
            for part in parts:
                lengths = [bar.get(part, 0.0) for bar in panel.values()]
                axes.barh(range(len(panel)), lengths, left=ends, color=colours[part], height=0.8)
                ends = [end + length for end, length in zip(ends, lengths)]
            axes.set(title=_plain(name), xlabel=_plain(x), xlim=(0, _end(panels)), ylim=(len(panel) - 0.5, -0.5))
            axes.set_yticks(range(len(panel)), labels=map(_plain, panel))
            axes.grid(visible=False, axis="y")
        if len(parts) > 1:
            _legend(figure, [Patch(color=colours[part]) for part in parts], parts)
    return out.getvalue()


def heat(panels: Heat, *, title: str, x: str, value: str) -> str:
    """Return heat maps of shares from 0 (light) to 1 (dark); a cell whose share is None stays empty."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    widest = max((len(row) for panel in panels.values() for row in panel.values()), default=1)
    with _figure(title, NAMES + 1.2 + max(2.0, CELL * widest), _height(panels)) as (figure, out):
        shades = ScalarMappable(Normalize(0, 1), cmap="Blues")
        for axes, (name, panel) in _stack(figure, panels):
            columns = list(dict.fromkeys(column for row in panel.values() for column in row))
            shares = [[row.get(column) for column in columns] for row in panel.values()]
            cells = [[float("nan") if share is None else share for share in row] for row in shares]
            axes.pcolormesh(cells, cmap=shades.cmap, norm=Normalize(0, 1), edgecolors="white", linewidth=1)
            for (i, row), j in itertools.product(enumerate(shares), range(len(columns))):
                if (share := row[j]) is not None:
                    ink = "white" if share > 0.6 else "black"
                    axes.text(j + 0.5, i + 0.5, f"{share:.2f}", ha="center", va="center", size="small", color=ink)
            axes.set(title=_plain(name), xlabel=_plain(x), ylim=(len(panel), 0))
            axes.set_xticks([j + 0.5 for j in range(len(columns))], labels=map(_plain, columns))
            axes.set_yticks([i + 0.5 for i in range(len(panel))], labels=map(_plain, panel))
            axes.grid(visible=False)
        if panels:
            figure.colorbar(shades, ax=figure.axes, label=_plain(value))
    return out.getvalue()


@contextmanager
def _figure(title: str, width: float, height: float) -> Iterator[tuple[Figure, io.StringIO]]:
    """Yield a figure to draw on, and a buffer that holds its SVG after the block. width, height: in inches."""
    import matplotlib.style
    from matplotlib.figure import Figure

    out = io.StringIO()
    with matplotlib.style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(_plain(title), fontweight="bold")
        yield figure, out
        figure.savefig(out, format="svg", metadata={"Date": None})


def _stack(figure: Figure, panels: Mapping[str, Any]) -> Iterator[tuple[Axes, tuple[str, Any]]]:
    """Yield axes for each panel, one below the other, with the panel's (name, content); more rows get more height."""
    if panels:
        heights = [PANEL + LINE * len(panel) for panel in panels.values()]
        places = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        yield from zip(places, panels.items())


def _height(panels: Mapping[str, Mapping[str, object]]) -> float:
    return HEAD + sum(PANEL + LINE * len(panel) for panel in panels.values())


def _end(panels: Bars) -> float:
    """Return the end of the x axis, a little beyond the longest bar."""
    return 1.02 * max((sum(bar.values()) for panel in panels.values() for bar in panel.values()), default=0.0) or 1.0


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Draw the legend below all panels."""
    if names:
        across = _across(figure.get_figwidth(), names)
        figure.legend(handles, [*map(_plain, names)], loc="outside lower center", ncols=across, handlelength=3)


def _across(width: float, names: Sequence[str]) -> int:
    """Return how many names fit into one line of the legend."""
    return max(1, int(width / (HANDLE + LETTER * max(map(len, names), default=0))))


def _style(index: int) -> dict[str, Any]:
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": colour, "linestyle": dash, "marker": MARKERS[index % len(MARKERS)]}


def _plain(text: str) -> str:
    return terminal.clean(text)
