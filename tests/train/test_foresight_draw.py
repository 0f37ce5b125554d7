"""foresightkv's draw: its figures on phi made by hand, phi in units of the margin, and the page's numbers."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from support.foresight_draw import pool_figures, random_traces, times
from support.models import build

from kvbench.engine.model.weights import Base
from kvbench.eviction.terms.foresight import drop_scores
from kvbench.sources.published import FILE
from kvbench.train.catalogue import entry_of
from kvbench.train.foresight_states import Choice
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.foresightkv import ForesightRecipe

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/training"


def choice(phi: torch.Tensor, drop: int) -> tuple[dict[str, torch.Tensor], Choice]:
    """A scorer of one input, and entries [n] for which it gives (nearly) these phi; `drop` of them are dropped."""
    scorer = {"w1": torch.ones(1, 1, 1, 1), "b1": torch.full((1, 1, 1), 100.0), "w2": torch.ones(1, 1, 1)}
    dropped = torch.zeros(1, 1, len(phi), dtype=torch.bool)
    dropped[..., :drop] = True
    x = phi[None, None, :, None]
    return scorer | {"b2": torch.full((1, 1), -100.0)}, Choice(layer=0, seen=0, x=x, worth=-phi, dropped=dropped)


def test_figures_of_a_draw_by_hand():
    scorer, flat = choice(torch.zeros(4000), 1000)
    figures = pool_figures(scorer, [flat])
    assert figures["spread"] == 0
    assert figures["perplexity"] == pytest.approx(1)
    assert figures["worst"] == pytest.approx(0.5, abs=0.06)  # a standard error is 0.011
    assert pool_figures(scorer, [flat], size=4)["worst"] == pytest.approx(0.25, abs=0.06)
    steps = choice(torch.tensor([40.0, 40.0, 0.0, 0.0, -90.0]), 2)[1]  # the pool is the first four
    figures = pool_figures(scorer, [steps])
    assert figures == {"spread": pytest.approx(23.094, abs=1e-3), "perplexity": pytest.approx(0.5), "worst": 1.0}
    assert pool_figures(times(scorer, 0.0), [steps])["perplexity"] == pytest.approx(1)


def test_phi_is_proportional_to_the_margin(tmp_path):
    """Two trainings with margins 0.01 and 1, without the clip of the gradient's norm."""
    loaded, phi = build("llama"), []
    for margin in (0.01, 1.0):
        more = {"budget": 24, "interval": 8, "features": "paper6", "hidden": 8, "within": "mean", "margin": margin}
        settings = Settings(steps=8, lr=1e-2, warmup=2, batch=2, clip=1e9, more=more)
        recipe = ForesightRecipe(loaded, settings, random_traces(3, 40, 30, 1), random_traces(1, 40, 30, 2))
        begun = recipe.trained.scorer()
        (out := tmp_path / str(margin)).mkdir()
        train(recipe, out, base=Base(name="llama", config=loaded.model.config))
        [trace] = recipe.test
        choices = recipe.evictions.golden(trace).choices
        start, end = (
            torch.cat([drop_scores(scorer, c.layer, c.x).detach().flatten() for c in choices]) / margin
            for scorer in (begun, recipe.trained.scorer())
        )
        assert (end - start).std() > 0.1 * start.std()
        phi.append(end)
    torch.testing.assert_close(*phi, rtol=0.02, atol=0.02)


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def measured(**wanted: str) -> dict[str, str]:
    """The only row of the losses with these values."""
    wanted = {"scorer": "shipped", "interval": "32", "pool": "2"} | wanted
    [row] = (row for row in rows("foresight-draw-loss.csv") if wanted.items() <= row.items())
    return row


def figure(row: dict[str, str], name: str) -> str:
    return f"{float(row[name]):.3f}"


def with_error(row: dict[str, str], sign: str = "") -> str:
    name, error = ("against_no_draw", "against_se") if sign else ("loss", "loss_se")
    return f"{float(row[name]):{sign}.3f} ± {float(row[error]):.3f}"


def section() -> str:
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    return page[page.index("### The draw and the margin") :].split("\n## ")[0]


def test_the_table_of_the_page_is_the_measurement():
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section().splitlines() if "|" in line]
    no_draw = measured(factor="no draw")
    about = {"scorer": "shipped", "interval": "32", "pool": "2", "draws": "4"}
    stored = [row for row in rows("foresight-draw-loss.csv") if about.items() <= row.items()]
    wanted = [
        [row["factor"], f"{5 * float(row['factor']):g}", f"{float(row['spread']):.2g}", figure(row, "perplexity"),
         f"{float(row['worst']):.2f}", with_error(row), with_error(row, "+")]
        for row in stored
    ]  # fmt: skip
    assert cells[2:] == [*wanted, ["no draw", "", "", "", "", with_error(no_draw), ""]]
    within = [float(row["factor"]) for row in stored if float(row["against_no_draw"]) <= float(row["against_se"])]
    assert 5 * min(within) == entry_of("foresightkv").options["margin"]


def test_the_other_numbers_of_the_page_are_the_measurements():
    stored = rows("foresight-draw-spread.csv")
    spreads = {(row["model"], row["inputs"], row["margin"]): row for row in stored if row["budget"] != "1024"}
    [large] = (row for row in stored if row["budget"] == "1024" and row["margin"] == "1")
    text = re.sub(r"\s+", " ", section())
    for model in ("tiny", "qwen3-4b", "r1-distill-qwen-7b"):
        assert f"{float(spreads[model, 'scaled', '1']['spread']):.2f} " in text
    for model in ("tiny", "qwen3-4b"):
        assert f"{float(spreads[model, 'raw', '0.01']['spread']):.3f} " in text
    assert f"{float(large['spread']):.2f} for Qwen3-4B's at the paper's 1,024 and 256" in text
    raw = [with_error(measured(scorer="raw", factor=factor)) for factor in ("1", "no draw")]
    assert f"{raw[0]} nats with the draw and {raw[1]} without" in text
    twelve = [measured(interval="12", factor=factor) for factor in ("no draw", "1", "0.002")]
    assert f"{with_error(twelve[0])} without the draw; the draw adds {with_error(twelve[1], '+')} at factor 1" in text
    assert f"and {with_error(twelve[2], '+')} at 0.002" in text
    every, own = (
        [figure(measured(pool=pool, factor=factor), "loss") for factor in ("1", "0.002")] for pool in ("100", "2")
    )
    assert f"{every[0]} and {own[0]} at factor 1, {every[1]} and {own[1]} at 0.002" in text
    published = FILE.read_text(encoding="utf-8").splitlines()
    table = [line for line in published if ",Table 5," in line and "input=Attn+KV" in line]
    for kind in ("Top-K+multinomial", "Top-K", "multinomial"):
        scores = [line.split(",pass@1 (avg of 32),")[1].split(",")[0] for line in table if f'sampling={kind}"' in line]
        assert len(scores) == 2
        assert " and ".join(scores) in text
