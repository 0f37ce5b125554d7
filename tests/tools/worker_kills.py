"""Kills workers with kill -9 at random moments, and compares what the run wrote with a run of one process.

Each round is a run of the real command line with several workers, in which workers are killed at random moments until
the run ends. If it ends with an error, the same command continues it. In the end rows.parquet and texts.parquet must
equal those of a run of one process: bit by bit and in the same order, apart from the columns that state time.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.final_tables import differences

SILENT: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
RUN = "run --suite demo --limit 24 -q"
EPILOG = """examples:
  python tests/tools/worker_kills.py                           # 20 kills of 2 workers
  python tests/tools/worker_kills.py --workers 3 --kills 5
"""


def main() -> int:
    """Print a Markdown row per round. Returns 1 if a round's tables differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20, help="over all rounds")
    parser.add_argument("--pause", type=float, default=15.0, help="most seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", default=RUN, help=f"the command; default: {RUN}")
    given = parser.parse_args()
    rng, kills, different = random.Random(given.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, "-m", "kvbench", *shlex.split(given.run), "--out", str(out)]
        subprocess.run([*command, "--workers", "1", "--run-name", "alone"], check=True, stdout=subprocess.DEVNULL)
        print("| round | workers | kills | exit codes | tables that differ |\n| ---: | ---: | ---: | ---: | --- |")
        number = 0
        while number == 0 or kills < given.kills:
            number += 1
            name = f"round-{number}"
            more = ["--workers", str(given.workers), "--run-name", name]
            here, codes = 0, list[int]()
            while codes[-1:] != [0]:  # a run ends with an error if three workers in a row were killed before a new row
                with subprocess.Popen(
                    [*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ) as process:
                    here += disturb(process, rng, given.kills - kills - here, given.pause)
                codes.append(process.returncode)
            kills += here
            found = differences(out / "alone", out / name)
            different += bool(found)
            ends = ", ".join(map(str, codes))
            print(f"| {number} | {given.workers} | {here} | {ends} | {', '.join(found) or 'none'} |", flush=True)
    return int(different > 0)


def disturb(process: subprocess.Popen[bytes], rng: random.Random, most: int, pause: float) -> int:
    """Kill random workers of a run at random moments until the run ends; return how many were killed."""
    kills = 0
    while kills < most:
        try:
            process.wait(rng.uniform(0.0, pause))
            break
        except subprocess.TimeoutExpired:
            kills += kill(process.pid, rng)
    process.wait()
    return kills


def kill(coordinator: int, rng: random.Random) -> bool:
    """Kill a random worker; return whether there was one."""
    try:
        workers = [child for child in psutil.Process(coordinator).children() if "workers" in " ".join(child.cmdline())]
        if workers:
            rng.choice(workers).kill()
            return True
    except psutil.NoSuchProcess:
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    sys.exit(main())
