"""Observes a grader and its descendants while a hostile program runs: processes, threads, memory, disk, a port.

`watch` reads ``/proc`` every 20 ms, so it may miss a process or a peak that lasts less than 20 ms. Where memory is
summed over processes, a page that several processes share counts once per process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_SECONDS = 0.02
_SETTLE_SECONDS = 0.5  # a process alive this long after its grader ended counts as a survivor


@dataclass
class Peaks:
    """The highest values seen while a program ran: bytes of memory and disk, numbers of processes and threads.

    shared: growth of the machine's shared memory. listened: whether a connection to the program's port succeeded.
    """

    memory: int = 0
    grader_memory: int = 0
    processes: int = 0
    threads: int = 0
    disk: int = 0
    shared: int = 0
    listened: bool = False


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    state: str
    threads: int
    memory: int


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Let the kernel make this process the parent of all descendants whose own parent has ended, until the `with`
    statement ends. `survivors` finds these descendants.

    When the `with` statement ends, the previous setting returns, because later orphans would stay zombies: only
    `survivors` waits for orphans.
    """
    prctl, set_child_subreaper, get_child_subreaper = ctypes.CDLL(None).prctl, 36, 37
    before = ctypes.c_int()
    prctl(get_child_subreaper, ctypes.byref(before), 0, 0, 0)
    prctl(set_child_subreaper, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(set_child_subreaper, before.value, 0, 0, 0)


def watch(grader: subprocess.Popen[bytes], folder: Path, port: int | None, known: int, seconds: float) -> Peaks:
    """Observe a grader until it ends, and return the peaks; kill the grader's process group after `seconds`.

    folder: the grader's TMPDIR. port: a port on which the program may listen and to which this function tries to
    connect; None: no such port. known: id of a child of this process that is not observed, because it does not belong
    to the grader.
    """
    peaks, before = Peaks(), _shared_memory()
    deadline, looks = time.monotonic() + seconds, 0
    while grader.poll() is None:
        table = _table()
        tree = _below(table, [grader.pid]) | (_below(table, [os.getpid()]) - {grader.pid, known})
        peaks.memory = max(peaks.memory, sum(table[pid].memory for pid in tree))
        peaks.processes = max(peaks.processes, len(tree))
        peaks.threads = max(peaks.threads, sum(table[pid].threads for pid in tree))
        peaks.shared = max(peaks.shared, _shared_memory() - before)
        if grader.pid in table:
            peaks.grader_memory = max(peaks.grader_memory, table[grader.pid].memory)
        if looks % 5 == 0:
            peaks.disk = max(peaks.disk, disk_usage(folder))
        looks += 1
        if port is not None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.1):
                peaks.listened = True
        if time.monotonic() > deadline:
            os.killpg(grader.pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    return peaks


def survivors(known: Iterable[int]) -> list[int]:
    """Wait half a second, kill the processes that outlived the grader, and return the ids of these processes.

    The grader has ended, so every descendant of this process that still runs has outlived the grader. known: ids of
    descendants that do not belong to the grader; they are left alone.
    """
    time.sleep(_SETTLE_SECONDS)
    table = _table()
    alive = [pid for pid in _below(table, [os.getpid()]) - set(known) if table[pid].state != "Z"]
    for pid in alive:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in _below(_table(), [os.getpid()]) - set(known):
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)
    return alive


def disk_usage(folder: Path) -> int:
    """Return how many bytes of disk the files below a folder take, even files whose paths are too long to be opened."""
    total, waiting = 0, [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    while waiting:
        opened = waiting.pop()
        with contextlib.suppress(OSError):
            for name in os.listdir(opened):
                status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                total += 512 * status.st_blocks
                if stat.S_ISDIR(status.st_mode) and len(waiting) < 200:
                    waiting.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened))
        os.close(opened)
    return total


def _shared_memory() -> int:
    match = re.search(r"Shmem:\s+(\d+)", Path("/proc/meminfo").read_text(encoding="ascii"))
    return int(match[1]) << 10 if match else 0


def _table() -> dict[int, _Process]:
    table = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
            table[int(name)] = _Process(int(fields[1]), fields[0], int(fields[17]), int(fields[21]) * _PAGE)
    return table


def _below(table: dict[int, _Process], roots: list[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    descendants: set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in descendants:
                descendants.add(pid)
                waiting.append(pid)
    return descendants
