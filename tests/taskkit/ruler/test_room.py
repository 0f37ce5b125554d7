from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.ruler import room

from kvbench.errors import UserError
from kvbench.taskkit.ruler.fit_length import DRAWS, largest, shuffled
from kvbench.taskkit.ruler.recipes import Filled


@pytest.mark.parametrize("best", [3, 4, 57, 99, 100])
def test_largest(best: int):
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= best

    assert largest(fits, 3, 100) == best
    assert len(asked) == len(set(asked)) <= 7
    assert largest(lambda size: False, 3, 100) is None


def test_haystack_size():
    def size(tokens: Callable[[int], int], length: int, new_tokens: int, extra: int) -> int:
        return room("vt", length, new_tokens=new_tokens).size(lambda s: prompt(tokens(s) - 1), 5, extra=extra)

    assert size(lambda size: 10 * size, 1000, 90, 5) == 90
    assert size(lambda size: 10 * size, 1000, 900, 95) == 5  # none fits: the least
    assert size(lambda size: 100 + size, 400, 0, 0) == 57  # the search ends at 3 x estimate


@pytest.mark.parametrize("count", [0, 1, 2, 17, 300])
def test_shuffled_is_the_seeded_shuffle(count: int):
    expected = [f"item {i}" for i in range(count)]
    given = tuple(expected)
    random.Random(42).shuffle(expected)
    assert shuffled(given) == expected


def prompt(words: int) -> Filled:
    return Filled(context="word " * words, question="?", answer_prefix="", outputs=("x",))


def test_fit_shrinks_step_by_step():
    made: list[int] = []

    def build(size: int) -> Filled:
        made.append(size)
        if size == 13:
            raise ValueError  # too little hay
        return prompt(10 * size)

    row = room("vt", 100, wrapping=9, new_tokens=29).fit(build, 23, 5)
    assert made == [23, 18, 13, 8, 3]
    assert (row.prompt, row.tokens, row.needle_at) == (prompt(30), 69, None)


def test_fit_draws_the_smallest_again_then_gives_up():
    draws = iter([prompt(90), prompt(95), prompt(80), prompt(70)])
    assert room("vt", 100, new_tokens=10).fit(lambda size: next(draws), 9, 5).tokens == 91
    made: list[int] = []

    def build(size: int) -> Filled:
        made.append(size)
        return prompt(600 + size)

    with pytest.raises(UserError) as caught:
        room("vt", 100, wrapping=20).fit(build, 9, 5)
    assert made == [9] + [4] * DRAWS
    assert str(caught.value) == (
        "task 'vt' does not fit into 100 tokens with this tokenizer; the shortest prompt with its answer takes 655. "
        "Give the task a greater length, such as @1024."
    )


def test_a_longer_length_is_advised():
    assert "such as @8192." in str(room("vt", 4096).too_short(4000))
    assert "such as @16384." in str(room("vt", 4096).too_short(9000))
