"""Handles the signals that ask the process to end. A signal raises one exception, the user sees one line on stderr, and
the process ends within ten seconds.

    with handled():                                   # once, around everything that a process does
        with phase(lambda: "3 of 9 rows saved; ..."): # the line that the user sees if a signal ends this block
            with shield():                            # a signal in this block takes effect at its end
                ...

The first SIGINT, SIGTERM or SIGHUP raises `Signalled` in the main thread, between two operations of Python. Python runs
signal handlers only in the main thread, which may be inside a matrix product for a minute. A second thread therefore
watches for signals, too. This thread ends the process, with the line and the exit code of the first signal, in two
cases: a second signal comes (`TOGETHER` seconds after the first, or later), or the main thread has not ended the
process within `PATIENCE` seconds. `at_end` registers the clean-up of resources that must not outlive the process, such
as locks and child processes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from kvbench.errors import Interrupted, KVBenchError

PATIENCE = 8.0  # seconds from the first signal until the process ends without waiting for the main thread
TOGETHER = 0.3  # seconds within which several signals count once: timeout(1) signals both the process and its group
SOON = 0.01  # seconds until a discarded exception is raised again
AGAIN = "interrupted before it finished; the same command starts anew."
# Windows has no SIGHUP.
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Signalled(BaseException):
    """Raised when a signal asks this process to end. Signalled is no subclass of Exception, so that no ``except
    Exception`` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def interruption(self, text: str = AGAIN) -> Interrupted:
        return Interrupted(text, 128 + self.number)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle signals while the body of the ``with`` statement runs. `handled` has no effect inside another `handled`,
    after `install`, or outside the main thread."""
    global _handling
    if _handling is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _handling = _Handling()
    try:
        yield
    finally:
        handling, _handling = _handling, None
        handling.close()


def install() -> None:
    """Handle signals until the process ends."""
    global _handling
    if _handling is None:
        atexit.register(_ignore)  # atexit runs the first registered function last
        _handling = _Handling()


@contextlib.contextmanager
def phase(tell: Callable[[], str]) -> Iterator[None]:
    """If a signal ends the body of the ``with`` statement, raise `Interrupted` with the text that `tell` returns.

    `Interrupted` is also raised if a library discarded `Signalled`, the exception of the signal, and the body then
    failed with an exception other than KVBenchError (see `came`). tell: called when `Interrupted` is raised, or when
    the thread that watches for signals ends the process while the body runs.
    """
    _tellers.append(tell)
    try:
        yield
    except Signalled as signalled:
        raise signalled.interruption(tell()) from None
    except Exception as error:
        first = came()
        if first is None or isinstance(error, KVBenchError):
            raise
        raise first.interruption(tell()) from error
    finally:
        _tellers.remove(tell)


def came() -> Signalled | None:
    """Return the `Signalled` of the first signal that this process received; None if it received none.

    A library may discard `Signalled` and then fail in another way. For example, if the signal comes while torch imports
    numpy, torch discards `Signalled` and continues with a part of numpy. Callers therefore treat an unexpected error
    after a signal as an interruption.
    """
    return None if _handling is None or _handling.number is None else Signalled(_handling.number)


@contextlib.contextmanager
def shield() -> Iterator[None]:
    """Postpone the exception that a signal raises (`Signalled`) to the end of the body of the ``with`` statement. The
    thread that watches for signals may still end the process during the body. `shield` has no effect if signals are not
    handled, or outside the main thread."""
    handling = _handling
    if handling is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    handling.shields += 1
    try:
        yield
    finally:
        handling.shields -= 1
        handling.raise_if_due()


def settle() -> None:
    """From now on, let no signal raise an exception: the command has ended, and a late signal must not change the exit
    code. The thread that watches for signals may still end the process."""
    if _handling is not None:
        _handling.shields += 1


def _ignore() -> None:
    """Ignore signals while Python shuts down. Otherwise Python would restore the default handlers, and a signal would
    change the exit code."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def at_end(clean: Callable[[], None]) -> None:
    """Register `clean`, to be called if a signal ends the process. `not_at_end` removes it again."""
    _cleaners[clean] = None


def not_at_end(clean: Callable[[], None]) -> None:
    _cleaners.pop(clean, None)


def say(error: Interrupted, tell: Callable[[Interrupted], None]) -> None:
    """Call the functions registered by `at_end`, then call `tell`, which prints `error` as the line that the user sees
    after a signal. `tell` is not called if the thread that watches for signals has already printed a line."""
    clean_up()
    if _handling is None or _handling.claim():
        tell(error)


def clean_up() -> None:
    """Call the functions registered by `at_end`, newest first."""
    while _cleaners:
        clean, _ = _cleaners.popitem()
        with contextlib.suppress(Exception):
            clean()


class _Handling:
    """The signal handlers and the watching thread. The main thread creates and closes this object."""

    def __init__(self) -> None:
        self.number: int | None = None  # the first signal
        self.shields = 0
        self._raised = False
        self._line = threading.Lock()  # the thread that gets it prints the line and never releases it
        self._closed = False
        self._before: dict[int, Any] = {}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._came = selectors.DefaultSelector()  # select() takes no descriptor above 1023
        self._came.register(self._reader, selectors.EVENT_READ)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._swallowed
        self._watcher = threading.Thread(target=self._watch, name="kvbench-signals", daemon=True)
        self._watcher.start()
        for number in _SIGNALS:
            if number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN:
                continue  # ignored by nohup
            self._before[number] = signal.signal(number, self._receive)

    def claim(self) -> bool:
        return self._line.acquire(blocking=False)

    def raise_if_due(self) -> None:
        if self.number is not None and not self.shields and not self._raised:
            self._raised = True
            raise Signalled(self.number)

    def handles(self) -> tuple[int, ...]:
        return tuple(self._before)

    def close(self) -> None:
        self._raised = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        sys.unraisablehook = self._unraisable
        self._closed = True
        os.write(self._writer, b"\0")
        self._watcher.join()
        self._came.close()
        os.close(self._reader)
        os.close(self._writer)

    def after_fork(self) -> None:
        """In a forked child, give each handled signal its default effect again: the signal ends the child."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook = self._unraisable
        os.close(self._reader)
        os.close(self._writer)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.raise_if_due()

    def _swallowed(self, unraisable: Any) -> None:
        """Handle an exception that Python has discarded, for example in a destructor. If the exception is `Signalled`,
        it is raised again shortly afterwards."""
        if unraisable.exc_type is Signalled and self.number is not None:
            self._raised = False
            again = threading.Timer(SOON, self._again, [self.number])
            again.daemon = True
            again.start()
        else:
            self._unraisable(unraisable)

    def _again(self, number: int) -> None:
        if not self._closed and (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, number)

    def _watch(self) -> None:
        number, first = 0, 0.0
        while not self._closed:
            left = max(0.0, first + PATIENCE - time.monotonic()) if number else None
            came = os.read(self._reader, 64) if self._came.select(left) else None
            asked = [n for n in came or b"" if n in self._before]
            late = time.monotonic() - first > TOGETHER
            if number and not self._closed and (came is None or (asked and late)):
                self._end(number)
            if asked and not number:
                number, first = asked[0], time.monotonic()

    def _end(self, number: int) -> None:
        """End the process from the watching thread, because the main thread does not respond or a second signal came.
        number: the number of the first signal."""
        clean_up()
        if self.claim():
            with contextlib.suppress(Exception):
                text = _tellers[-1]() if _tellers else AGAIN
                os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + text.encode() + b"\n")
        os._exit(128 + number)


_SHOW_CURSOR = b"\r\x1b[?25h"
_forking = threading.local()  # .mask: the signal mask of a thread that forks
_handling: _Handling | None = None
_tellers: list[Callable[[], str]] = []
_cleaners: dict[Callable[[], None], None] = {}


def _before_fork() -> None:
    """Block signals before a fork. In the child they stay blocked until the child has reset its signal handlers.
    Otherwise a signal to the child would reach the parent's watching thread, because parent and child share a pipe."""
    numbers = _handling.handles() if _handling is not None else ()
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    global _handling
    _tellers.clear()
    _cleaners.clear()
    if _handling is not None:
        _handling.after_fork()
        _handling = None
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
