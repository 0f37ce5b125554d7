"""The length of a block and whether it stores queries, against one question per sequence and step."""

from __future__ import annotations

import random

import pytest

from kvbench.engine.blocks import block_length, stores_newest
from kvbench.engine.sequence import Sequence
from kvbench.eviction.trigger import Every, Never
from kvbench.records import Request


def live(clocks: list[int], left: list[int]) -> list[Sequence]:
    """Return sequences that have taken `clocks` steps and may draw `left` more tokens."""
    requests = [
        Request(task="t", doc_id=str(i), prompt_ids=(1,), samples=(0,), max_new_tokens=n) for i, n in enumerate(left)
    ]
    return [Sequence(r, sample=0, key=0, loaded=None, clock=clock) for r, clock in zip(requests, clocks)]


@pytest.mark.parametrize("trigger", [Every(8), Every(5, after=3), Never()], ids=str)
def test_a_block_ends_at_the_first_tick_and_queries_are_stored_for_ticks_that_read_them(trigger):
    rng = random.Random(0)
    for _ in range(200):
        n, look, width = rng.randint(1, 5), rng.randint(1, 12), rng.randint(0, 9)
        clocks = [rng.choice([3, rng.randint(0, 40)]) for _ in range(n)]
        left = [rng.randint(1, 20) for _ in range(n)]
        sequences = live(clocks, left)
        steps = block_length(sequences, trigger, look)
        ticks = [k for k in range(1, look + 1) if any(trigger.due(clock + k) for clock in clocks)]
        assert steps == min([look, max(left), *ticks])
        marks = rng.sample(range(1, 8), 2)
        marked = [k for k in range(1, look + 1) if any(trigger.due(c + k + mark) for c in clocks for mark in marks)]
        assert block_length(sequences, trigger, look, marks=marks) == min([look, max(left), *ticks, *marked])
        read = any(
            trigger.due(clock + tick)
            for clock in clocks
            for step in range(1, steps + 1)
            for tick in range(step, step + width)  # the stored query is still among the newest `width`
        )
        always = trigger.growth is None or width >= trigger.growth
        assert stores_newest(sequences, trigger, width, steps) == (width > 0 and (always or read))
