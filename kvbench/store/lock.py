"""The lock of a run's folder: one process at a time writes to a run.

The owner of the lock is a process. While it lives, it holds flock on the lock file. It also writes a record into the
file: its host, process id and start time. Some network disks keep the flock of a dead owner, or have no flock; the
record is therefore checked, too. If the record names this host and its current boot, then the process id and the start
time tell whether the owner still lives. If the record names this process's Slurm job before its last restart, the owner
has ended: Slurm restarts a job only after it has ended the job or lost the job's host. The lock of any other owner is
taken over only with ``--take-over``: a record with this host's name and another boot may also come from another host of
the same name. Without flock, the lock is the existence of the file, which only one process can create.

If two processes hold the lock nevertheless, rows are generated twice and no row is damaged, because each process writes
its own journal segment.

The library filelock (4.2) does less, as `tests/store/test_lock.py` shows. Its `FileLock` raises an error if the file
system answers ENOLCK. Its `SoftFileLock` takes the lock of a process on another machine without asking, if both
machines have the same name. If a process was killed before it wrote its record, `SoftFileLock` never takes over that
lock.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbench.console import signals
from kvbench.errors import NEW_RUN, RunInUseError, SetupError, bare, counted, quote
from kvbench.store.files import open_plain, reason, remedy
from kvbench.store.host import boot_id, host_name, is_alive, slurm_job, start_ticks
from kvbench.store.strict_json import document

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lock, as the record in the lock file describes it.

    boot: the boot id of its host. ticks: the start time of the process in clock ticks. since: when it took the lock.
    job, restarts: see `slurm_job`.
    """

    host: str
    boot: str
    pid: int
    ticks: int | None
    since: float  # seconds since 1970
    job: str
    restarts: int

    def __str__(self) -> str:
        return f"process {self.pid} on host {bare(self.host)}"


class RunLock:
    """The lock of the run named `run`, held through the lock file at `path`. Not reentrant."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        pid = os.getpid()
        self.me = Owner(host_name(), boot_id(), pid, start_ticks(pid), time.time(), *slurm_job())
        self._fd = -1

    def acquire(self, *, take_over: bool = False) -> list[str]:
        """Take the lock, and return warnings, one line each. take_over: take the lock also if this host cannot tell
        whether the owner still runs.

        Raises RunInUseError if another process holds the lock or may hold it, SetupError if the lock file cannot be
        made.
        """
        signals.at_end(self.release)
        try:
            with signals.shield():
                return self._acquire(take_over)
        except BaseException as error:
            signals.not_at_end(self.release)
            if not isinstance(error, OSError):
                raise
            raise SetupError(
                f"cannot lock run '{self.run}' with the file {quote(self.path)} ({reason(error)}): {remedy(error)}."
            ) from error

    def release(self) -> None:
        """Remove the lock file and release the lock. Does nothing in a forked child, or if this object does not hold
        the lock."""
        with signals.shield():
            if self._fd >= 0 and os.getpid() == self.me.pid:
                if _is_at(self._fd, self.path):
                    self.path.unlink(missing_ok=True)
                _held.discard(self._fd)
                os.close(self._fd)
            self._fd = -1
            signals.not_at_end(self.release)

    def _acquire(self, asked: bool) -> list[str]:
        taken_over: list[str] = []
        while self._fd < 0:
            fd, created = self._open()
            try:
                has_flock = self._flock(fd)
                if not _is_at(fd, self.path):  # the owner removed the file after this process had opened it
                    continue
                owner = _read(fd)
                if owner is not None or (not has_flock and not created):
                    taken_over = [self._take_over(owner, asked)]
                    if not has_flock:  # if two processes take over, the one that creates the new file gets the lock
                        self.path.unlink(missing_ok=True)
                        continue
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(asdict(self.me)).encode(), 0)
                self._fd, fd = fd, -1
            finally:
                if fd >= 0:
                    os.close(fd)
        _held.add(self._fd)
        no_flock = "the file system of the results folder has no flock; the run is locked by its lock file alone."
        return taken_over if has_flock else [*taken_over, no_flock]

    def _open(self) -> tuple[int, bool]:
        """Open the lock file, and return its descriptor and whether this call made the file. Raises SetupError for a
        link to another file."""
        with suppress(FileExistsError):
            return os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o644), True
        try:
            fd = open_plain(self.path, os.O_RDWR)
        except FileNotFoundError:  # its owner has just removed it
            return self._open()
        if os.fstat(fd).st_nlink > 1:
            os.close(fd)
            raise SetupError(
                f"{quote(self.path)} has a second name (a hard link), so it is not a lock file of kvbench. Remove it."
            )
        return fd, False

    def _flock(self, fd: int) -> bool:
        """Take flock on the lock file; return False if the file system has no flock. Raises RunInUseError if another
        process holds the flock."""
        if fcntl is None:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use(_read(fd)) from None
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
            return False
        return True

    def _take_over(self, owner: Owner | None, asked: bool) -> str:
        """Decide whether the lock of `owner` may be taken over, and return the warning to print. owner: None if the
        lock file has no record. asked: whether the user gave --take-over. Raises RunInUseError if the lock must not be
        taken over."""
        if owner is not None and (owner.host, owner.boot) == (self.me.host, self.me.boot):
            if is_alive(owner.pid, owner.ticks):
                raise self._in_use(owner)
            return f"taking over run '{self.run}': process {owner.pid} on this host has ended."
        if owner is not None and owner.job and owner.job == self.me.job and owner.restarts < self.me.restarts:
            return f"taking over run '{self.run}': Slurm has restarted job {bare(owner.job)}, which ended {owner}."
        who = "an unknown process" if owner is None else f"{owner} for {_age(owner.since)}"
        if not asked:
            raise RunInUseError(
                f"run '{self.run}' is locked by {who}; this machine cannot check whether that process still runs. "
                f"Give --take-over if it has ended."
            )
        return f"taking over run '{self.run}', locked by {who}, because --take-over was given."

    def _in_use(self, owner: Owner | None) -> RunInUseError:
        who = "another process" if owner is None else f"{owner} since {_clock(owner.since)}"
        return RunInUseError(f"run '{self.run}' is in use by {who}. Wait for it to end, or {NEW_RUN}.")


def _read(fd: int) -> Owner | None:
    """Return the owner that the record in a lock file names; None if the file has no valid record."""
    try:
        o = document(os.pread(fd, 4096, 0))
        ticks = o["ticks"] and int(o["ticks"])
        job, restarts = str(o.get("job", "")), int(o.get("restarts", 0))
        owner = Owner(str(o["host"]), str(o["boot"]), int(o["pid"]), ticks, float(o["since"]), job, restarts)
    except (ValueError, TypeError, KeyError, OverflowError):
        return None
    return owner if 0 <= owner.since < 2**33 else None


def _is_at(fd: int, path: Path) -> bool:
    """Return whether the file opened as `fd` is still the file at `path`."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except OSError:
        return False


def _age(since: float) -> str:
    seconds = max(0.0, time.time() - since)
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return counted(int(seconds // length), unit)
    return "less than a minute"


def _clock(since: float) -> str:
    day = "" if abs(time.time() - since) < 43200 else "%Y-%m-%d "
    return time.strftime(f"{day}%H:%M", time.localtime(since))


_held: set[int] = set()


def _close_in_child() -> None:
    """Close the lock files in a forked child. Otherwise the child would hold flock after its parent was killed."""
    for fd in _held:
        os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
