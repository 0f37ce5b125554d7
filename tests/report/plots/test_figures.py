"""Figures appear where the rows have their data, and show the table's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import altair
import pytest
from jsonschema import ValidationError

from kvbench.report.load import load
from kvbench.report.plots import Figure, figures, style
from kvbench.report.plots.pages import pages
from kvbench.report.scores import ScoreReport

ALL = [
    "score-budget",
    "score-bytes",
    "map-ruler-subtask",
    "map-niah-category",
    "speed-budget",
    "length-budget",
    "truncated-budget",
]


def values(figure: Figure) -> list[dict]:
    return figure.spec["data"]["values"]


def named(report: ScoreReport) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(report)}


def shown(figure: Figure) -> dict[tuple, dict]:
    """The values of a figure against the budget, by task, method and budget."""
    return {(v["task"], v["method"], v.get("budget")): v for v in values(figure) if v["kind"] != "frontier"}


def test_every_figure_in_reading_order(report: ScoreReport):
    assert [figure.name for figure in figures(report)] == ALL


def test_specifications_follow_the_schema(report: ScoreReport):
    for figure in figures(report)[:4]:  # the others are of the first one's kind
        json.dumps(figure.spec, allow_nan=False)
        altair.Chart.from_dict(figure.spec | {"config": style.config("dark")}, validate=True)
    with pytest.raises(ValidationError):
        altair.Chart.from_dict(figure.spec | {"columns": "two"}, validate=True)


def test_numbers_are_those_of_the_table(report: ScoreReport):
    drawn = named(report)
    fields = {
        "score-budget": {"mean": "mean", "low": "low", "high": "high", "questions": "questions"},
        "score-bytes": {"mean": "mean", "kv_bytes_peak": "kv_bytes_peak"},
        "speed-budget": {"tokens_per_second": "tokens_per_second"},
        "truncated-budget": {"truncated": "truncated"},
    }
    for name, columns in fields.items():
        found = shown(drawn[name])
        assert len(found) == len(report.lines()) == 50
        for line in report.lines():
            point = found[line["task"], line["method"], line["budget"]]
            assert {f: point[f] for f in columns} == {f: line[column] for f, column in columns.items()}


def test_spreads_are_quartiles_of_the_answers(report: ScoreReport):
    """12 answers of 80, 85, ... 135 tokens: quartiles at 2.75 and 8.25 steps of 5."""
    point = shown(named(report)["length-budget"])["walk", "gkv", 48]
    assert (point["output_tokens"], point["output_tokens_q1"], point["output_tokens_q3"]) == (107.5, 93.75, 121.25)


def test_speeds_have_the_spread_of_the_table(report: ScoreReport):
    point = shown(named(report)["speed-budget"])["walk", "gkv", 48]
    [line] = [x for x in report.lines() if (x["task"], x["method"], x["budget"]) == ("walk", "gkv", 48)]
    spread = line["tokens_per_second_sd"]
    assert spread > 0
    assert (point["slower"], point["faster"]) == pytest.approx(
        (line["tokens_per_second"] - spread, line["tokens_per_second"] + spread)
    )


def test_maps_have_the_scores_of_tasks_and_categories(report: ScoreReport):
    table = {(line["task"], line["method"], line["budget"]): line["mean"] for line in report.lines()}
    squares = values(named(report)["map-ruler-subtask"])
    assert len(squares) == 3 * 2 * 5
    for square in squares:
        method, _, budget = square["cell"].partition(" ")
        task = f"ruler/{square['row']}@{square['column']}"
        assert square["share"] == table[task, method, int(budget) if budget else None]
    needles = values(named(report)["map-niah-category"])
    assert {(s["row"], s["column"]) for s in needles} == {
        (f"depth {depth}%", length) for depth in ("000", "050", "100") for length in ("4096", "16384")
    }
    assert all(s["questions"] == 4 for s in needles)
    for length in ("4096", "16384"):
        of = [s["share"] for s in needles if (s["cell"], s["column"]) == ("gkv 48", length)]
        assert math.fsum(of) / 3 == pytest.approx(table[f"niah@{length}", "gkv", 48])


def test_figures_without_data_are_absent(make_run: Callable, rows: Callable):
    """No budget: nothing against budgets. No bytes: no frontier. No times: no speed. No truncated answer: no share."""
    full = rows("full", None, [0.5] * 8)
    assert figures(ScoreReport.make(load([make_run("full", full)]))) == []
    empty = {"kv_bytes_peak": None, "decode_seconds": None, "evict_seconds": None}
    bare = [rows(m, b, [0.25, 0.5] * 8, **empty) for m, b in (("full", None), ("gkv", 48))]
    assert list(named(ScoreReport.make(load([make_run("bare", *bare)])))) == ["score-budget", "length-budget"]


def test_budgets_as_shares_have_their_own_figure(make_run: Callable, rows: Callable):
    parts = [rows("full", None, [0.5, 1.0] * 8), rows("gkv", 48, [0.5] * 16)]
    parts += [rows("gkv", 100 + i, [0.25] * 16, budget_share=share) for i, share in enumerate((0.25, 0.5))]
    drawn = named(ScoreReport.make(load([make_run("r", *parts)])))
    assert {"score-budget", "score-share"} <= set(drawn)
    cells = [v for v in values(drawn["score-share"]) if v["kind"] == "cell"]
    assert [(v["cell"], v["budget_share"]) for v in cells] == [("gkv 25%", 0.25), ("gkv 50%", 0.5)]
    assert "Not shown here: 1 cell with budgets in another unit." in drawn["score-share"].caption


def test_captions_name_axes_bands_questions_tasks_and_model(report: ScoreReport):
    caption = {name: figure.caption for name, figure in named(report).items()}
    panels = "a panel for each of 10 tasks (n = 12 questions), model tiny"
    assert caption["score-budget"].startswith(
        f"Mean score over questions against budget (entries per layer and KV head), {panels}; bands and bars: 95% "
        "intervals over questions, as in the table."
    )
    assert f"peak (mean over samples), {panels}; bars: 95% intervals" in caption["score-bytes"]
    assert all(panels in text for name, text in caption.items() if not name.startswith("map-"))
    by_length = "by length in tokens (columns), a panel for each method and budget, n ="
    assert caption["map-ruler-subtask"].startswith("Mean score, from 0 to 1, of each subtask of ruler (rows) ")
    assert f"{by_length} 12 questions in each square, model tiny; no error bars" in caption["map-ruler-subtask"]
    assert f"{by_length} 4 questions in each square, model tiny; no error bars" in caption["map-niah-category"]


def test_a_caption_names_few_tasks_and_every_model(make_run: Callable, rows: Callable):
    parts = [
        rows(m, b, [0.5, 1.0] * n, task=task, model=f"org/{task}")
        for task, n in (("walk", 4), ("chain", 6))
        for m, b in (("full", None), ("gkv", 48))
    ]
    drawn = named(ScoreReport.make(load([make_run("r", *parts)], ["model"])))
    wanted = "a panel for each of chain and walk (n = 8 to 12 questions), model org/chain and org/walk; bands"
    assert wanted in drawn["score-budget"].caption


def test_a_caption_names_the_groups_of_a_task(make_run: Callable, rows: Callable):
    def drawn(seeds: int) -> str:
        parts = [
            rows(m, b, [0.5, 1.0] * 4, seed=seed) for seed in range(seeds) for m, b in (("full", None), ("gkv", 48))
        ]
        return named(ScoreReport.make(load([make_run(f"r{seeds}", *parts)], ["seed"])))["score-budget"].caption

    assert ", task walk (n = 8 questions), model tiny" in drawn(1)
    assert ", a panel for each of walk (seed 0) and walk (seed 1) (n = 8 questions), model tiny" in drawn(2)
    assert ", a panel for each of 9 tables (n = 8 questions)" in drawn(9)


def test_a_map_of_a_prompt_only_method_names_its_model(make_run: Callable, rows: Callable):
    """The points' names of such cells have a mark."""
    cells = [
        [row | {"category": f"depth {i % 2}"} for i, row in enumerate(made)]
        for length in (4096, 8192)
        for made in [rows("snapkv", 48, [0.5, 1.0] * 4, task=f"niah@{length}", decode_bounded=False)]
    ]
    caption = named(ScoreReport.make(load([make_run("r", *cells)])))["map-niah-category"].caption
    assert ", model tiny; no error bars" in caption


def test_captions_say_what_is_not_shown(make_run: Callable, rows: Callable):
    parts = [rows("full", None, [0.5, 1.0] * 8), rows("gkv", 48, [0.5] * 16)]
    parts += [rows("snapkv", 48, [0.5] * 16, decode_bounded=False)]
    unscored = {"status": "unscored", "score": None, "score_partial": None}
    parts += [[row | unscored for row in rows("tova", 48, [0.5] * 16)]]
    drawn = named(ScoreReport.make(load([make_run("r", *parts)])))
    caption = drawn["score-budget"].caption
    for words in ("95% intervals", "Not shown: 1 cell without a score.", "full, without a budget.", "*: generated"):
        assert words in caption
    assert {v["method"] for v in values(drawn["score-budget"])} == {"full", "gkv", "snapkv *"}
    assert {v["panel"] for v in values(drawn["score-budget"])} == {"walk, n = 0 to 16"}


def test_points_of_one_budget_are_apart_and_around_it(report: ScoreReport):
    cells = [v for v in values(named(report)["score-budget"]) if v["kind"] == "cell" and v["task"] == "walk"]
    at = {(v["method"], v["budget"]): v["x"] for v in cells}
    assert at["gkv", 48] < 48 < at["tova", 48] < at["gkv", 96] < 96 < at["tova", 96]
    assert at["gkv", 48] * at["tova", 48] == pytest.approx(48**2)


def test_a_method_looks_the_same_in_every_figure(report: ScoreReport):
    domains = []
    for figure in figures(report):
        layers = figure.spec["spec"]["layer"]
        scales = [layer["encoding"]["color"]["scale"] for layer in layers if "color" in layer["encoding"]]
        domains += [tuple(scale["domain"]) for scale in scales if scale["range"] == "category"]
    assert set(domains) == {("full", "gkv", "tova")}


def test_thirty_methods_can_be_told_apart():
    names = [f"method-{i}" for i in range(28)]
    looks = style.methods(names, names)
    shapes = looks["shape"]["scale"]["range"]
    colours = style.config("light")["range"]["category"][: len(shapes)]
    assert len(set(zip(colours, shapes))) == len(names) + 1
    assert len({(colour, style.dash(name, names)) for name, colour in zip(names, colours[1:])}) == len(names)
    assert looks["color"]["legend"]["columns"] == 5
    assert style.methods(names, ["m" * 60])["color"]["legend"]["columns"] == 1


def test_the_frontier_is_that_of_the_overview(report: ScoreReport):
    drawn = values(named(report)["score-bytes"])
    marked = {(v["task"], v["method"], v.get("budget")) for v in drawn if v["kind"] == "frontier"}
    listed = report.data()["frontier"]
    assert marked == {(line["task"], line["method"], line["budget"]) for line in listed}
    assert 0 < len(marked) < sum(v["kind"] == "cell" for v in drawn)


def test_many_panels_are_split_into_pages(make_run: Callable, rows: Callable):
    """As many as RULER at all its lengths has; each panel is on one page, and the axes stay the same."""
    tasks = [f"ruler/vt@{1024 * n}" for n in range(1, 16)]
    parts = [rows(m, b, [0.5, 1.0] * 4, task=task) for task in tasks for m, b in (("full", None), ("gkv", 48))]
    drawn = named(ScoreReport.make(load([make_run("r", *parts)])))
    of = [figure for name, figure in drawn.items() if name.startswith("score-budget")]
    assert [figure.name for figure in of] == ["score-budget-1", "score-budget-2"]
    assert [len(values(figure)) for figure in of] == [20, 10]
    assert sorted({v["task"] for figure in of for v in values(figure)}) == sorted(tasks)
    assert of[1].title == "Score against budget, part 2 of 2"
    assert of[0].spec["spec"] == of[1].spec["spec"]
    assert list(pages(of[0])) == [of[0]]
