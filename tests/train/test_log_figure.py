"""The figure of a training log."""

from __future__ import annotations

import json
from pathlib import Path

from kvbench.report.plots import svg
from kvbench.train.log_figure import MOST, log_figure


def figure_of(folder: Path, steps: int):
    tested = [{"step": step, "reward": step / 8} for step in (0, steps)]
    rows = [
        {"step": n, "loss": 1 / n, "grad_norm": 9.0, "lr": 0.1, "reward": -1.0 + n / steps} for n in range(1, steps + 1)
    ]
    for name, lines in (("log", rows), ("held_out", tested)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    return log_figure(folder / "log", folder / "held_out", "gkv-rl")


def test_a_panel_for_the_loss_and_for_each_figure_of_batches_and_of_held_out_data(tmp_path: Path):
    figure = figure_of(tmp_path, 4)
    values = figure.spec["data"]["values"]
    assert [(v["panel"], v["step"], v["value"]) for v in values] == [
        *(("loss", n, 1 / n) for n in range(1, 5)),
        *(("reward", n, -1.0 + n / 4) for n in range(1, 5)),
        *(("held-out reward", step, step / 8) for step in (0, 4)),
    ]
    assert "No error bars" in figure.caption
    assert svg(figure).count('aria-roledescription="line mark"') == 3


def test_a_long_log_is_shown_as_means_with_their_range(tmp_path: Path):
    figure = figure_of(tmp_path, 2 * MOST + 1)
    losses = [v for v in figure.spec["data"]["values"] if v["panel"] == "loss"]
    assert len(losses) == 267  # 801 steps, three at a time
    first = losses[0]
    assert (first["step"], first["value"]) == (3, (1 + 1 / 2 + 1 / 3) / 3)
    assert (first["least"], first["most"]) == (1 / 3, 1)
    assert losses[-1]["step"] == 2 * MOST + 1
    assert "mean over 3 steps" in figure.caption
    assert 'aria-roledescription="area mark"' in svg(figure)
