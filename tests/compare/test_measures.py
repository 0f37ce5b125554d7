"""Numbers of entries that may follow from the lengths of answers, if the budget bounds them."""

from __future__ import annotations

import pytest

from kvbench.compare import baseline
from kvbench.compare.outcome import compare
from kvbench.compare.policy import Policy

SCORES = [[1.0, 0.0] * 4] * 30
OTHER = {"dtype": "bfloat16"}  # answers may differ


@pytest.mark.parametrize(
    ("after", "answers", "code"),
    [(48.0, "differ", 0), (49.0, "differ", 5), (47.0, "are equal", 5), (44.0, "differ", 0)],
)
def test_entries_after_an_eviction_may_grow_up_to_the_budget(after, answers, code, side, rows) -> None:
    """scope gives a longer answer more entries. Equal answers need equally many."""
    base = side("a", rows(SCORES, method="scope", entries_after_evict=45.0))
    differing = {"output_tokens": 108} if answers == "differ" else {}
    new = side("b", rows(SCORES, method="scope", entries_after_evict=after, **differing, **OTHER))
    assert compare(base, new, Policy()).exit_code == code


@pytest.mark.parametrize("mode", ["reset", "reset (images)", "reset (template)"])
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"entries_peak": 234.0, "output_tokens": 108}, 0),
        ({"entries_after_evict": 90.0, "output_tokens": 108}, 0),
        ({"entries_peak": 234.0}, 5),
        ({"entries_after_evict": 90.0}, 5),
        ({"entries_peak": 234.0, "output_tokens": 108, "multi_turn_cache": "keep"}, 5),
        ({"entries_peak": 234.0, "output_tokens": 108, "budget_share": None}, 5),
    ],
)
def test_shares_of_prompts_that_hold_earlier_answers(mode, changes, code, side, rows, tmp_path) -> None:
    """If every turn is a new prompt, the first turn's share bounds neither number of entries in later turns."""
    talks = {"multi_turn_cache": mode, "budget_share": 0.5, "entries_peak": 193.0}
    same = {name: changes[name] for name in ("multi_turn_cache", "budget_share") if name in changes}
    base, new = side("a", rows(SCORES, **talks | same)), side("b", rows(SCORES, **talks | changes, **OTHER))
    assert compare(base, new, Policy()).exit_code == code
    baseline.write(tmp_path / "a.json", base)
    baseline.write(tmp_path / "b.json", new)
    kept = [baseline.read(tmp_path / name) for name in ("a.json", "b.json")]
    assert compare(*kept, Policy()).exit_code == code


@pytest.mark.parametrize(("after", "code"), [(None, 0), (48.0, 5)])
def test_a_limit_on_the_time_of_evictions_needs_evictions(after, code, side, rows) -> None:
    """The timer's noise in an answer without an eviction is no time of evictions."""
    base, new = (
        side(name, rows(SCORES, entries_after_evict=after, evict_seconds=seconds, **changes))
        for name, seconds, changes in (("a", 1e-5, {}), ("b", 1e-3, OTHER))
    )
    assert compare(base, new, Policy(limits={"evict_share": 5})).exit_code == code
