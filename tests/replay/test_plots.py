"""Figures of analyses: points and error bars lie where the rows say, and names stay text."""

from __future__ import annotations

import pytest

from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import analyses
from kvbench.report.plots import svg

ALL = {"title": "t", "x": "x"}


def values(figures):
    [figure] = figures
    return figure.spec["data"]["values"]


def test_an_error_bar_is_1_96_standard_errors():
    assert plots.with_error({"kept": 0.5, "kept_se": 0.1}, "kept") == {"y": 0.5, "low": 0.304, "high": 0.696}
    assert plots.with_error({"kept": 0.5, "kept_se": None}, "kept") == {"y": 0.5}
    assert plots.with_error({"kept": None, "kept_se": None}, "kept") == {}


def test_lines_have_bands_and_points_without_a_value_are_left_out():
    points = [
        {"panel": "p", "line": "a", "x": 64, "y": 0.5, "low": 0.4, "high": 0.6},
        {"panel": "p", "line": "a", "x": 128},
        {"panel": "q", "line": "b", "x": 16, "y": 3.0},
    ]
    figures = plots.lines("n", points=points, y="y", log=True, **ALL)
    assert [(v["panel"], v["method"], v["x"], v.get("low")) for v in values(figures)] == [
        ("p", "a", 64, 0.4),
        ("q", "b", 16, None),
    ]
    x = figures[0].spec["spec"]["layer"][-1]["encoding"]["x"]
    assert x["axis"]["values"] == [16, 64]
    assert (x["scale"]["type"], x["scale"]["base"]) == ("log", 2)
    assert "1.96 standard errors" in figures[0].caption
    drawn = svg(figures[0])
    assert drawn.count('aria-roledescription="point"') == 2
    assert drawn.count('aria-roledescription="area mark"') == 1  # of line a; b has no band
    assert drawn.count('aria-roledescription="rule mark"') == 1


def test_bars_are_stacked_in_the_order_of_their_parts():
    points = [
        {"panel": "p", "bar": bar, "part": part, "y": y} for bar, part, y in (("one", "b", 0.2), ("one", "a", 0.6))
    ]
    figures = plots.bars("n", points=points, **ALL)
    assert [(v["part"], v["order"], v["length"]) for v in values(figures)] == [("b", 0, 0.2), ("a", 1, 0.6)]
    assert "No error bars" in figures[0].caption
    [(start, first), (then, second)] = widths(svg(figures[0]))
    assert start == 0
    assert (then, second) == pytest.approx((first, 3 * first), abs=1e-2)


def test_a_bar_of_one_part_has_its_error():
    figures = plots.bars(
        "n", points=[{"panel": "p", "bar": "b", "part": "r", "y": 0.5, "low": 0.4, "high": 0.6}], **ALL
    )
    assert "1.96 standard errors" in figures[0].caption
    assert svg(figures[0]).count('aria-roledescription="rule mark"') == 1


def widths(drawn):
    """Left edge and width of every bar."""
    import re

    found = re.findall(r'aria-roledescription="bar" d="M([\d.]+),[\d.]+h([\d.]+)', drawn)
    return [(float(left), float(width)) for left, width in found]


def test_maps_leave_empty_what_is_unknown():
    figures = plots.heat("n", panels={"p": {"m": {"0.0": 0.0, "0.1": 1.0}, "n": {"0.1": None}}}, value="v", **ALL)
    assert [(v["row"], v["column"], v["share"]) for v in values(figures)] == [("m", "0.0", 0.0), ("m", "0.1", 1.0)]
    drawn = svg(figures[0])
    for text in ("0.00", "1.00", "m", "0.1"):
        assert drawn.count(f">{text}</text>") == 1


def test_nothing_is_drawn_of_nothing():
    assert plots.lines("n", points=[], y="y", **ALL) == plots.bars("n", points=[], **ALL) == []
    assert plots.heat("n", panels={"p": {"m": {"c": None}}}, value="v", **ALL) == []


def test_a_layer_s_error_is_at_most_the_mean_of_its_heads():
    row = {"task": "t", "layer": 0, "tokens": 9.0, "tokens_se": 0.0, "above": 0.1, "above_se": 0.0}
    heads = [
        row | {"head": head} | {f"entries_{n}": e for n in (90, 95, 99)} | {f"entries_{n}_se": se for n in (90, 95, 99)}
        for head, e, se in ((0, 4.0, 0.5), (1, 8.0, 1.5))
    ]
    first = values(analyses()["sparsity"].figures(heads))[0]
    assert (first["y"], first["low"], first["high"]) == (6.0, 6 - 1.96, 6 + 1.96)
    heads[0]["entries_90_se"] = None
    assert "low" not in values(analyses()["sparsity"].figures(heads))[0]
