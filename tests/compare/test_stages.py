"""Comparisons in two stages: the second seed, strict first stages, and seeds that repeat answers."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.compare import words
from kvbench.compare.outcome import Outcome, compare
from kvbench.compare.policy import Policy

NONE = Policy()
OTHER = {"method_source": "bbbb"}  # another state of the method: answers may differ


def drawn(mean: float, seed: int = 0) -> list[list[float]]:
    return np.random.default_rng(seed).binomial(1, mean, (30, 8)).astype(float).tolist()


def verdicts(outcome: Outcome) -> dict[str, str]:
    return {one.key.method: one.verdict for one in outcome.judged}


def test_two_stages_need_both_seeds(side, rows) -> None:
    base = side("a", rows(drawn(0.6)), rows(drawn(0.6, seed=5), seed=1))
    fell, fell_again, steady = drawn(0.5, seed=1), drawn(0.45, seed=2), drawn(0.75, seed=6)
    first = side("b", rows(fell, **OTHER))
    pending = compare(base, first, NONE, stages=2)
    assert verdicts(pending) == {"gkv": "undecided"}
    assert pending.judged[0].again
    assert pending.exit_code == 0
    assert "--seed 1" in next(iter(words.undecided(pending)))
    assert compare(base, first, Policy(strict=True), stages=2).exit_code == 5
    both = compare(base, side("c", rows(fell, **OTHER), rows(fell_again, seed=1, **OTHER)), NONE, stages=2)
    assert verdicts(both) == {"gkv": "worse"}
    assert len(both.judged) == 1
    assert both.exit_code == 5
    [stages] = [one.tested.stages for one in both.judged]
    assert both.judged[0].p == pytest.approx(max(stage.p for stage in stages) ** 2)
    cleared = compare(base, side("d", rows(fell, **OTHER), rows(steady, seed=1, **OTHER)), NONE, stages=2)
    assert verdicts(cleared) == {"gkv": "undecided"}
    assert not cleared.judged[0].again
    assert cleared.exit_code == 0


def test_a_strict_first_stage_fails_only_if_it_rejects(side, rows) -> None:
    base = side("a", rows(drawn(0.6)), rows(drawn(0.6, seed=5), seed=1))
    for n, (again, code) in enumerate(((0.55, 0), (0.5, 5))):
        first = compare(base, side(f"b{n}", rows(drawn(again, seed=1), **OTHER)), Policy(strict=True), stages=2)
        assert verdicts(first) == {"gkv": "undecided"}
        assert first.exit_code == code
        said = ["gkv at 48 on walk: undecided, and --strict requires the second run."] * bool(code)
        assert [why for _, why in words.failures(first)] == said


def test_a_cell_of_one_stage_does_not_fail_a_strict_first_stage(side, rows) -> None:
    """The exit code says whether the second seed is needed; only with it, the greedy cell fails too."""
    greedy = {"task": "greedy", "temperature": 0.0}
    strict, same = Policy(strict=True), drawn(0.6)
    base = side("a", rows(same, **greedy), rows(same), rows(drawn(0.6, seed=5), seed=1))
    new = [rows(drawn(0.58, seed=1), **greedy, **OTHER), rows(drawn(0.55, seed=1), **OTHER)]
    first = compare(base, side("b", *new), strict, stages=2)
    assert {one.key.task: (one.verdict, one.again) for one in first.judged} == {
        "greedy": ("undecided", False),
        "walk": ("undecided", False),
    }
    assert first.exit_code == 0
    both = compare(base, side("c", *new, rows(drawn(0.55, seed=7), seed=1, **OTHER)), strict, stages=2)
    assert both.exit_code == 5


@pytest.mark.parametrize(
    ("method", "repeats"),
    [
        ("gkv", True),
        ("full", True),
        ("random", False),
        ("vase", False),
        ("snapkv+random", False),
        ("gone", False),
        ("text-first(base=snapkv)", True),
        ("text-first(base=random)", False),
    ],
)
def test_one_greedy_seed_is_enough_unless_the_method_may_draw(method: str, repeats: bool, side, rows) -> None:
    greedy = {"method": method, "temperature": 0.0}
    one = compare(side("a", rows(drawn(0.6), **greedy)), side("b", rows(drawn(0.5), **greedy, **OTHER)), NONE, stages=2)
    assert one.judged[0].tested.repeats is repeats
    seeds = (rows(drawn(0.6), **greedy), rows(drawn(0.6, seed=5), seed=1, **greedy))
    two = compare(side("c", *seeds), side("d", *seeds), NONE, stages=2)
    assert not two.judged[0].tested.repeats  # the answers of the two seeds differ


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}])
def test_a_seed_that_repeats_answers_is_no_second_stage(changes, side, rows) -> None:
    """p is 4% with one seed; a second test of the same answers would make 0.2% of it, and fail at 22%."""
    fallen = [[0.0]] * 3 + [[1.0]] * 21
    both = [side(name, *(rows(scores, seed=seed, **state, **changes) for seed in (0, 1)))
            for name, scores, state in (("a", [[1.0]] * 24, {}), ("b", fallen, OTHER))]  # fmt: skip
    two = compare(*both, NONE, stages=2)
    one = compare(side("c", rows([[1.0]] * 24)), side("d", rows(fallen, **OTHER)), NONE)
    assert [found.judged[0].p for found in (two, one)] == [pytest.approx(0.0415, abs=1e-4)] * 2
    [line] = words.one_stage(two)
    assert line.startswith("--two-stage tests gkv at 48 on walk in one stage")
    assert not list(words.one_stage(one))
