"""Checks of decisions. The host may read several results at once, so that no decision waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvbench.lazy import torch

MakeError = Callable[[int], Exception]
Noted = list[tuple["torch.Tensor", MakeError]]

_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)


def refuse(amount: torch.Tensor, error: MakeError) -> None:
    """Raise error(amount) unless the integer tensor `amount` [] is 0; inside `with gathered()`, at the block's end."""
    noted = _noted.get()
    if noted is not None:
        noted.append((amount, error))
    elif value := int(amount):
        raise error(value)


@contextmanager
def gathered() -> Iterator[None]:
    """Delay the checks in the block to its end and read them in one copy from the device.

    The first check that fails raises its error.
    """
    noted: Noted = []
    token = _noted.set(noted)
    try:
        yield
        if noted:
            read(noted[0][0].new_zeros(0, dtype=torch.int64))
    finally:
        _noted.reset(token)


def read(numbers: torch.Tensor) -> torch.Tensor:
    """Return the int64 numbers [n] on the host; the same copy reads the checks that `gathered` has noted so far."""
    noted = _noted.get() or []
    copy = torch.cat([numbers, *(amount.long().view(1) for amount, _ in noted)]).cpu()
    for value, (_, error) in zip(copy[len(numbers) :].tolist(), noted):
        if value:
            raise error(value)
    noted.clear()
    return copy[: len(numbers)]
