"""Shards joined into one run: the rows of an undivided run, whatever happened to the shards."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.final_tables import differences
from support.shards import CONFIG, ROWS, N, rewrite, run

from kvbench.errors import KVBenchError, RunInUseError, SetupError, UserError
from kvbench.runner.join import Joined, join
from kvbench.runner.shard import Shard
from kvbench.runner.shard_folder import common_name, read_shards
from kvbench.store import RunFolder, journal, manifest, read_run
from kvbench.store.cells import counts
from kvbench.store.journal import encode
from kvbench.store.recovery import decode, read_journal

NAMES = tuple(f"r-{number}-of-{N}" for number in range(1, N + 1))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undivided run and the three shards."""
    out = tmp_path_factory.mktemp("made")
    run(out, "whole")
    for number in range(1, N + 1):
        run(out, "r", Shard(N, number))
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy of the shards."""
    for name in NAMES:
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def joined(out: Path, *names: str, said: list[str] | None = None, name: str = "r", **how: bool) -> Joined:
    shards = read_shards([out / one for one in names or NAMES], **how)
    return join(shards, out, name, command=["kvbench", "join"], say=(said if said is not None else []).append, **how)


def segment(run_dir: Path) -> Path:
    [path] = (run_dir / "journal").iterdir()
    return path


def test_the_joined_run_is_the_undivided_run(made: Path, out: Path) -> None:
    said: list[str] = []
    result = joined(out, *reversed(NAMES), said=said)
    assert differences(made / "whole", out / "r") == []
    assert (result.planned, result.statuses, result.missing, said) == (ROWS, {"ok": ROWS}, (), [])
    assert [(str(part.folder.shard), part.rows, part.added) for part in result.parts] == [
        ("1/3", 8, 8), ("2/3", 8, 8), ("3/3", 8, 8),
    ]  # fmt: skip
    info = manifest.read(out / "r")
    assert info["planned"] == ROWS
    assert info["config"] == manifest.read(made / "whole")["config"]
    assert not {"shard", "rows_of_all_shards"} & {*info["environment"]}
    joined_run = read_run(out / "r")
    assert joined_run.progress == f"{ROWS} of {ROWS} rows"
    planned = {plan["hash"]: plan["rows"] for plan in info["environment"]["plans"]}
    assert planned == {cell: statuses.total() for cell, (_, statuses) in counts(joined_run.table).items()}


def test_shards_may_have_used_different_devices(made: Path, out: Path) -> None:
    rewrite(out / NAMES[1], {"config": manifest.plain(CONFIG.stored()) | {"device": "cpu"}})
    assert joined(out).statuses == {"ok": ROWS}
    assert differences(made / "whole", out / "r") == []


def test_shards_may_have_read_equal_data_from_different_folders(out: Path) -> None:
    for name in NAMES:
        tasks = manifest.read(out / name)["environment"]["tasks"]
        place = {"source": "KVBENCH_DATA", "location": f"/{name}/walk.jsonl", "sha256": "ab" * 32, "revision": None}
        tasks = {task: known | {"data": known["data"] | place} for task, known in tasks.items()}
        rewrite(out / name, {}, tasks=tasks, data=f"/{name}")
    assert joined(out).statuses == {"ok": ROWS}


def test_joining_again_adds_nothing(made: Path, out: Path) -> None:
    joined(out)
    before = segment(out / "r").read_bytes()
    assert [part.added for part in joined(out).parts] == [0, 0, 0]
    assert segment(out / "r").read_bytes() == before
    assert differences(made / "whole", out / "r") == []


def test_rows_of_a_missing_shard_are_generated(made: Path, out: Path) -> None:
    result = joined(out, NAMES[0], NAMES[2])
    assert (result.planned, result.statuses.total(), result.missing) == (ROWS, 16, (Shard(N, 2),))
    assert read_run(out / "r").unfinished
    resumed = run(out, "r", resume=True)
    assert (resumed.done, resumed.planned) == (ROWS, ROWS)
    assert differences(made / "whole", out / "r") == []
    assert [part.added for part in joined(out).parts] == [0, 0, 0]


def test_a_killed_shard_is_joined_as_it_is_and_again_when_it_is_finished(made: Path, out: Path) -> None:
    lines = segment(out / NAMES[1]).read_bytes().splitlines(keepends=True)
    segment(out / NAMES[1]).write_bytes(b"".join(lines[:3]) + lines[3][:400])
    for table in ("rows.parquet", "texts.parquet", "seal.json"):
        (out / NAMES[1] / table).unlink()
    said: list[str] = []
    first = joined(out, said=said)
    assert [part.rows for part in first.parts] == [8, 3, 8]
    assert len(said) == 1
    assert said[0].startswith(f"{NAMES[1]}: ")
    assert "unfinished record" in said[0]
    assert len(read_journal(out / NAMES[1]).notices) == 1
    again = run(out, NAMES[1], resume=True)
    assert read_journal(out / NAMES[1]).notices == []  # the row of the unfinished record is saved
    assert (again.done, again.planned) == (8, 8)
    assert differences(made / NAMES[1], out / NAMES[1]) == []
    second = joined(out)
    assert [part.added for part in second.parts] == [0, 5, 0]
    assert differences(made / "whole", out / "r") == []


def test_a_damaged_row_is_told_and_generated_again(made: Path, out: Path) -> None:
    data = bytearray(segment(out / NAMES[0]).read_bytes())
    data[200] ^= 1
    segment(out / NAMES[0]).write_bytes(data)
    said: list[str] = []
    assert joined(out, said=said).statuses.total() == ROWS - 1
    assert len(said) == 1
    assert "damaged records are skipped" in said[0]
    run(out, "r", resume=True)
    assert differences(made / "whole", out / "r") == []


def test_of_two_results_the_first_counts(made: Path, out: Path) -> None:
    record = decode(segment(out / NAMES[0]).read_bytes().splitlines(keepends=True)[0])
    assert record is not None
    record["row"] |= {"score": 0.125, "score_partial": 0.125}
    with open(segment(out / NAMES[2]), "ab") as file:
        file.write(encode(record))
    assert [part.different for part in joined(out).parts] == [0, 0, 1]
    assert differences(made / "whole", out / "r") == []


def test_a_better_record_replaces_a_worse_one(out: Path) -> None:
    """First a failure, then the answer, then the answer scored again; never back."""
    path = segment(out / NAMES[0])
    line = path.read_bytes().splitlines(keepends=True)[0]
    record = decode(line)
    assert record is not None
    key = record["row"]["row_key"]

    def outcome(**changes: object) -> tuple[int, object, object]:
        path.write_bytes(encode(record | {"row": record["row"] | changes}))
        added = joined(out, NAMES[0]).parts[0].added
        row = read_journal(out / "r").entries[key].row
        return added, row["status"], row["score"]

    (out / NAMES[0] / "seal.json").unlink()
    assert outcome(status="oom", score=None) == (1, "oom", None)
    assert outcome(status="unscored", score=None) == (1, "unscored", None)
    assert outcome() == (1, "ok", record["row"]["score"])
    assert outcome(status="oom", score=None) == (0, "ok", record["row"]["score"])
    assert outcome(score_pass=1, score=0.75) == (1, "ok", 0.75)
    assert outcome() == (0, "ok", 0.75)
    assert outcome(status="judge_error", score=None, score_pass=2) == (0, "ok", 0.75)


Change = Callable[[Path], object]
VERSION = {"torch_version": "1.0"}


@pytest.mark.parametrize(
    ("change", "names", "error", "text"),
    [
        (lambda out: None, (*NAMES, NAMES[1]), UserError, "shard 2/3 is given twice"),
        (lambda out: rewrite(out / NAMES[1], {}, shard=...), NAMES, UserError, "'r-2-of-3' is not a shard"),
        (lambda out: rewrite(out / NAMES[1], {}, shard="2/4"), NAMES, UserError, "which all have the same N in I/N"),
        (lambda out: rewrite(out / NAMES[1], {}, shard="8/3"), NAMES, UserError, "must be I/N with I from 1 to N"),
        (lambda out: rewrite(out / NAMES[1], {}, rows_of_all_shards=9), NAMES, UserError, "9 and 24 rows"),
        (
            lambda out: rewrite(out / NAMES[1], {"config": manifest.plain(CONFIG.stored()) | {"seed": 7}}),
            *(NAMES, UserError, "'r-2-of-3' and 'r-1-of-3' are not shards of one run: they have seed 7 and 0"),
        ),
        (lambda out: rewrite(out / NAMES[1], {}, dtype="float16"), NAMES, UserError, "began with number type float32"),
        (lambda out: rewrite(out / NAMES[1], {}, **VERSION), NAMES, UserError, "give --allow-version-change"),
        (lambda out: rewrite(out / NAMES[1], {}, tasks=...), NAMES, SetupError, r"damaged \(it lacks tasks\)"),
        (lambda out: rewrite(out / NAMES[1], {}, plugins=None), NAMES, SetupError, r"damaged \(it lacks plugins\)"),
        (lambda out: edit(out / NAMES[1]), NAMES, UserError, "was changed by hand"),
        (lambda out: segment(out / NAMES[1]).unlink(), NAMES, SetupError, "from which its tables were made"),
        (lambda out: link(out / NAMES[1] / "run.json"), NAMES, SetupError, "is a link"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_one_line(
    out: Path, change: Change, names: tuple[str, ...], error: type[KVBenchError], text: str
) -> None:
    change(out)
    with pytest.raises(error, match=text) as raised:
        joined(out, *names)
    assert "\n" not in str(raised.value)
    assert not (out / "r").exists()


def edit(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"2/3"', '"3/3"'))


def link(path: Path) -> None:
    os.rename(path, path.parent.parent / "moved.json")
    path.symlink_to(path.parent.parent / "moved.json")


def test_after_a_full_disk_the_same_command_goes_on(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(journal, "_datasync", full)
        with pytest.raises(SetupError, match=r"no space left on device\).*\. Free space, then join again\.$"):
            joined(out)
    assert joined(out).statuses.total() == ROWS


def test_shards_of_other_versions_are_joined_when_asked(out: Path) -> None:
    rewrite(out / NAMES[1], {}, **VERSION)
    assert joined(out, allow_version_change=True).statuses.total() == ROWS


def test_a_folder_that_is_another_run_is_refused(out: Path, made: Path) -> None:
    with pytest.raises(UserError, match="is itself shard 1/3 of a run; give another --run-name"):
        joined(out, *NAMES[1:], name=NAMES[0])
    shutil.copytree(made / "whole", out / "other")
    rewrite(out / "other", {"config": manifest.plain(CONFIG.stored()) | {"seed": 7}})
    with pytest.raises(UserError, match="holds a run with seed 7"):
        joined(out, name="other")


def test_a_run_that_is_being_written_is_refused(out: Path, made: Path) -> None:
    joined(out)
    versions = manifest.read(out / "r")["environment"]
    with RunFolder.resume(out, "r", environment=versions), pytest.raises(RunInUseError):
        joined(out)


def test_the_name_of_the_run_is_that_of_its_shards(out: Path) -> None:
    shards = read_shards([out / name for name in NAMES])
    assert common_name(shards) == "r"
    (out / NAMES[1]).rename(out / "q-2-of-3")
    with pytest.raises(UserError, match=r"\('q', 'r'\); give --run-name NAME"):
        common_name(read_shards([out / NAMES[0], out / "q-2-of-3"]))
    (out / NAMES[0]).rename(out / "mine")
    with pytest.raises(UserError, match="give --run-name NAME"):
        common_name(read_shards([out / "mine"]))
