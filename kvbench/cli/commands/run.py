"""``kvbench run``: defines the command and its options. `kvbench.cli.start` does the work; ``--help`` does not import
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.cli.options import OPTIONS, takes

EPILOG = """Examples:
  kvbench run --method gkv --budget 64 --interval 32 --task walk
  kvbench run --method full,gkv,h2o --budget 48,25% --interval 32 --task walk,lookup --limit 32 --run-name first
  kvbench run --suite demo
  kvbench run --model Qwen/Qwen3-4B --method rkv --budget 1024 --task aime24 --dry-run
  kvbench run --suite baselines --workers 2
  kvbench run --resume first
"""


@takes(*OPTIONS)
def run(typed: Mapping[str, Any]) -> None:
    """Run methods at budgets on tasks: every method at every budget on every task, on the same questions."""
    from kvbench.cli.start import start

    start(typed)
