"""A small run of the built-in model, undivided and in three shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbench.runner.execute import RunResult, execute
from kvbench.runner.shard import Shard
from kvbench.store import manifest
from support.runs import configuration

N = 3
CONFIG = configuration(Path("tiny"), limit=4, samples=2, max_new_tokens=20, slots=3)
ROWS = 3 * 4 * 2  # cells, questions, samples


def run(out: Path, name: str = "r", shard: Shard | None = None, **how: Any) -> RunResult:
    return execute(CONFIG, out=out, run_name=name, shard=shard, notice=lambda text: None, **how)


def rewrite(folder: Path, change: dict[str, Any], **environment: Any) -> None:
    """Write the record of a run anew, with its hashes, as a kvbench elsewhere might have."""
    info = manifest.read(folder) | change
    info["environment"] = {k: v for k, v in (info["environment"] | environment).items() if v is not ...}
    parts = {k: v for k, v in info.items() if k not in ("hash", "hashes")}
    manifest.write(folder, parts | manifest._hashes(parts))
