"""Budgets as numbers of entries and as shares of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.config.parsers import budget, parse
from kvbench.errors import UserError
from kvbench.eviction.budget import entries, label, order

TAKES = "takes whole tokens per KV head (512) or a share of the prompt (25%)"


@pytest.mark.parametrize(
    ("size", "prompt", "expected"),
    [
        (48, 10, 48),
        (0.25, 200, 50),
        (0.25, 2, 1),
        (0.25, 1, 1),
        (0.5, 5, 3),
        (0.1, 45, 5),
        (1.0, 77, 77),
        (1e-9, 10, 1),
    ],
)
def test_entries_of_a_prompt(size: float, prompt: int, expected: int) -> None:
    assert entries(size, prompt) == expected


def test_labels_are_what_is_typed() -> None:
    assert [label(b) for b in (512, 1, 1.0, 0.25, 0.125, 0.07)] == ["512", "1", "100%", "25%", "12.5%", "7%"]
    assert sorted([0.5, 512, 0.25, 1.0, 1], key=order) == [1, 512, 0.25, 0.5, 1.0]


@given(st.floats(1e-6, 100).map(lambda share: f"{share:.12g}%"))
def test_a_share_survives_its_label(typed: str) -> None:
    share = budget(typed)
    assert isinstance(share, float)
    assert budget(label(share)) == share


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("0.25", f"--budget {TAKES}; got '0.25'. Did you mean 25%?"),
        ("1.5", f"--budget {TAKES}; got '1.5'."),
        ("0%", "--budget 0% keeps nothing; give whole tokens per KV head (512) or a larger share."),
        ("-3%", "--budget -3% keeps nothing; give whole tokens per KV head (512) or a larger share."),
        ("100.1%", "--budget 100.1% is above 100%; use --method full to keep everything."),
        ("nan%", f"--budget {TAKES}; got 'nan%'."),
    ],
)
def test_what_is_no_budget(typed: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse("--budget", budget, typed)
    assert str(caught.value) == message
