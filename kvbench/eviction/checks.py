"""Checks of eviction decisions. The results of several checks are read together, because the host waits for the device
at every read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvbench.lazy import torch

MakeError = Callable[[int], Exception]
Noted = list[tuple["torch.Tensor", MakeError]]

_noted: ContextVar[Noted | None] = ContextVar("noted", default=None)
_unread: ContextVar[bool] = ContextVar("unread", default=False)


def refuse(amount: torch.Tensor, error: MakeError) -> None:
    """Raise an error if the number in the tensor `amount` is not 0.

    amount: a tensor with one integer or bool. error: a function that makes the error from this number. Inside a block
    `with gathered()`, the check is delayed until the next call of `read` or the end of the block.
    """
    noted = _noted.get()
    if _unread.get():
        return
    if noted is not None:
        noted.append((amount, error))
    elif value := int(amount):
        raise error(value)


@contextmanager
def gathered() -> Iterator[None]:
    """Delay the checks in a block `with gathered()`, and read their results in one copy from the device at its end.

    A call of `read` inside the block also reads the checks that were delayed until then. The first check that fails
    raises its error. If the block itself ends with an exception, the delayed checks are still read; the error of the
    first check that fails is then raised instead.
    """
    noted: Noted = []
    token = _noted.set(noted)
    try:
        yield
        _read_rest(noted)
    except Exception:
        _read_rest(noted)
        raise
    finally:
        _noted.reset(token)


def _read_rest(noted: Noted) -> None:
    if noted:
        read(noted[0][0].new_zeros(0, dtype=torch.int64))


@contextmanager
def unread() -> Iterator[None]:
    """In a block `with unread()`, `refuse` checks nothing, not even inside `gathered`. This serves code on the meta
    device, where tensors have no values."""
    token = _unread.set(True)
    try:
        yield
    finally:
        _unread.reset(token)


def read(numbers: torch.Tensor) -> torch.Tensor:
    """Copy int64 numbers [n] to the host. The same copy brings the results of the checks that `gathered` has delayed.
    The first of these checks that fails raises its error."""
    waiting = _noted.get() or []
    noted = waiting.copy()
    waiting.clear()
    copy = torch.cat([numbers, *(amount.long().view(1).to(numbers.device) for amount, _ in noted)]).cpu()
    for value, (_, error) in zip(copy[len(numbers) :].tolist(), noted):
        if value:
            raise error(value)
    return copy[: len(numbers)]
