"""Bytes that are missing or wrong: in the journal, in a table, in run.json. F06, F07, F08, F25."""

from __future__ import annotations

import json
import os
import random
import shutil

from faults.stage import NO_WEIGHTS, ROWS, RUN, Stage, scenario, segment_of


@scenario("F06")
def torn_last_record(stage: Stage) -> None:
    run = stage.interrupted()
    segment = segment_of(run)
    whole = segment.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    cuts = [start + 1, (start + len(whole)) // 2, len(whole) - 1]
    for cut in random.Random(6).sample(range(start + 1, len(whole)), stage.repetitions(0)) + cuts:
        os.truncate(segment, cut)
        said = stage.done("run --resume r1 -q").err
        notice = f"warning: {segment.name}: the unfinished record at offset {start} is dropped; its row runs again."
        assert said.splitlines() == [notice], cut
        _check_new_records(stage, 1)
        shutil.rmtree(run)
        segment = segment_of(stage.interrupted())


@scenario("F07")
def flipped_byte_in_the_journal(stage: Stage) -> None:
    dice = random.Random(7)
    for _ in range(4):
        segment = segment_of(stage.interrupted())
        damaged = bytearray(segment.read_bytes())
        starts = [0, *(i + 1 for i, byte in enumerate(damaged) if byte == 10)]
        record = dice.randrange(ROWS - 1)
        damaged[dice.randrange(starts[record], starts[record + 1] - 1)] ^= 1 << dice.randrange(8)
        segment.write_bytes(damaged)
        said = stage.done("run --resume r1 -q").err
        assert f"damaged records are skipped, at offset {starts[record]}" in said
        _check_new_records(stage, 1)
        shutil.rmtree(stage.run_dir)


def _check_new_records(stage: Stage, count: int) -> None:
    """The run was finished by generating so many rows."""
    stage.check_final()
    new = [p for p in (stage.run_dir / "journal").iterdir() if p.name != segment_of(stage.undisturbed).name]
    assert [p.read_bytes().count(b"\n") for p in new] == [count]


@scenario("F08")
def damaged_table(stage: Stage) -> None:
    dice = random.Random(8)
    run = stage.finished()
    for name in ("rows.parquet", "texts.parquet"):
        whole = (run / name).read_bytes()
        place = dice.randrange(4, len(whole))
        flipped = whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        for bad in (flipped, whole[: dice.randrange(len(whole))], b""):
            (run / name).write_bytes(bad)
            question = stage.rows(stage.undisturbed)["doc_id"].iloc[0]
            ended = stage.call("report r1" if name == "rows.parquet" else f"show r1 --sample {question}")
            assert (ended.code, ended.out) == (3, "")
            assert f"{name} is damaged (" in ended.err
            stage.done(stage.typed(ended.err, "repair"))
            stage.check_final()
            stage.done("report r1")


@scenario("F25")
def edited_run_json(stage: Stage) -> None:
    run = stage.interrupted()
    document = json.loads((run / "run.json").read_text())
    document["config"]["grids"][0]["budgets"] = [48]
    (run / "run.json").write_text(json.dumps(document, indent=2))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    other = RUN.replace("--budget 32", "--budget 48")
    for line in ("run --resume r1", RUN, other, "score r1", "score r1 --all", "report r1", "show r1", "repair r1"):
        ended = stage.call(line, NO_WEIGHTS)
        assert (ended.code, ended.out) == (2, ""), (line, ended)
        assert "run.json' was changed by hand" in ended.err
        assert "hash" in ended.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
