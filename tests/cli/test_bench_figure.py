"""The figure of `kvbench bench --plot`."""

from __future__ import annotations

from kvbench.cli.bench_figure import bench_figure
from kvbench.report.plots import svg
from kvbench.runner.bench import Measured, Setting, State


def state(speed: float, baseline: float | None) -> State:
    spread = None if baseline is None else (baseline - 1, baseline + 2)
    return State(
        kvbench=speed, kvbench_spread=(speed - 5, speed + 9), baseline=baseline, baseline_spread=spread, ratio=None
    )


def measured(sequences: int, baseline: float | None) -> Measured:
    fresh, warm = state(100.0 * sequences, baseline), state(200.0 * sequences, baseline)
    return Measured(sequences=sequences, fresh=fresh, warm=warm, evict_share=0.1, roofline_share=0.1)


def test_speeds_with_the_slowest_and_fastest_round_beside_the_baseline():
    figure = bench_figure(Setting(method="gkv", repeats=3), [measured(1, 50.0), measured(8, 70.0)])
    values = figure.spec["data"]["values"]
    found = {(v["panel"], v["method"], v["x"]): (v["tokens_per_second"], v["slowest"], v["fastest"]) for v in values}
    assert len(found) == 8
    assert found["fresh", "gkv", 8] == (800.0, 795.0, 809.0)
    assert found["warm", "transformers", 1] == (50.0, 49.0, 52.0)
    assert [v["panel"] for v in values] == ["fresh"] * 4 + ["warm"] * 4
    assert "medians of 3 rounds" in figure.caption
    assert svg(figure).count('aria-roledescription="point"') == 8


def test_without_a_baseline_there_is_one_line():
    figure = bench_figure(Setting(method="gkv", baseline="none"), [measured(1, None)])
    assert {v["method"] for v in figure.spec["data"]["values"]} == {"gkv"}
