"""What is drawn lies where it should, names stay text, and the same rows give the same bytes."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from support.hostile import HOSTILE

from kvbench.cli.app import main
from kvbench.console.terminal import clean
from kvbench.replay.analyses import plots

NAMES = [*HOSTILE, "$x_1$", "a$b", r"\frac{1}{2}", "$\\unknown$", "{}", "%s"]
BLUE, ORANGE = plots.COLOURS[:2]
ALL = {"title": "t", "x": "x"}


def elements(plot):
    return list(ElementTree.fromstring(plot).iter())


def texts(plot):
    return [element.text for element in elements(plot) if element.tag.endswith("}text")]


def paths(plot, style):
    """The corners of every path that is drawn with this style."""
    drawn = [e.get("d") for e in elements(plot) if e.tag.endswith("}path") and style in e.get("style", "")]
    return [[tuple(map(float, p)) for p in re.findall(r"[ML] (\S+) (\S+)", path)] for path in drawn]


@pytest.mark.parametrize("kind", ["lines", "bars", "heat"])
def test_names_stay_text(kind):
    """Wherever a name stands; also those that would be mathematics."""
    if kind == "lines":
        panels = {NAMES[0]: {name: [(1.0, 0.5), (2.0, 0.25)] for name in NAMES}}
        plot = plots.lines(panels, title=NAMES[1], x=NAMES[2], y=NAMES[3])
    elif kind == "bars":
        plot = plots.bars({NAMES[0]: {name: {name: 0.5} for name in NAMES}}, title=NAMES[1], x=NAMES[2])
    else:
        panels = {NAMES[0]: {name: dict.fromkeys(NAMES, 0.5) for name in NAMES[:2]}}
        plot = plots.heat(panels, title=NAMES[1], x=NAMES[2], value=NAMES[3])
    assert {clean(name) for name in NAMES} <= set(texts(plot))
    tags = {element.tag.rpartition("}")[2] for element in elements(plot)}
    about = {"metadata", "RDF", "Work", "type", "format", "creator", "Agent", "title"}
    assert tags - about <= {"svg", "defs", "style", "clipPath", "g", "path", "use", "rect", "text", "image"}
    for element in elements(plot):
        for attribute, value in element.attrib.items():
            assert not attribute.startswith("on")
            if attribute.endswith("}href"):
                assert value.startswith(("#", "data:image/png;base64,"))
    assert not set(plot) & set("\x1b\x07\u202e\u2066\u2069\u2028\r\t")


def test_lines_lie_where_they_should():
    """Doublings are equally far apart; y begins at 0, also where the panel beside has larger values."""
    panels = {
        "p": {"a": [(64, 0.5), (16, 0.0), (32, 1.0), (128, None)]},
        "q": {"b": [(16, 3.0), (64, 3.0), (256, 2.0)]},
    }
    plot = plots.lines(panels, **ALL, y="y", log=True)
    [(x0, y0), (x1, y1), (x2, y2)] = paths(plot, f"stroke: {BLUE}")[0]
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, 2 * (y0 - y2)), abs=1e-3)
    [(_, y3), (_, y4), (_, y5)] = paths(plot, f"stroke: {ORANGE}")[0]
    assert y4 == y3
    assert (y0 - y3, y0 - y5) == pytest.approx((3 * (y0 - y1), 2 * (y0 - y1)), abs=1e-3)
    shown = texts(plot)
    assert [shown.count(text) for text in ("16", "32", "64", "128", "256")] == [2, 1, 2, 0, 1]


def test_bars_are_stacked():
    plot = plots.bars({"p": {"one": {"a": 0.2, "b": 0.6}, "two": {"a": 0.4}}}, **ALL)
    (one, two, *_), (after, *_) = paths(plot, f"fill: {BLUE}"), paths(plot, f"fill: {ORANGE}")
    start, end = min(one)[0], max(one)[0]
    assert (min(two)[0], max(two)[0] - start) == pytest.approx((start, 2 * (end - start)), abs=1e-3)
    assert (min(after)[0], max(after)[0] - end) == pytest.approx((end, 3 * (end - start)), abs=1e-3)
    assert {y for _, y in one} == {y for _, y in after}
    assert max(y for _, y in one) < min(y for _, y in two)  # one is above two


def test_maps_leave_empty_what_is_unknown():
    plot = plots.heat({"p": {"m": {"0.0": 0.0, "0.1": 1.0}, "n": {"0.1": None}}}, **ALL, value="v")
    light, dark = paths(plot, "fill: #f7fbff"), paths(plot, "fill: #08306b")
    assert (len(light), len(dark)) == (1, 1)
    assert max(light[0])[0] == pytest.approx(min(dark[0])[0])
    assert [texts(plot).count(text) for text in ("0.00", "1.00", "m", "n", "0.1")] == [1, 1, 1, 1, 1]


def test_many_lines_and_no_line_can_be_told_apart():
    styles = [tuple(sorted(plots._style(i).items())) for i in range(32)]
    assert len(set(styles)) == 32
    names = [f"method-{i}(with=a rather long option)" for i in range(20)]
    assert set(names) <= set(texts(plots.lines({"p": {name: [(1, 1.0)] for name in names}}, **ALL, y="y")))
    for plot in (plots.lines({}, **ALL, y="y"), plots.bars({}, **ALL), plots.heat({}, **ALL, value="v")):
        assert texts(plot) == ["t"]


def test_bytes_do_not_depend_on_the_day_or_on_settings():
    panels = {"p": {"a": [(1, 0.5), (2, 0.25)]}}
    first = plots.lines(panels, **ALL, y="y")
    with matplotlib.rc_context({"font.size": 20, "text.usetex": True, "svg.fonttype": "path", "svg.hashsalt": "b"}):
        assert plots.lines(panels, **ALL, y="y") == first
    assert "date" not in first


def test_without_matplotlib_nothing_is_begun(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = f"replay --analysis tokens,density --method gkv --budget 32 --task walk --out {tmp_path / 'out'}"
    assert main(line.split()) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: plots need matplotlib: pip install 'kvbench[report]'.\n")
    assert not (tmp_path / "out").exists()
