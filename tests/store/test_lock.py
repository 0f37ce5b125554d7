"""Who may run: the faults F09, F12, F13 and F27."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest

from kvbench.errors import RunInUseError, SetupError
from kvbench.store.host import is_alive, slurm_job, start_ticks
from kvbench.store.lock import RunLock

Child = Callable[..., subprocess.Popen[str]]

HOLD = """
import sys, time
from pathlib import Path
from kvbench.store.lock import RunLock
print(RunLock(Path(sys.argv[1]), "r1").acquire(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def owner(path: Path, **changes: Any) -> None:
    """Write a lock file as another process would leave it."""
    lock = RunLock(path, "r1")
    lock.acquire()
    content = json.loads(path.read_text())
    lock.release()
    path.write_text(json.dumps({**content, **changes}))


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_released_lock_leaves_no_file(path: Path) -> None:
    lock = RunLock(path, "r1")
    assert lock.acquire() == []
    assert path.exists()
    lock.release()
    lock.release()
    assert not path.exists()


def test_f09_a_second_runner_is_told_who_runs(path: Path, child: Child) -> None:
    process = child(HOLD, path)
    assert process.stdout is not None
    process.stdout.readline()
    for take_over in (False, True):  # --take-over is for locks that cannot be checked, not for a living owner
        with pytest.raises(
            RunInUseError, match=rf"run 'r1' is in use by process {process.pid} on host \S+ since \d\d:"
        ):
            RunLock(path, "r1").acquire(take_over=take_over)
    assert process.poll() is None
    process.kill()
    process.wait()
    lock = RunLock(path, "r1")
    assert lock.acquire() == [f"taking over run 'r1': process {process.pid} on this host has ended."]
    lock.release()


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_runner(path: Path, child: Child) -> None:
    process = child(
        HOLD.replace("time.sleep", "import os; os.fork() or print(os.getpid(), flush=True); time.sleep"), path
    )
    assert process.stdout is not None
    process.stdout.readline()
    forked = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        lock = RunLock(path, "r1")
        assert "has ended" in lock.acquire()[0]
        lock.release()
    finally:
        os.kill(forked, 9)


def test_f12_a_reused_process_id_is_not_the_owner(path: Path) -> None:
    pid = os.getppid()  # lives, but started at another time than the lock says
    assert is_alive(pid, start_ticks(pid))
    owner(path, pid=pid, ticks=1)
    lock = RunLock(path, "r1")
    assert lock.acquire() == [f"taking over run 'r1': process {pid} on this host has ended."]
    lock.release()


def test_a_living_owner_without_flock_is_respected(path: Path) -> None:
    owner(path, pid=os.getppid(), ticks=start_ticks(os.getppid()))
    with pytest.raises(RunInUseError, match="is in use by process"):
        RunLock(path, "r1").acquire()


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"boot": "another-boot"}])
def test_f13_another_host_must_be_taken_over_by_hand(path: Path, changes: dict[str, str]) -> None:
    owner(path, pid=4242, since=time.time() - 3 * 3600 - 60, **changes)
    with pytest.raises(RunInUseError, match=r"locked by process 4242 on host \S+ for 3 hours.*--take-over") as caught:
        RunLock(path, "r1").acquire()
    assert caught.value.exit_code == 6
    lock = RunLock(path, "r1")
    assert "because --take-over was given" in lock.acquire(take_over=True)[0]
    lock.release()


SLURM = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CLUSTER_NAME": "c"}


@pytest.mark.parametrize(
    ("job", "restarts", "ended"),
    [
        ("12_3@c", 0, True),
        ("12_3@c", 1, True),
        ("12_3@c", 2, False),  # two processes of the same start
        ("12_3@c", 3, False),
        ("12_4@c", 0, False),  # another task of the array
        ("12_3@other", 0, False),
        ("", 0, False),
    ],
)
def test_a_slurm_job_that_was_restarted_has_ended_on_its_former_host(
    job: str, restarts: int, ended: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner(path, host="node7", pid=4242, job=job, restarts=restarts)
    for name, value in (SLURM | {"SLURM_RESTART_COUNT": "2"}).items():
        monkeypatch.setenv(name, value)
    lock = RunLock(path, "r1")
    if not ended:
        with pytest.raises(RunInUseError, match="Give --take-over"):
            lock.acquire()
        return
    said = "taking over run 'r1': Slurm has restarted job 12_3@c, which ended process 4242 on host node7."
    assert lock.acquire() == [said]
    lock.release()


def test_a_lock_says_its_slurm_job(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SLURM, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert slurm_job() == ("", 0)
    monkeypatch.setenv("SLURM_JOB_ID", "15")
    assert slurm_job() == ("15", 0)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    owner(path)
    assert (json.loads(path.read_text())["job"], json.loads(path.read_text())["restarts"]) == ("12_3@c", 0)


def test_a_lock_file_without_a_job_names_its_owner(path: Path) -> None:
    """Such as kvbench wrote before locks had jobs."""
    owner(path, host="elsewhere")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: content[name] for name in ("host", "boot", "pid", "ticks", "since")}))
    with pytest.raises(RunInUseError, match="on host elsewhere"):
        RunLock(path, "r1").acquire()


def test_terminal_escapes_in_a_lock_file_are_shown_escaped(path: Path) -> None:
    owner(path, host="\x1b[2J")
    with pytest.raises(RunInUseError) as caught:
        RunLock(path, "r1").acquire()
    assert str(caught.value).isprintable()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path.symlink_to(precious)
    with pytest.raises(SetupError, match="is a link, where a run needs a file"):
        RunLock(path, "r1").acquire()
    assert precious.read_text() == "mine"


RACE = """
import errno, fcntl, os, sys, time
from pathlib import Path
from kvbench.errors import RunInUseError
from kvbench.store.lock import RunLock
folder = Path(sys.argv[1])
def flock(fd, operation):
    raise OSError(errno.ENOLCK, "no locks")
if sys.argv[2] == "without":
    fcntl.flock = flock
os.fork(), os.fork()  # four processes
won = 0
end = time.monotonic() + 1.0
while time.monotonic() < end:
    lock = RunLock(folder / "lock", "r1")
    try:
        lock.acquire()
    except RunInUseError:
        continue
    inside = os.open(folder / "inside", os.O_CREAT | os.O_EXCL)  # fails when another is in
    os.close(inside)
    os.unlink(folder / "inside")
    lock.release()
    won += 1
print("won" if won else "never", flush=True)
"""


@pytest.mark.parametrize("flock", ["with", "without"])
def test_of_many_that_try_at_once_one_gets_in(flock: str, tmp_path: Path, child: Child) -> None:
    printed, error = child(RACE, tmp_path, flock).communicate()
    assert error == ""
    assert "won" in printed
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize(
    "content", ["{}", "[1]", "\x00", '{"host": 1}', '{"host":"h","boot":"b","pid":1e999,"ticks":null,"since":0}']
)
def test_a_lock_file_that_says_nothing_is_no_owner(content: str, path: Path) -> None:
    path.write_text(content)
    lock = RunLock(path, "r1")
    assert lock.acquire() == []
    lock.release()


def test_a_file_removed_between_opening_and_locking_is_not_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def flock(fd: int, operation: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()  # as its former owner does when it ends just now

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = RunLock(path, "r1")
    lock.acquire()
    assert len(calls) == 2
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()


def test_an_owner_that_was_taken_over_leaves_the_new_lock_alone(path: Path) -> None:
    lock = RunLock(path, "r1")
    lock.acquire()
    path.unlink()
    path.write_text("new owner")
    lock.release()
    assert path.read_text() == "new owner"


class TestWithoutFlock:
    """F27: a network disk that answers ENOLCK."""

    @pytest.fixture(autouse=True)
    def _no_flock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def flock(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)

    def test_f27_the_file_is_the_lock_and_the_user_is_told(self, path: Path) -> None:
        lock = RunLock(path, "r1")
        assert "no flock" in lock.acquire()[0]
        with pytest.raises(RunInUseError, match=f"process {os.getpid()} on host"):
            RunLock(path, "r1").acquire()
        lock.release()
        assert not path.exists()

    def test_a_dead_owner_is_replaced(self, path: Path) -> None:
        pid = dead_pid()
        owner(path, pid=pid)
        lock = RunLock(path, "r1")
        notices = lock.acquire()
        assert notices[0] == f"taking over run 'r1': process {pid} on this host has ended."
        assert "no flock" in notices[1]
        lock.release()

    def test_an_empty_lock_file_is_not_taken_without_being_asked(self, path: Path) -> None:
        path.touch()
        with pytest.raises(RunInUseError, match="an unknown process"):
            RunLock(path, "r1").acquire()
        lock = RunLock(path, "r1")
        assert len(lock.acquire(take_over=True)) == 2
        lock.release()


class TestFilelock:
    """Why the library filelock is not used."""

    def test_it_ends_with_an_error_where_there_is_no_flock(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def flock(fd: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
            filelock.FileLock(path).acquire(timeout=1)

    def test_it_takes_over_from_another_machine_of_the_same_name(self, path: Path) -> None:
        with filelock.SoftFileLock(path):
            _, host, start = path.read_text().split()
        path.write_text(f"{dead_pid()}\n{host}\n{int(start) ^ 1 << 70}\n")  # another boot id
        filelock.SoftFileLock(path).acquire(timeout=4)

    def test_an_owner_killed_before_it_wrote_its_card_blocks_for_ever(self, path: Path) -> None:
        path.touch()
        with pytest.raises(filelock.Timeout):
            filelock.SoftFileLock(path).acquire(timeout=3)
        RunLock(path, "r1").acquire()
