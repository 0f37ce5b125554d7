"""Readers beside a writer. F28."""

from __future__ import annotations

import json

from faults.stage import RUN, Stage, scenario
from support.commands import hold

from kvbench.store.journal import encode
from kvbench.store.recovery import decode

PLANNED = 10_000


@scenario("F28")
def report_of_a_running_run(stage: Stage) -> None:
    """A run of 10,000 rows stands still in the middle; a second segment ends in the midst of a record."""
    line = RUN.replace("full,knorm", "knorm").replace("--limit 3 --samples 2", "--limit 100 --samples 100")
    run = stage.start(line, hold(stage.folder / "gate", rows=1))
    run.wait_for("holding")
    (own,) = (stage.run_dir / "journal").iterdir()
    record = decode(own.read_bytes().splitlines(keepends=True)[0])
    assert record is not None
    copies = [_copy(record, number) for number in range(4000)]
    (stage.run_dir / "journal" / f"a{own.name}").write_bytes(b"".join(copies)[: -len(copies[-1]) // 2])
    before = {path: path.read_bytes() for path in stage.run_dir.rglob("*") if path.is_file()}
    for _ in range(2):  # says the same each time, and leaves the run alone
        report = stage.call("report r1 --format json")
        assert report.code == 0, report
        assert f"4000 of {PLANNED} rows" in report.err + report.out
        (table,) = json.loads(report.out)["tables"]
        assert {path: path.read_bytes() for path in stage.run_dir.rglob("*") if path.is_file()} == before
        assert table["cells"][0]["samples"] == 4000
    assert f"4000 of {PLANNED} rows" in stage.done("show r1").out
    assert run.running()
    run.kill()


def _copy(record: dict, number: int) -> bytes:
    """The record of another row."""
    row = record["row"] | {"row_key": f"{number:024}", "sample": number % 100, "doc_id": f"orbit-100-{number // 100}"}
    return encode(record | {"row": row | {"cluster_id": row["doc_id"]}})
