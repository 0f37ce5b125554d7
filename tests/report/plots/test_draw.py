"""What is drawn: text as text, nothing but shapes, and equal bytes for equal figures."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.hostile import HOSTILE

from kvbench.cli.app import main
from kvbench.console.terminal import clean
from kvbench.report.load import load
from kvbench.report.plots import Figure, figures, png, style, svg, write
from kvbench.report.plots.bars import bars
from kvbench.report.plots.curves import axis, curves
from kvbench.report.plots.draw import pdf
from kvbench.report.plots.heat import heat
from kvbench.report.scores import ScoreReport

NAMES = [
    *HOSTILE,
    "$x_1$",
    "%s",
    "{}",
    "datum.x",
    "a.b[0]",
    "javascript:1",
    "\x00\ud800",
    "\ufdd0\ufffe\uffff\U0001fffe",
    'x" id="clip9',
    "url(#clip9)",
]
SHAPES = {"svg", "defs", "clipPath", "g", "path", "rect", "line", "text", "linearGradient", "stop"}


def elements(drawn: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawn).iter())


def texts(drawn: str) -> set[str]:
    return {element.text or "" for element in elements(drawn) if element.tag.endswith("}text")}


def some(name: str = "f", **texts: str) -> Figure:
    """A small figure. texts: its panel, method and title."""
    about = {"panel": "p", "method": "m", "title": "t"} | texts
    values = [{"kind": "cell", "dash": 0, "x": x, "y": 0.5, "low": 0.4, "high": 0.6, **about} for x in (1, 2)]
    looks = style.methods([about["method"]], [about["method"]])
    spec = curves(
        about["title"],
        values,
        x=axis("x", "x"),
        y=axis("y", "y"),
        looks=looks,
        low="low",
        high="high",
        hints=["method"],
    )
    return Figure(name, about["title"], "", spec)


def harmless(drawn: str) -> None:
    """Shapes and texts only: no script, no link, no event, no style sheet, no reference beyond the file."""
    assert {element.tag.rpartition("}")[2] for element in elements(drawn)} <= SHAPES
    for element in elements(drawn):
        for attribute, value in element.attrib.items():
            assert not attribute.lower().startswith("on")
            assert "href" not in attribute
            assert "url(" not in value or attribute == "aria-label" or re.fullmatch(r"url\(#[\w-]+\)", value)
    ids = {element.get("id") for element in elements(drawn)}
    used = set(re.findall(r'(?:clip-path|fill)="url\(#([^)]*)\)"', drawn))
    assert used <= ids


def test_names_stay_text():
    """Wherever a name stands; also those that would be expressions, escapes or ids."""
    for name in NAMES:
        drawn = svg(some(panel=name, method=name, title=name))
        harmless(drawn)
        assert {clean(name)} <= texts(drawn)
        assert not set(drawn) & set("\x00\x1b\x07\u202e\u2066\u2069\u2028\r\t")


def test_names_of_rows_and_columns_stay_text():
    squares = [{"panel": name, "row": name, "column": name, "share": 0.5} for name in NAMES]
    values = [{"panel": NAMES[0], "bar": name, "part": name, "length": 0.5} for name in NAMES]
    for spec in (heat(NAMES[0], squares, NAMES, NAMES, x=NAMES[1]), bars(NAMES[0], values, x=NAMES[2])):
        drawn = svg(Figure("f", NAMES[0], NAMES[1], spec))
        harmless(drawn)
        wanted = {clean(name) for name in NAMES if len(clean(name)) < 24}  # longer ones may end in an ellipsis
        assert wanted <= texts(drawn)


def test_a_hostile_run_is_drawn_as_text(make_run: Callable, rows: Callable):
    made = [rows(name, b, [0.5, 1.0] * 4, task=name) for name in HOSTILE[:4] for b in (48, 64)]
    for figure in figures(ScoreReport.make(load([make_run("r", *made)]))):
        drawn = svg(figure)
        harmless(drawn)
        assert clean(HOSTILE[0]) in texts(drawn)


def test_no_text_is_an_expression(report: ScoreReport):
    """A string that Vega computes would stand under one of these keys."""

    def keys(value: object) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for member in value.values() for key in keys(member)}
        return {key for member in value for key in keys(member)} if isinstance(value, list) else set()

    for figure in figures(report):
        spec = {**figure.spec, "data": None}
        assert not keys(spec) & {"expr", "signal", "calculate", "test", "url", "href", "labelExpr", "params"}


def test_keys_are_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", "canary-0815-judge")
    figure = some(method="m canary-0815-judge", title="sk-abcdefghijklmnopqrstuvwxyz0123456789")
    for text in (svg(figure), str(figure)):
        assert "canary" not in text
        assert "abcdefghijklmnop" not in text


def test_long_texts_are_clipped_and_stay_apart():
    """The time to draw a text grows with the square of its length."""
    long = [f"{'m' * 20_000}{end}" for end in "ab"]
    figure = some(panel=long[0], method=long[1], title=long[0])
    assert "m" * 401 not in f"{figure.title} {figure.spec}"
    assert len(set(Figure("f", "t", "", {"data": long}).spec["data"])) == 2


def test_equal_figures_give_equal_bytes(tmp_path: Path, report: ScoreReport):
    """The converter counts on and orders at random; a figure drawn in between changes nothing."""
    drawn = figures(report)[:3]
    first = {path.name: path.read_bytes() for path in write(drawn, tmp_path / "one")}
    svg(some())
    again = {path.name: path.read_bytes() for path in write(drawn[::-1], tmp_path / "two")}
    assert first == again
    assert list(first) == [f"{figure.name}.{suffix}" for figure in drawn for suffix in ("svg", "pdf", "txt")]
    assert [first[f"{figure.name}.txt"].decode() for figure in drawn] == [
        f"{figure.title}. {figure.caption}\n" for figure in drawn
    ]


def test_a_folder_keeps_the_captions_of_earlier_figures(tmp_path: Path, report: ScoreReport):
    """As of 'report --plot figures' and then 'bench --plot figures'."""
    earlier, later = figures(report)[:2]
    write([earlier], tmp_path)
    write([later], tmp_path)
    assert earlier.caption in (tmp_path / f"{earlier.name}.txt").read_text()
    assert later.caption in (tmp_path / f"{later.name}.txt").read_text()


def test_figures_of_one_page_have_different_ids(report: ScoreReport):
    figure = figures(report)[2]  # a gradient and clip paths
    seen: set[str] = set()
    for one in (svg(figure), svg(figure, "dark"), svg(replace(figure, name="other"))):
        ids = set(re.findall(r' id="([^"]*)"', one))
        assert ids
        assert not ids & seen
        seen |= ids


def test_pdf_has_text_and_no_picture():
    """Two fonts, and resources in the order of their names; a reader finds every object where the table says."""
    drawn = svg(some(panel="日本語"))
    document = pdf(drawn)
    assert len({pdf(drawn) for _ in range(5)}) == 1
    assert b"/ToUnicode" in document
    assert b"/FontFile" in document
    assert b"/Subtype /Image" not in document
    start = int(document[document.rindex(b"startxref") + 9 :].split()[0])
    places = [int(line.split()[0]) for line in document[start:].splitlines()[3:] if line.endswith(b" n ")]
    for number, place in enumerate(places, 1):
        assert document[place:].startswith(b"%d 0 obj\n" % number)
    assert {int(n) for n in re.findall(rb"(\d+) 0 R\b", document)} <= set(range(1, len(places) + 1))
    assert b"/Root 1 0 R" in document


def test_themes_differ_in_colours_only(report: ScoreReport):
    for figure in figures(report)[:3]:
        light, dark = svg(figure), svg(figure, "dark")
        assert texts(light) == texts(dark)
        assert style.GROUND["dark"]["paper"] in dark
        assert style.GROUND["dark"]["paper"] not in light
    assert png(light).startswith(b"\x89PNG")


def test_fonts_are_not_fetched(report: ScoreReport):
    drawn = svg(figures(report)[0])
    assert set(re.findall(r'font-family="([^"]*)"', drawn)) == {style.FONT}
    assert "@font-face" not in drawn


def test_a_folder_that_cannot_be_written_is_one_line(make_run: Callable, rows: Callable, tmp_path: Path, capsys):
    run = make_run("r", rows("full", None, [0.5] * 8), rows("gkv", 48, [0.5] * 8))
    (tmp_path / "file").write_text("")
    assert main(["report", str(run), "--plot", str(tmp_path / "file")]) == 3
    assert (
        capsys.readouterr().err
        == f"error: cannot write plots in '{tmp_path / 'file'}' (file exists). Give another folder.\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        "report {run} --plot {out}",
        "bench --plot {out}",
        "train lookaheadkv --model tiny --out {out} --plot {out}",
        "replay --analysis density --method gkv --budget 32 --task walk --out {out}",
    ],
)
def test_without_the_converter_nothing_is_begun(line, make_run, rows, monkeypatch, capsys, tmp_path):
    run = make_run("r", rows("full", None, [0.5] * 8))
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert main(line.format(run=run, out=tmp_path / "out").split()) == 3
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: plots need vl-convert: pip install 'kvbench[report]'.\n")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_what_it_says(make_run: Callable, rows: Callable, tmp_path: Path, capsys):
    run = make_run("r", rows("full", None, [0.5, 1.0] * 8), rows("gkv", 48, [0.25, 0.5] * 8))
    assert main(["report", str(run), "--plot", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "verdict" in out
    written = sorted((tmp_path / "out").iterdir())
    assert sorted(err.splitlines()) == [f"wrote {path}" for path in written]
    drawn = {"score-budget", "score-bytes", "speed-budget", "length-budget"}
    assert {path.name for path in written} == {f"{name}.{suffix}" for name in drawn for suffix in ("svg", "pdf", "txt")}
    assert main(["report", str(run), "--plot", str(tmp_path / "out"), "--memory"]) == 2
    assert "--plot draws the reports of scores" in capsys.readouterr().err
