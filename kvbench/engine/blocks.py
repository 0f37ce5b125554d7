"""How many steps the device runs before the host looks at their tokens, and whether these steps must store queries."""

from __future__ import annotations

from collections.abc import Sequence as Many

from kvbench.engine.sequence import Sequence
from kvbench.eviction.trigger import Trigger

LOOK = 8  # most steps before the host looks at their tokens


def block_length(
    sequences: Many[Sequence], trigger: Trigger, look: int, states: bool = False, marks: Many[int] = ()
) -> int:
    """Return how many steps the device runs in one block, at most `look`.

    The block ends at the first tick of any sequence, or when all answers have their maximum length. It also ends when
    a sequence is as many steps before its tick as one of `marks` says. It has 1 step in two cases:

    - A sequence is in a conversation with stop strings: further steps would write entries after the stop string, which
      cannot be removed.
    - A sequence is in any conversation, and layers of the model keep a state (`states`): further steps would change the
      states of a sequence that has ended.
    """
    if any(s.request.conversation and (s.request.stop_strings or states) for s in sequences):
        return 1
    most, clocks = min(look, max(s.ahead for s in sequences)), _clocks(sequences)
    return next((n for n in range(1, most) if any(_ticks(clocks, trigger, n + mark) for mark in (0, *marks))), most)


def stores_newest(sequences: Many[Sequence], trigger: Trigger, width: int, steps: int) -> bool:
    """Return whether the queries and hidden states of the next `steps` steps must be stored.

    A slot has room for the queries and hidden states of its newest `width` tokens; each new token replaces the oldest.
    The steps need not store theirs if later tokens replace all of them before the next tick of any sequence.
    """
    if width == 0 or trigger.growth is None or width >= trigger.growth:
        return width > 0
    clocks = _clocks(sequences)
    return any(_ticks(clocks, trigger, ahead) for ahead in range(1, width + steps))


def _clocks(sequences: Many[Sequence]) -> set[int]:
    """Return the distinct clocks of the sequences. A clock counts the decode steps since the prompt.

    There are few clocks, because sequences that began together have equal clocks.
    """
    return {sequence.clock for sequence in sequences}


def _ticks(clocks: set[int], trigger: Trigger, steps: int) -> bool:
    return any(trigger.due(clock + steps) for clock in clocks)
