"""How many steps the device runs before the host looks at their tokens, and whether these steps must store queries
and hidden states."""

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

    - A sequence is in a conversation with stop strings: further steps could write entries after a stop string, and the
      cache could not remove these entries.
    - A sequence is in any conversation, and layers of the model keep a state (`states`): further steps would change the
      states of a sequence that has ended.
    """
    if any(s.request.conversation and (s.request.stop_strings or states) for s in sequences):
        return 1
    most = min(look, max(s.ahead for s in sequences))
    clocks = {s.clock for s in sequences}  # few, because sequences that began together have equal clocks
    return next((n for n in range(1, most) if any(_ticks(clocks, trigger, n + mark) for mark in (0, *marks))), most)


def stores_newest(sequences: Many[Sequence], trigger: Trigger, width: int, steps: int) -> bool:
    """Return whether the queries and hidden states of the next `steps` steps must be stored.

    A slot has room for the queries and hidden states of its newest `width` tokens; each new token replaces the oldest.
    False if `width` is 0, or if later tokens replace all tokens of these steps before any sequence has a tick.
    """
    if width == 0 or trigger.growth is None or width >= trigger.growth:
        return width > 0
    clocks = {s.clock for s in sequences}
    return any(_ticks(clocks, trigger, ahead) for ahead in range(1, width + steps))


def _ticks(clocks: set[int], trigger: Trigger, steps: int) -> bool:
    """Return whether a sequence with one of these clocks has a tick after `steps` more steps."""
    return any(trigger.due(clock + steps) for clock in clocks)
