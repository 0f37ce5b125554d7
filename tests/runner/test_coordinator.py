"""The coordinator with workers that only say what a script says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.stub_workers import row_of, simulate

from kvbench.console.progress import Progress
from kvbench.errors import KVBenchError, SetupError
from kvbench.runner.jobs import Job
from kvbench.runner.workers import reported
from kvbench.runner.workers.coordinator import Coordinator
from kvbench.runner.workers.executor import Done, Event, Failed, Lost, Noticed, Ready
from kvbench.runner.workers.worker_state import TRIES
from kvbench.store import Journal
from kvbench.store import tail as tail_module
from kvbench.store.tail import JournalTail


@pytest.mark.parametrize("ahead", [1, 3, None])
def test_no_row_is_lost_or_doubled_when_workers_die(tmp_path: Path, ahead: int | None) -> None:
    found = simulate(tmp_path / "run", workers=8, rows=300, job=10, deaths=40, ahead=ahead)
    assert found["deaths"] > 1
    assert found["jobs again"] > 1
    assert (found["lost"], found["doubled"]) == (0, 0)


class Scripted:
    """An executor whose workers say what a script says, an event per call."""

    ahead: int | None = 1

    def __init__(self, size: int, *events: Event) -> None:
        self.size = size
        self.script = list(events)
        self.started: list[str] = []
        self.sent: list[tuple[str, list[Job]]] = []
        self.released: list[str] = []
        self.stopped = False

    def start(self, worker: str) -> None:
        self.started.append(worker)

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        self.sent.append((worker, list(jobs)))

    def release(self, worker: str) -> None:
        self.released.append(worker)

    def events(self, seconds: float) -> Iterator[Event]:
        yield self.script.pop(0)

    def stop(self, seconds: float) -> None:
        self.stopped = True


JOBS = [Job(0, ("aa", "ab")), Job(1, ("ba",))]


def run(folder: Path, executor: Scripted, jobs: Sequence[Job] = JOBS) -> list[str]:
    said: list[str] = []
    labels = ["walk gkv @48", "walk h2o @48"]
    try:
        Coordinator(
            executor,
            folder,
            before=0,
            progress=Progress(quiet=True),
            say=said.append,
            labels=labels,
            state=lambda: "go on so",
        ).run(jobs)
    finally:
        assert executor.stopped
    return said


def test_a_lost_worker_s_job_goes_to_the_next_without_its_saved_rows(tmp_path: Path) -> None:
    class Saves(Scripted):
        def events(self, seconds: float) -> Iterator[Event]:
            if isinstance(self.script[0], Lost):
                with Journal(tmp_path) as journal:
                    journal.append(row_of("aa"))
            yield from super().events(seconds)

    script = (Ready("1"), Lost("1", "killed\x1b by SIGKILL"), Ready("2"), Done("2"), Done("2"))
    executor = Saves(2, *script)
    said = run(tmp_path, executor)
    assert executor.sent == [("1", [JOBS[0]]), ("2", [Job(0, ("ab",))]), ("2", [JOBS[1]])]
    assert executor.started == ["1", "2", "1"]
    assert said == ["worker 1 was lost (killed\\x1b by SIGKILL); 1 row runs again."]


def test_rows_that_lose_every_worker_end_the_run(tmp_path: Path) -> None:
    executor = Scripted(1, *[Ready("1"), Lost("1", "killed by SIGSEGV")] * TRIES)
    with pytest.raises(
        SetupError,
        match=r"3 workers were lost while they generated the same rows of walk gkv @48 .*SIGSEGV.*: go on so\.",
    ):
        run(tmp_path, executor)


def test_workers_that_do_not_start_end_the_run(tmp_path: Path) -> None:
    executor = Scripted(2, *[Lost(worker, "no GPU") for worker in "12" for _ in range(TRIES)])
    with pytest.raises(SetupError, match=r"no worker starts \(the last attempt: no GPU\)"):
        run(tmp_path, executor)


def test_a_worker_that_may_still_start_is_waited_for(tmp_path: Path) -> None:
    events = (
        [Lost("1", "no GPU")] * 2 + [Lost("2", "no GPU")] * 2 + [Lost("1", "no GPU"), Ready("2"), Done("2"), Done("2")]
    )
    executor = Scripted(2, *events)
    run(tmp_path, executor)
    assert executor.started == ["1", "2", "1", "1", "2", "2"]


def test_workers_that_are_lost_before_any_row_end_the_run(tmp_path: Path) -> None:
    """Also where each loss has another job as its first one."""
    jobs = [Job(0, (f"{number:02x}",)) for number in range(40)]
    script = [event for _ in range(2 * TRIES + 1) for event in (Ready("1"), Lost("1", "no licence"))]
    executor = Scripted(2, *script)
    executor.ahead = None
    with pytest.raises(SetupError, match=r"lost (while they generated the same rows|one after the other).*no licence"):
        run(tmp_path, executor, jobs)
    assert len(executor.sent) <= 2 * TRIES + 1


def test_one_worker_that_does_not_start_is_done_without(tmp_path: Path) -> None:
    events = (*[Lost("1", "no GPU")] * TRIES, Ready("2"), Done("2"), Done("2"))
    executor = Scripted(2, *events)
    run(tmp_path, executor)
    assert executor.started.count("1") == TRIES
    assert [worker for worker, _ in executor.sent] == ["2", "2"]


def test_an_error_that_all_would_meet_ends_the_run_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(KVBenchError, match="the judge refuses the key") as raised:
        run(tmp_path, Scripted(2, Ready("1"), Failed("1", "the judge refuses the key", 3)))
    assert raised.value.exit_code == 3


def test_warnings_of_workers_are_passed_on(tmp_path: Path) -> None:
    said = run(tmp_path, Scripted(1, Ready("1"), Noticed("1", "out of memory"), Done("1"), Done("1")))
    assert said == ["out of memory"]


def test_a_worker_is_released_when_no_job_is_left_for_it(tmp_path: Path) -> None:
    """Two jobs start two of three workers; the first one that has no job left ends before the other one."""
    executor = Scripted(3, Ready("1"), Ready("2"), Done("2"), Done("1"))
    run(tmp_path, executor)
    assert executor.started == ["1", "2"]
    assert executor.released == ["2"]


def test_a_worker_that_still_starts_when_the_last_job_is_given_is_released(tmp_path: Path) -> None:
    executor = Scripted(2, Ready("1"), Done("1"), Noticed("1", "still at work"), Done("1"))
    run(tmp_path, executor)
    assert (executor.started, executor.released) == (["1", "2"], ["2"])


def test_a_released_worker_starts_again_for_the_job_of_a_lost_one(tmp_path: Path) -> None:
    events = (Ready("1"), Ready("2"), Done("1"), Lost("2", "killed by SIGKILL"), Ready("1"), Done("1"))
    executor = Scripted(2, *events)
    run(tmp_path, executor)
    assert executor.started == ["1", "2", "1"]
    assert executor.sent == [("1", [JOBS[0]]), ("2", [JOBS[1]]), ("1", [JOBS[1]])]


def test_the_tables_wait_for_rows_that_the_network_disk_shows_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(seconds: float) -> None:
        with Journal(tmp_path) as journal:
            for key in JOBS[0].keys:
                journal.append(row_of(key))

    monkeypatch.setattr(reported.time, "sleep", appear)
    said = run(tmp_path, Scripted(1, Ready("1"), Done("1", 2), Done("1", 0)))
    assert said == ["waiting up to 120 s until the network disk shows 2 rows that workers have saved."]


def test_a_stale_listing_of_the_journal_is_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS does it, the folder's entries show when something about the folder was changed."""
    changed: list[Path] = []
    listing = tail_module.segments_on_disk
    monkeypatch.setattr(tail_module, "segments_on_disk", lambda run_dir: listing(run_dir) if changed else {})
    monkeypatch.setattr(tail_module.os, "chmod", lambda folder, mode: changed.append(folder))
    with Journal(tmp_path) as journal:
        for key in JOBS[0].keys:
            journal.append(row_of(key))
    assert run(tmp_path, Scripted(1, Ready("1"), Done("1", 2), Done("1", 0))) == []
    assert changed == [tmp_path, tmp_path / "journal"]


def test_rows_that_never_appear_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported, "PATIENCE", 0.0)
    with Journal(tmp_path) as journal:
        journal.append(row_of("ba"))  # of an earlier run: it must not be taken for a reported row
    with pytest.raises(SetupError, match=r"lacks 1 row that workers have saved.*Wait a few minutes; go on so"):
        run(tmp_path, Scripted(1, Ready("1"), Done("1", 1), Done("1", 0)))


def test_a_tail_reads_whole_records_that_are_new(tmp_path: Path) -> None:
    def write(*keys: str) -> Path:
        with Journal(tmp_path) as journal:
            for key in keys:
                journal.append(row_of(key), output="a\rb\nc")
            assert journal.segment is not None
            return journal.segment

    write("aa")
    tail = JournalTail(tmp_path)
    segment = write("ab", "ac")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-5])
    tail.read()
    assert tail.statuses == {"ab": "ok"}
    segment.write_bytes(whole)
    write("ad")
    tail.read()
    assert tail.statuses == dict.fromkeys(("ab", "ac", "ad"), "ok")
