"""The bench runs and counts right; it asserts nothing about speed."""

from __future__ import annotations

import json

from kvbench.runner.bench import Setting, as_json, bench


def test_both_systems_are_measured_in_every_round():
    setting = Setting(new_tokens=24, budget=48, interval=8, sequences=(1, 2), repeats=2, prompt=16)
    rounds: list[str] = []
    results = bench(setting, rounds.append)
    assert len(rounds) == 4
    for row, count in zip(results, (1, 2)):
        assert row.sequences == count
        for state in (row.fresh, row.warm):
            assert state.kvbench > 0
            assert state.baseline is not None
            assert state.ratio == state.kvbench / state.baseline
            assert state.kvbench_spread[0] <= state.kvbench <= state.kvbench_spread[1]
        assert 0 <= row.evict_share < 1
        assert row.roofline_share > 0
    document = json.loads(json.dumps(as_json(setting, results)))
    assert document["setting"]["shape"] == "A"


def test_without_a_baseline():
    [row] = bench(Setting(new_tokens=1, sequences=(2,), repeats=1, prompt=8, baseline="none"))
    assert row.fresh.baseline is row.warm.ratio is None
