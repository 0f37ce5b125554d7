"""Sparsity of evicted caches and rises of losses against one plain pass with a mask, and hostile tokens."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from support.analyses import STREAMING, dense, found, mean, read_plainly, seen_under_streaming
from support.models import build
from support.traces import traces

from kvbench.config.run_config import MethodChoice
from kvbench.replay.analyses.api import analyses
from kvbench.replay.choices import FULL, Chosen
from kvbench.report.plots import svg


def shares(weights, sees, start):
    """By layer: the mean shares of entries below 1% and 5% of the maximum, and the mean number of entries."""
    wanted = {}
    for layer, of in weights.items():
        rows = []
        for head in range(of.shape[0]):
            for i in range(start, of.shape[1]):
                row = [float(of[head, i, j]) for j in range(i + 1) if sees[i, j]]
                below = [sum(w < limit * max(row) for w in row) / len(row) for limit in (0.01, 0.05)]
                rows.append([*below, len(row)])
        wanted[layer] = [mean(column) for column in zip(*rows)]
    return wanted


def test_sparsity_of_evicted_caches():
    loaded, [trace] = build("qwen3"), traces([(45, 30)])
    rows = {(r["method"], r["layer"]): r for r in found(loaded, [trace], "cache-sparsity", STREAMING, FULL)}
    assert len(rows) == 2 * 3
    sees = seen_under_streaming(trace)
    evicted = shares(read_plainly(loaded, trace, sees)[0], sees, 45)
    full = shares(dense(loaded, trace), sees.new_ones(sees.shape).tril(), 45)
    for name, wanted in (("streaming-llm", evicted), ("full", full)):
        for layer, values in wanted.items():
            row = rows[name, layer]
            assert [row["below_1"], row["below_5"], row["entries"]] == pytest.approx(values, abs=2e-3)
            assert row["below_1"] <= row["below_5"]


@pytest.mark.parametrize(("method", "options"), [("ada-kv", (("base", "snapkv(window=8)"),)), ("kvzip", ())])
def test_places_without_an_entry_do_not_count(method, options):
    """Heads of unequal size are padded; all keep 24 entries of the prompt on average, and every token after it."""
    chosen = Chosen(method=MethodChoice(name=method, options=options), budget=24)
    for row in found(build("qwen3"), traces([(45, 22)] * 2), "cache-sparsity", chosen):
        assert row["entries"] == pytest.approx(24 + mean(range(1, 22)), abs=8)  # a layer's budget may differ
        assert 0 <= row["below_1"] <= row["below_5"] < 1


def test_tokens_whose_loss_rises_most():
    loaded, asked = build("qwen3"), traces([(45, 40), (45, 40)])
    wanted = defaultdict(list)
    for place, trace in enumerate(asked):
        losses = []
        for sees in (seen_under_streaming(trace), torch.ones(84, 84, dtype=torch.bool).tril()):
            chances = read_plainly(loaded, trace, sees)[1][44:].double().log_softmax(dim=-1)
            losses.append([-float(chances[i, token]) for i, token in enumerate(trace.answer)])
        for position, (token, evicted, full) in enumerate(zip(trace.answer, *losses)):
            wanted[token].append((max(0.0, evicted - full), full, place, position))
    total = sum(rise for of in wanted.values() for rise, *_ in of)
    rows = found(loaded, asked, "losses", STREAMING, text=lambda token: f"<{token}>")
    assert len(rows) == min(50, len(wanted))
    sums = sorted((sum(rise for rise, *_ in of) for of in wanted.values()), reverse=True)
    for row, largest in zip(rows, sums):
        of = wanted[row["token"]]
        assert row["rise"] * row["count"] == pytest.approx(largest, abs=1e-4)
        assert row["count"] == len(of)
        assert row["full"] == pytest.approx(mean([full for _, full, *_ in of]), abs=1e-4)
        assert row["share"] == pytest.approx(row["rise"] * row["count"] / total, abs=1e-5)
        assert row["questions"] == len({place for *_, place, _ in of})
        most = max(of)
        assert (row["most"], row["text"]) == (pytest.approx(most[0], abs=1e-4), f"<{row['token']}>")
        if len(of) == 1:
            assert (row["doc_id"], row["position"]) == (str(most[2]), most[3])
    assert rows[0]["rise"] > 0


def test_no_loss_rises_with_the_full_cache():
    rows = found(build("qwen3"), traces([(45, 40)]), "losses", FULL)
    assert {round(row["rise"], 4) for row in rows} == {0.0}


@pytest.mark.parametrize("hostile", ["\x1b[31m<script>", "a\nb\u202e", '"><img src=x>'])
def test_hostile_tokens_are_text(hostile):
    kind = analyses()["losses"]
    rows = found(build("qwen3"), traces([(45, 40)]), "losses", STREAMING, text=lambda token: hostile)
    [figure] = kind.figures(rows)
    drawn = svg(figure)
    assert "<script" not in drawn
    assert "<img" not in drawn
    shown = " ".join(cell for line in kind.table(rows)[1] for cell in line)
    assert not set(shown) & set("\x1b\n\u202e")
