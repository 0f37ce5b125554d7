"""What is found before any work: data that cannot be read, other versions than the run began with. F19, F26."""

from __future__ import annotations

import importlib.metadata
import json

from faults.stage import NO_WEIGHTS, RUN, Stage, scenario
from support.commands import Before, Tell, hold


@scenario("F19")
def malformed_row(stage: Stage) -> None:
    good = [json.dumps({"id": f"q{i}", "question": "1 + 1 = ?", "answer": 2}) for i in range(16)]
    for bad in ('{"question": "?" "answer": 1}', '{"question": "?"', "\x00", '["a list"]'):
        (stage.folder / "bad.jsonl").write_text("\n".join([*good, bad, good[0].replace("q0", "q17")]) + "\n")
        line = "run --method full --task-file bad.jsonl --max-new-tokens 8 -q --run-name r1"
        ended = stage.call(line, NO_WEIGHTS)
        assert (ended.code, ended.out) == (2, ""), ended
        assert "bad.jsonl:17" in ended.err
        assert not stage.run_dir.exists()


@scenario("F26")
def other_versions(stage: Stage) -> None:
    for package in ("torch", "transformers", "kvbench"):
        command = stage.start(RUN.replace("r1", package), hold(stage.folder / "gate", rows=3))
        command.wait_for("holding")
        command.kill()
        run = stage.run_dir.with_name(package)
        was = importlib.metadata.version(package)
        ended = stage.call(f"run --resume {package} -q", _installed(package, "97.5.3"))
        assert (ended.code, ended.out) == (2, ""), ended
        assert f"{package} {was}" in ended.err
        assert "97.5.3" in ended.err
        assert "--allow-version-change" in ended.err
        said = stage.done(f"run --resume {package} -q --allow-version-change", _installed(package, "97.5.3")).err
        assert "97.5.3" in said
        versions = stage.rows(run)[f"{package}_version"]
        assert set(versions) == {was, "97.5.3"}
        report = stage.done(f"report {package}")
        mixed = [line for line in (report.out + report.err).splitlines() if was in line and "97.5.3" in line]
        assert any(package in line for line in mixed), report


def _installed(package: str, version: str) -> Before:
    """Another version of a package."""

    def before(tell: Tell) -> None:
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: version if name == package else real(name)

    return before
