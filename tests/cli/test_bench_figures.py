"""The figures of `kvbench bench --plot`."""

from __future__ import annotations

from dataclasses import replace

from kvbench.cli.bench_figures import bench_figures
from kvbench.config.run_config import MethodChoice
from kvbench.report.plots import svg
from kvbench.runner.bench.results import Cost, Measured, Speed
from kvbench.runner.bench.setting import Load, Member, Setting

GKV = MethodChoice(name="gkv")


def measured(system: str, sequences: int, rate: float) -> Measured:
    fresh = Speed(rate=rate, low=rate - 5, high=rate + 9, decode=None)
    warm = Speed(rate=2 * rate, low=2 * rate - 1, high=2 * rate + 2, decode=None)
    return Measured(
        system=system,
        load=Load(16, 512, sequences),
        decoded=sequences,
        fitting=99,
        fresh=fresh,
        warm=warm,
    )


def test_speeds_with_the_slowest_and_fastest_round_beside_the_baseline():
    setting = Setting(members=(Member(GKV, 64), Member(GKV, 128)), repeats=3)
    names = ("gkv @64", "gkv @128", "transformers")
    rows = [measured(name, n, 100.0 * n + i) for n in (1, 8) for i, name in enumerate(names)]
    [figure] = bench_figures(setting, rows)
    values = figure.spec["data"]["values"]
    found = {(v["panel"], v["method"], v["x"]): (v["median"], v["low"], v["high"]) for v in values}
    assert len(found) == 12
    assert found["16 + 512 tokens, fresh", "gkv @64", 8] == (800.0, 795.0, 809.0)
    assert found["16 + 512 tokens, warm", "transformers", 1] == (204.0, 203.0, 206.0)
    assert [v["panel"] for v in values] == [
        f"16 + 512 tokens, {state}" for state in ("fresh", "warm") for _ in range(6)
    ]
    assert "medians of 3 rounds" in figure.caption
    assert svg(figure).count('aria-roledescription="point"') == 12


def test_without_a_baseline_there_is_one_line():
    setting = Setting(members=(Member(GKV, 128),), baselines=())
    [figure] = bench_figures(setting, [measured("gkv @128", 1, 100.0)])
    assert {v["method"] for v in figure.spec["data"]["values"]} == {"gkv @128"}


def test_costs_are_drawn_at_the_ends_of_the_stretches():
    setting = Setting(members=(Member(GKV, 128),), baselines=(), stretch=512)
    row = measured("gkv @128", 8, 100.0)
    costs = tuple(Cost(tokens=end, us=us, low=us - 1, high=us + 2) for end, us in ((512, 30.0), (1024, 40.0)))
    _, figure = bench_figures(setting, [replace(row, warm=replace(row.warm, costs=costs))])
    values = figure.spec["data"]["values"]
    assert {v["panel"] for v in values} == {"16 + 512 tokens, 8 sequences, warm"}
    assert [(v["x"], v["median"], v["low"], v["high"]) for v in values] == [(512, 30, 29, 32), (1024, 40, 39, 42)]
    assert "stretch of 512 tokens" in figure.caption
    assert svg(figure).count('aria-roledescription="point"') == 2
