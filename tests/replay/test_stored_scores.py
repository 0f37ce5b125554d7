"""The stored scores of a run's answers, as replays read them."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from kvbench.replay import correctness


def test_answers_without_a_score_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = pd.DataFrame(
        {
            "task": "walk",
            "method": ["full", "full", "full", "gkv"],
            "doc_id": ["a", "b", "c", "a"],
            "sample": 0,
            "score": [1.0, None, 0.5, 1.0],
            "status": ["ok", "judge_error", "ok", "ok"],
            "note": ["", "no verdict", "", ""],
        }
    )
    monkeypatch.setattr(correctness, "read_rows", lambda folder: rows)
    traces = [SimpleNamespace(request=SimpleNamespace(doc_id=name), sample=0) for name in "abc"]
    said: list[str] = []
    right = correctness.stored_scores(None, "walk", traces, said.append)  # type: ignore[arg-type]
    assert right == {("a", 0): True, ("c", 0): False}
    assert said == [
        "task 'walk': 1 of 3 answers have no score and count neither as right nor as wrong: no verdict (1)."
    ]
