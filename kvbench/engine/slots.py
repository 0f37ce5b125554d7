"""Which sequence is in which slot, and the token that each slot reads next."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

from kvbench.engine.sequence import Sequence


class Slots:
    """The slots of a cache: per slot its sequence and the token it reads next. An idle slot reads token 0."""

    def __init__(self, count: int) -> None:
        self.sequences: list[Sequence | None] = [None] * count
        self.inputs = [0] * count

    def live(self) -> list[tuple[int, Sequence]]:
        """Return the slots in use, with their sequences."""
        return [(slot, sequence) for slot, sequence in enumerate(self.sequences) if sequence is not None]

    def free(self) -> list[int]:
        return [slot for slot, sequence in enumerate(self.sequences) if sequence is None]

    def of(self, slots: Sequenced[int]) -> list[tuple[int, Sequence]]:
        """Return those of `slots` that are in use, with their sequences."""
        return [(slot, sequence) for slot in slots if (sequence := self.sequences[slot]) is not None]

    def seat(self, slot: int, sequence: Sequence) -> None:
        """Put a sequence in a slot, or keep it there. It reads its next pending token, else its last drawn token."""
        self.sequences[slot] = sequence
        self.inputs[slot] = sequence.pending.popleft() if sequence.pending else sequence.tokens[-1]

    def clear(self, slot: int) -> None:
        self.sequences[slot], self.inputs[slot] = None, 0
