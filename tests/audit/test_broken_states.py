"""An engine that treats the states of a hybrid's layers wrongly must be found on the hybrid of the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.audits import Good, verdicts

from kvbench.audit.invariants.subject import Subject, random_subject
from kvbench.engine.cache.recurrent import RecurrentStates
from kvbench.eviction.choose import make


@pytest.fixture
def hybrid(tmp_path: Path) -> Subject:
    torch.set_num_threads(1)
    return random_subject("hybrid", tmp_path)


def test_the_hybrid_has_states_before_an_evicted_layer(hybrid: Subject) -> None:
    assert {state.kind for state in hybrid.loaded.states} == {"conv", "recurrent"}
    assert {state.layer for state in hybrid.loaded.states} == {0}
    assert [g.index for g in hybrid.loaded.geometry if g.evicts] == [1]


@pytest.mark.parametrize("name", ["gkv", "speckv"])
def test_an_engine_that_is_right(hybrid: Subject, name: str) -> None:
    assert verdicts(make(name, {}), hybrid) == (set(), [])


def test_an_engine_that_forgets_the_states_of_the_prompt(hybrid: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentStates, "install", lambda *a: None)
    names, failed = verdicts(Good(), hybrid)
    assert {"oracle", "leak", "past"} <= names
    assert any("logits differ from those of a pass without a cache" in c.reason for c in failed)


def test_an_engine_that_installs_the_states_in_all_slots(hybrid: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    install = RecurrentStates.install

    def everywhere(self, source, row, rows):  # type: ignore[no-untyped-def]
        install(self, source, row, torch.arange(len(next(iter(self.each()))[-1])))

    monkeypatch.setattr(RecurrentStates, "install", everywhere)
    names, _ = verdicts(Good(), hybrid)
    assert "oracle" in names


def test_an_engine_whose_probes_leave_a_trace_in_the_states(hybrid: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentStates, "copy", lambda self, rows=None: self)
    names, _ = verdicts(make("speckv", {}), hybrid)
    assert "oracle" in names
