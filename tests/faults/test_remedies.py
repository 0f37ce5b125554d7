"""What a failed write advises, and the commands that it names."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path

import pytest
from faults.stage import ROWS
from support.commands import Before, Command, Tell, end_all

from kvbench.errors import SetupError
from kvbench.store import Journal, RunFolder, journal, read_run, tables
from kvbench.store.again import repair_command, resume_command

ADVICE = {
    errno.ENOSPC: "free space, then",
    errno.EDQUOT: "free space or ask for a larger quota, then",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), then",
    errno.ESTALE: "see that the network disk is mounted and answers, then",
    errno.EIO: "check the disk, then",
    errno.EROFS: "see that the folder can be written, then",
}


def failing(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", ADVICE, ids=errno.errorcode.get)
def test_the_advice_fits_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    versions = {"kvbench_version": "0", "torch_version": "0", "transformers_version": "0"}
    row = {"row_key": "k", "task": "walk", "doc_id": "q", "sample": 0, "method": "full", "status": "ok"}
    out = tmp_path / "my runs"
    with RunFolder.open(out, "r1", {}, environment=versions) as run:
        with run.journal() as segment:
            segment.append(row)
        monkeypatch.setattr(tables, "write_rows", failing(number))
        with pytest.raises(SetupError) as caught:
            run.seal()
        assert ADVICE[number] + f" run kvbench repair r1 --out {shlex.quote(str(out))}." in str(caught.value)
    monkeypatch.setattr(journal, "_datasync", failing(number))
    with Journal(run.path) as segment, pytest.raises(SetupError) as caught:
        segment.append(row)  # the first record is committed at once
    advice = ADVICE[number][0].upper() + ADVICE[number][1:]
    assert f"{advice} continue with {resume_command(run.path)}." in str(caught.value)


def test_commands_name_the_folder_where_it_is_not_the_usual_one() -> None:
    assert repair_command(Path("results/r1")) == "kvbench repair r1"
    assert repair_command(Path("/data/my runs/r1")) == "kvbench repair r1 --out '/data/my runs'"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
def test_the_printed_repair_is_typed_as_it_is(undisturbed: Path, tmp_path: Path, number: int) -> None:
    """A disk that fails when the tables are put in place, then a disk that does not."""
    out = tmp_path / "my runs"
    run = Path(shutil.copytree(undisturbed, out / "r1"))
    failed = Command(f"repair r1 --out '{out}'", cwd=tmp_path, before=_no_tables(number)).end()
    advice, _, typed = failed.err.rstrip().rstrip(".").rpartition("kvbench ")
    assert (failed.code, typed) == (3, f"repair r1 --out {shlex.quote(str(out))}"), failed
    assert ADVICE[number] in advice
    assert not read_run(run).sealed
    repaired = Command(typed, cwd=tmp_path).end()
    assert repaired.code == 0, repaired
    assert (read_run(run).sealed, len(read_run(run).rows)) == (True, ROWS)
    end_all()


def _no_tables(number: int) -> Before:
    def before(tell: Tell) -> None:
        os.replace = failing(number)

    return before
