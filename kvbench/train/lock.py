"""A lock on the folder of a training, so that no other training writes answers, checkpoints or weights into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.errors import RunInUseError, quote
from kvbench.store.lock import RunLock
from kvbench.train.processes import is_first

LOCK = "lock"


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the lock on a training's folder `out` inside the `with` statement.

    If several processes share the training, only the first one takes the lock. Raises RunInUseError if another training
    holds or may hold the lock, SetupError if the lock file cannot be made.
    """
    if not is_first():
        yield
        return
    lock = RunLock(out / LOCK, out.name)
    try:
        lock.acquire()
    except RunInUseError as error:
        raise RunInUseError(
            f"{quote(out)} is in use by another training. Wait for it to end, or choose another --out. If it ran on "
            f"another machine and has ended, remove {quote(lock.path)}."
        ) from error
    try:
        yield
    finally:
        lock.release()
