"""Verdicts and exit codes of comparisons: the same, worse, no worse, undecided, missing, and mixtures of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kvbench.compare import measures, words
from kvbench.compare.matching import parse_map
from kvbench.compare.outcome import Outcome, compare
from kvbench.compare.policy import Policy, Rule
from kvbench.compare.reading import read_runs
from kvbench.errors import SetupError, UserError

NONE = Policy()
OTHER = {"method_source": "bbbb"}  # another state of the method: answers may differ


def drawn(mean: float, questions: int = 30, samples: int = 8, seed: int = 0) -> list[list[float]]:
    draw = np.random.default_rng(seed)
    return draw.binomial(1, mean, (questions, samples)).astype(float).tolist()


def verdicts(outcome: Outcome) -> dict[str, str]:
    return {one.key.method: one.verdict for one in outcome.judged}


def test_identical_runs_pass(side, rows) -> None:
    scores = drawn(0.5)
    outcome = compare(side("a", rows(scores)), side("b", rows(scores)), NONE)
    assert outcome.exit_code == 0
    assert [(one.verdict, one.p, one.tested.together.p_sign_flip) for one in outcome.judged] == [("same", 1.0, 1.0)]
    assert not list(words.failures(outcome)) + list(words.undecided(outcome))


def test_a_drop_is_a_regression(side, rows) -> None:
    outcome = compare(side("a", rows(drawn(0.8))), side("b", rows(drawn(0.5, seed=1), **OTHER)), NONE)
    assert verdicts(outcome) == {"gkv": "worse"}
    assert outcome.exit_code == 5
    [(critical, why)] = words.failures(outcome)
    assert critical
    assert why.startswith("gkv at 48 on walk: the mean score fell by 0.2")


def test_a_rise_is_no_regression(side, rows) -> None:
    outcome = compare(side("a", rows(drawn(0.5, seed=1))), side("b", rows(drawn(0.8), **OTHER)), NONE)
    assert verdicts(outcome) == {"gkv": "better"}
    assert outcome.exit_code == 0


def test_no_worse_than_the_margin(side, rows) -> None:
    base, new = drawn(0.5, 200, 8), drawn(0.5, 200, 8, seed=1)
    outcome = compare(side("a", rows(base)), side("b", rows(new, **OTHER)), Policy(margin=0.1))
    assert verdicts(outcome) == {"gkv": "no worse"}
    assert outcome.exit_code == 0
    assert words.verdict(outcome.judged[0]) == "no worse than 0.1"


def test_undecided_passes_with_a_warning_and_fails_strictly(side, rows) -> None:
    base, new = side("a", rows(drawn(0.5))), side("b", rows(drawn(0.5, seed=1), **OTHER))
    outcome = compare(base, new, NONE)
    assert verdicts(outcome) == {"gkv": "undecided"}
    assert outcome.exit_code == 0
    [warning] = words.undecided(outcome)
    assert warning.startswith("30 questions cannot show a drop smaller than 1")
    assert "80% power" in warning
    strict = compare(base, new, Policy(strict=True))
    assert strict.exit_code == 5
    [(critical, why)] = words.failures(strict)
    assert critical
    assert why.endswith("undecided, and --strict requires a decision.")
    advisory = compare(base, new, Policy(strict=True, rules=(Rule(patterns={}, tier="advisory"),)))
    assert (advisory.exit_code, list(words.failures(advisory))) == (0, [])


def test_five_questions_say_what_they_cannot_see(side, rows) -> None:
    new = rows([1.0] * 5, output_sha256="other", **OTHER)
    outcome = compare(side("a", rows([1.0] * 5)), side("b", new), NONE)
    assert list(words.undecided(outcome)) == ["5 questions cannot show a drop smaller than 67 points at 80% power."]
    assert outcome.exit_code == 0
    fewer = compare(side("c", rows([1.0] * 3)), side("d", new[:3]), NONE)
    assert list(words.undecided(fewer)) == ["3 questions cannot show a drop of any size; at least 5 are needed."]


def test_a_missing_cell_fails(side, rows) -> None:
    both = side("a", rows(drawn(0.5)), rows(drawn(0.5), method="h2o"))
    outcome = compare(both, side("b", rows(drawn(0.5))), NONE)
    assert verdicts(outcome) == {"gkv": "same", "h2o": "missing"}
    assert outcome.exit_code == 4
    back = compare(side("c", rows(drawn(0.5))), both, NONE)
    assert back.exit_code == 0
    assert [key.method for key in back.extra] == ["h2o"]


def test_failed_samples_are_missing(side, rows) -> None:
    new = rows(drawn(0.5))
    new[3] |= {"status": "nan_logits", "score": None, "score_partial": None}
    outcome = compare(side("a", rows(drawn(0.5))), side("b", new), NONE)
    assert verdicts(outcome) == {"gkv": "missing"}
    assert outcome.exit_code == 4
    assert "1 sample has a score in base but none in new" in outcome.judged[0].reasons[0]


def test_an_unfinished_run_is_compared_on_what_it_has(side, rows) -> None:
    scores = drawn(0.5)
    new = side("b", rows(scores)[:100], planned=240)
    outcome = compare(side("a", rows(scores)), new, NONE)
    assert new.unfinished == {"b": "100 of 240 rows"}
    assert outcome.exit_code == 0
    assert outcome.judged[0].tested.together.paired.questions == 13
    assert compare(side("c", rows(scores)), new, Policy(strict=True)).exit_code == 5


def test_a_mixture_fails_for_its_regression(side, rows) -> None:
    """One cell better, one worse, one missing: the regression decides, and each is named."""
    low, high = drawn(0.4), drawn(0.9, seed=1)
    base = side("a", rows(low), rows(high, method="h2o"), rows(low, method="rkv"))
    new = side("b", rows(high, **OTHER), rows(low, method="h2o", **OTHER))
    outcome = compare(base, new, NONE)
    assert verdicts(outcome) == {"gkv": "better", "h2o": "worse", "rkv": "missing"}
    assert outcome.exit_code == 5
    assert len(list(words.failures(outcome))) == 2


def test_holm_counts_the_cells_of_a_tier(side, rows) -> None:
    """A p of 3% is an alarm alone, not among four; advisory cells are a family of their own."""
    fallen = [[0.0]] * 5 + [[1.0]] * 25  # of 30 right ones
    names = ("gkv", "h2o", "rkv", "tova")
    still = [rows([1.0] * 30, method=name, output_sha256=f"{name}2", **OTHER) for name in names[1:]]
    base = side("a", *(rows([1.0] * 30, method=name) for name in names))
    alone = compare(side("b", rows([1.0] * 30)), side("c", rows(fallen, **OTHER)), NONE).judged[0]
    new = side("d", rows(fallen, **OTHER), *still)
    together = compare(base, new, NONE)
    assert alone.verdict == "worse"
    assert together.judged[0].p == pytest.approx(4 * alone.p)
    advisory = Policy(rules=tuple(Rule(patterns={"method": name}, tier="advisory") for name in names[1:]))
    assert compare(base, new, advisory).judged[0].p == pytest.approx(alone.p)


def test_a_margin_of_a_cell_accepts_its_drop(side, rows) -> None:
    base, new = side("a", rows(drawn(0.8, 200))), side("b", rows(drawn(0.7, 200, seed=1), **OTHER))
    assert compare(base, new, NONE).exit_code == 5
    policy = Policy(rules=(Rule(patterns={"task": "wa*", "budget": "48"}, margin=0.3),))
    assert verdicts(compare(base, new, policy)) == {"gkv": "no worse"}


def test_an_advisory_cell_does_not_fail(side, rows) -> None:
    base, new = side("a", rows(drawn(0.8))), side("b", rows(drawn(0.3, seed=1), **OTHER))
    outcome = compare(base, new, Policy(rules=(Rule(patterns={"method": "g*"}, tier="advisory"),)))
    assert verdicts(outcome) == {"gkv": "worse"}
    assert outcome.exit_code == 0
    assert [critical for critical, _ in words.failures(outcome)] == [False]


def test_more_entries_are_a_regression_though_scores_are_the_same(side, rows) -> None:
    scores = drawn(0.5)
    for changes, word in (({"entries_after_evict": 60.0}, "after"), ({"entries_peak": 112.0}, "peak")):
        outcome = compare(side("a" + word, rows(scores)), side("b" + word, rows(scores, **changes)), NONE)
        assert outcome.exit_code == 5
        assert word in outcome.judged[0].reasons[0]
    shorter = compare(side("c", rows(scores, entries_peak=70.0)), side("d", rows(scores)), NONE)
    assert shorter.exit_code == 0  # below budget + interval the peak follows the lengths of answers


def test_a_cell_that_never_evicted_is_no_regression(side, rows) -> None:
    full = {"method": "full", "budget": None, "interval": None, "decode_bounded": False, "entries_after_evict": None}
    base, new = (side(name, rows(drawn(0.5), **full, **state)) for name, state in (("a", {}), ("b", OTHER)))
    outcome = compare(base, new, NONE)
    assert outcome.exit_code == 0
    assert [math.isnan(m.new) for m in outcome.judged[0].measures if m.name == "entries_after_evict"] == [True]


@pytest.mark.parametrize(
    ("was", "word"),
    [({}, "at the peak"), ({"decode_bounded": False, "entries_peak": 120.0}, "after an eviction")],
    ids=["while decoding", "after the prompt"],
)
def test_a_method_that_evicts_no_more_is_a_regression(was, word, side, rows) -> None:
    """Its answers are the full cache's, so its scores are no worse."""
    scores = drawn(0.5)
    never = {"decode_bounded": False, "entries_after_evict": None, "entries_peak": 146.0, "kv_bytes_peak": 90_000}
    outcome = compare(side("a", rows(scores, **was)), side("b", rows([[1.0] * 8] * 30, **OTHER, **never)), NONE)
    assert outcome.exit_code == 5
    assert any(word in reason for reason in outcome.judged[0].reasons)


def test_limits_of_a_policy(side, rows) -> None:
    scores = drawn(0.5)
    base = side("a", rows(scores))
    new = side("b", rows(scores, kv_bytes_peak=60_000, decode_seconds=4.0, stop_reason="length"))
    assert compare(base, new, NONE).exit_code == 5  # stop_reason belongs to the answer: it differs
    listed = Policy(limits={"kv_bytes_peak": 1.1, "tokens_per_second": 0.5, "truncated": 0.05, "no_answer": 0.0})
    reasons = compare(base, new, listed).judged[0].reasons
    assert [reason.split(":")[0] for reason in reasons[1:]] == [
        "KV bytes at the peak", "tokens/s", "share of truncated answers"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "tokens", "entries", "code"),
    [
        ("duo", 100, 110.0, 5),
        ("duo", 100, 70.0, 0),
        ("duo", 108, 144.0, 0),
        ("gone", 108, 144.0, 0),
        ("gone", 100, 81.0, 5),
        ("kvzip", 108, 81.0, 5),
        ("kvzip", 200, 81.0, 5),
        ("kvzip", 90, 80.0, 0),
    ],
)
def test_entries_of_unbounded_methods(method, tokens, entries, code, side, rows) -> None:
    """Each eviction of duo while decoding leaves more entries, so longer answers may have one eviction more. kvzip
    evicts the prompt only; its answers change nothing. "gone" is not installed and may be either."""
    scores = drawn(0.5)
    unbounded = {"method": method, "decode_bounded": False}
    base = side("a", rows(scores, **unbounded, entries_after_evict=80.0, output_tokens=100))
    new = side("b", rows(scores, **unbounded, entries_after_evict=entries, output_tokens=tokens, **OTHER))
    assert compare(base, new, NONE).exit_code == code


def test_later_prompts_hold_earlier_answers(side, rows) -> None:
    """Of prompts that are read anew, more entries stay if they are longer and the budget is a share."""
    scores = drawn(0.5)
    for n, (mode, share, after, code) in enumerate(
        [("reset", 0.5, 90.0, 0), ("keep", 0.5, 90.0, 5), ("reset", None, 90.0, 5), ("reset", 0.5, None, 5)]
    ):
        talks = {"method": "kvzip", "decode_bounded": False, "multi_turn_cache": mode, "budget_share": share}
        base = side(f"a{n}", rows(scores, **talks, entries_after_evict=80.0))
        new = rows(scores, **talks, entries_after_evict=after, entries_peak=200, output_tokens=108, **OTHER)
        assert compare(base, side(f"b{n}", new), NONE).exit_code == code


def test_a_press_without_kvpress_may_be_of_either_kind(monkeypatch, side, rows) -> None:
    def missing(label: str) -> None:
        raise SetupError("kvpress is not installed.")

    monkeypatch.setattr(measures.choose, "from_label", missing)
    base, new = (
        side(name, rows(drawn(0.5), decode_bounded=False, entries_after_evict=entries, output_tokens=tokens, **more))
        for name, entries, tokens, more in (("a", 80.0, 100, {}), ("b", 90.0, 108, OTHER))
    )
    assert compare(base, new, NONE).exit_code == 0


def test_answers_must_be_equal_where_all_that_decides_them_is(side, rows) -> None:
    scores = drawn(0.5)
    new = rows(scores)
    new[11] |= {"output_sha256": "else", "output": "answer X"}
    outcome = compare(side("a", rows(scores)), side("b", new), NONE)
    assert verdicts(outcome) == {"gkv": "differs"}
    assert outcome.exit_code == 5
    first = outcome.judged[0].first
    assert (first.question, first.sample, first.character, first.answers) == ("q1", 3, None, 1)
    changed = {"slots": {"slots": 4}, "source": OTHER, "torch": {"torch_version": "9"}}
    for name, changes in (changed | {"way": {"decoding": "torch compiled"}}).items():
        other = [row | changes for row in new]
        assert compare(side(f"c {name}"[:3] + name, rows(scores)), side("d" + name, other), NONE).exit_code == 0


def test_the_first_character_that_differs_is_named(make_run, rows) -> None:
    scores = drawn(0.5, 3, 2)
    new = rows(scores)
    new[5] |= {"output_sha256": "else", "output": "answer X\x1b[31m"}
    folders = make_run("a", rows(scores)), make_run("b", new)
    outcome = compare(*(read_runs([folder], folder.name) for folder in folders), NONE)
    [reason] = outcome.judged[0].reasons
    assert "the first is question q2, sample 1, character 8:" in reason
    assert "and 'X\\x1b[31m'" in reason


def test_the_order_of_questions_changes_nothing(side, rows) -> None:
    base, new = rows(drawn(0.6)), rows(drawn(0.5, seed=1), **OTHER)
    order = np.random.default_rng(0).permutation(len(base)).tolist()
    straight = compare(side("a", base), side("b", new), NONE)
    mixed = compare(side("c", [base[i] for i in order]), side("d", [new[i] for i in reversed(order)]), NONE)
    for one, other in zip(straight.judged, mixed.judged, strict=True):
        assert replace(one, pairs=()) == replace(other, pairs=())


def test_a_map_compares_two_methods(side, rows) -> None:
    base = side("a", rows(drawn(0.8)), rows(drawn(0.5), method="h2o"))
    new = side("b", rows(drawn(0.8), entries_after_evict=60.0), rows(drawn(0.3, seed=1), method="mine"))
    outcome = compare(base, new, NONE, parse_map(["gkv=mine", "h2o=gkv"]))
    assert verdicts(outcome) == {"gkv": "worse", "h2o": "better"}
    with pytest.raises(UserError, match=r"'b' has no such method or model. Did you mean 'mine'"):
        compare(base, new, NONE, parse_map(["gkv=mien"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.5}, r"gkv at 48 on walk: temperature is 1.0 in a and 0.5 in b; scores are not comparable."),
        ({"task_version": "2"}, "task version is 1 in a and 2 in b"),
        ({"prompt_sha256": "else"}, "prompt and sampling of question 'q0' is [0-9a-f]{12} in a and [0-9a-f]{12} in b"),
        ({"seed": 7}, "seed is '0' in a and '7' in b"),
        ({"interval": 64}, "interval is '32' in a and '64' in b"),
        ({"model": "big"}, "model is 'tiny' in a and 'big' in b.*--map"),
        ({"model_revision": "s"}, "model revision is r in a and s in b"),
        ({"adapter": "mine@0"}, "adapter is none in a and mine@0 in b"),
        ({"task": "chain"}, "'a' and 'b' share no cell: gkv at 48 on walk, against gkv at 48 on chain"),
    ],
)
def test_what_is_not_comparable_is_refused(side, rows, changes, message) -> None:
    base, new = side("a", rows([1.0] * 6)), side("b", rows([1.0] * 6, **changes))
    with pytest.raises(UserError, match=message):
        compare(base, new, NONE)


def test_the_date_of_a_judgement_is_no_difference(side, rows) -> None:
    base, new = (side(day, rows([1.0] * 6, judge=f"j, 2026-01-0{day}, single")) for day in "12")
    assert compare(base, new, NONE).exit_code == 0
    with pytest.raises(UserError, match="judge is j, , single in 1 and k, , single in b"):
        compare(base, side("b", rows([1.0] * 6, judge="k, 2026-01-01, single")), NONE)


def test_a_task_without_shared_questions_is_refused(side, rows) -> None:
    with pytest.raises(UserError, match="a and b share no question of task 'walk'"):
        compare(side("a", rows([1.0, 0.0])), side("b", rows([1.0], doc_id="other")), NONE)
