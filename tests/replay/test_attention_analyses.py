"""Persistence, unions of windows and heat maps against a slow computation of their definitions."""

from __future__ import annotations

from collections import defaultdict

import pytest
from support.analyses import dense, found, mean, most_attended
from support.models import build
from support.traces import traces

from kvbench.replay.analyses import persistence as persistence_module
from kvbench.replay.analyses.api import analyses
from kvbench.replay.analyses.maps import LAYERS, SIDE, _spread


def group_mean(weights, head):
    """Attention [T, T] of one KV head of two query heads."""
    return weights[2 * head : 2 * head + 2].mean(dim=0)


def test_persistence_of_every_head(monkeypatch):
    """59 queries are 4 windows, so that with 16 anchors every fourth query is one."""
    monkeypatch.setattr(persistence_module, "ANCHORS", 16)
    loaded, asked = build("qwen3"), traces([(45, 60), (30, 60)])
    wanted = defaultdict(list)
    for trace in asked:
        start, end = len(trace.prompt), len(trace.prompt) + 59
        for layer, weights in dense(loaded, trace).items():
            for head in range(2):
                paid = group_mean(weights, head)
                for anchor in range(start, end, 4):
                    before = most_attended(paid[anchor, : anchor + 1].tolist())
                    for steps in (1, 2, 4, 8, 16, 32):
                        if anchor + steps < end:
                            later = most_attended(paid[anchor + steps, : anchor + steps + 1].tolist())
                            chance = sum(j <= anchor for j in later) / (anchor + 1)
                            wanted[layer, head, steps].append((len(before & later) / len(before), chance))
    rows = {(r["layer"], r["head"], r["steps"]): r for r in found(loaded, asked, "persistence")}
    assert rows.keys() == wanted.keys()
    for key, row in rows.items():
        assert row["pairs"] == len(wanted[key])
        for name, values in zip(("persistence", "chance"), zip(*wanted[key])):
            assert row[name] == pytest.approx(mean(values), abs=1e-3)


def best(paid, share):
    """The tokens among the `share` with the most attention, at least one."""
    order = sorted(range(len(paid)), key=lambda j: -paid[j])
    return {token for place, token in enumerate(order) if place / len(paid) < share}


def test_union_of_the_windows_before_the_last():
    """59 queries are three whole windows; the eleven after them do not count."""
    loaded, asked = build("qwen3"), traces([(45, 60), (30, 60)])
    wanted = defaultdict(list)
    for trace in asked:
        start = len(trace.prompt)
        for layer, weights in dense(loaded, trace).items():
            heads = defaultdict(list)
            for head in range(2):
                of = [
                    group_mean(weights, head)[first : first + 16].mean(dim=0).tolist() for first in (start, start + 16)
                ]
                last = group_mean(weights, head)[start + 32 : start + 48].mean(dim=0).tolist()[: start + 16]
                for percent in range(5, 100, 5):
                    share = percent / 100
                    now, before = best(last, share), best(of[1][: start + 16], share)
                    union = before | best(of[0][:start], share)
                    figures = len(now & before) / len(now), len(now & union) / len(now), len(union) / (start + 16)
                    heads[share].append(figures)
            for share, figures in heads.items():
                wanted[layer, share].append([mean(values) for values in zip(*figures)])
    rows = found(loaded, asked, "union")
    assert {(r["layer"], r["kept"]) for r in rows} == set(wanted)
    for row in rows:
        values = [mean(column) for column in zip(*wanted[row["layer"], row["kept"]])]
        assert [row[name] for name in ("before", "union", "size")] == pytest.approx(values, abs=0.02)  # near ties
        assert row["union"] >= row["before"]


def test_a_map_of_the_first_answer():
    """80 queries in stretches of 3, and 126 tokens in stretches of 4."""
    loaded, asked = build("qwen3"), traces([(46, 81), (30, 20)])
    rows = found(loaded, asked, "maps")
    weights = dense(loaded, asked[0])
    sums = defaultdict(float)
    for layer, of in weights.items():
        for head in range(2):
            paid = group_mean(of, head)
            for query in range(46, 126):
                i = (query - 46) // 3
                for token in range(query + 1):
                    sums[layer, head, i, token // 4] += float(paid[query, token]) / min(3, 80 - 3 * i)
    assert len(rows) == 3 * 2 * 27 * 32
    for row in rows:
        key = row["layer"], row["head"], row["row"], row["column"]
        assert row["share"] == pytest.approx(sums[key], abs=1e-5)
        assert (row["query"], row["token"], row["doc_id"]) == (46 + 3 * row["row"], 4 * row["column"], "0")
    by_row = defaultdict(float)
    for row in rows:
        by_row[row["layer"], row["head"], row["row"]] += row["share"]
    assert all(total == pytest.approx(1.0) for total in by_row.values())


def test_a_map_has_few_squares_and_panels():
    [row, *_] = rows = found(build("qwen3"), traces([(10, 200)]), "maps")
    assert max(r["row"] for r in rows) < SIDE > max(r["column"] for r in rows)
    [figure] = analyses()["maps"].figures([r | {"layer": layer} for layer in range(9) for r in rows if r["layer"] == 0])
    panels = {square["panel"] for square in figure.spec["data"]["values"]}
    assert len(panels) == LAYERS * 2
    assert row["share"] > 0
    assert (_spread(range(9), 4), _spread([3, 5], 4)) == ({0, 2, 4, 6}, {3, 5})
