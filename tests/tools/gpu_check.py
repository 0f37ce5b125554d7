"""`make gpu-check`: on a machine with a GPU, runs the tests that need it, then measures decoding speeds.

Offline, random weights, under ten minutes (`make gpu-check SECONDS=300`: under five): the table names measurements for
which no time was left. Writes results/speed/GPU.md and GPU.json, with the device's name and versions. Exit codes: 0
done; 1 a test or a measurement failed; 3 no GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 570.0
TESTS_SECONDS = 150.0
TEST_PROCESSES = 12  # at most; most of the tests' time goes into compiling
LEAST = 40.0  # seconds that a measurement takes at least: loading and compiling
GRACE = 15.0  # seconds in which an interrupted call must print what it has measured
SHAPES = ("qwen3-4b", "r1-distill-qwen-7b")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0", "KVBENCH_NO_PROGRESS": "1"}
# For the tests: each of their processes would compile with one thread per core, and compute the reference on the CPU
# with one thread per core; threads of several processes that wait for each other make a test take minutes.
ONE_THREAD = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

COLUMNS = ("shape", "prompt", "system", "sequences", "tok/s", "decode tok/s", "first token", "evicting", "per token")
COLUMNS += ("mean entries", "of the limit", "GPU peak", "attention, of a copy")


@dataclass(frozen=True)
class Call:
    """One call of `kvbench bench`: several systems on one model. All sequences of a load share their prompt."""

    shape: str
    method: str
    budget: str
    prompt: str
    sequences: int
    new_tokens: int
    baseline: str = "none"
    more: tuple[str, ...] = ("--device", "cuda", "--dtype", "bfloat16", "--interval", "128")

    def command(self) -> list[str]:
        names = ("shape", "method", "budget", "prompt", "sequences", "new_tokens", "baseline")
        options = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        shared = ("--samples", str(self.sequences), "--repeats", "1")
        return [sys.executable, "-m", "kvbench", "bench", *options, *shared, *self.more, "--json"]

    def line(self) -> str:
        return " ".join(["kvbench", *self.command()[3:]])


def plan() -> list[Call]:
    """The calls, the most telling first. The full cache is measured beside transformers' own systems."""
    budgets = [Call(shape, "tova", "1024,512,2048,4096", "4096", 96, 256) for shape in SHAPES]
    full = [Call(shape, "full", "1024", "32640,8192,16384", 4, 64, "transformers,continuous") for shape in SHAPES]
    return [*budgets, *full, *(Call(shape, "gkv,rkv,h2o,retention", "1024", "4096", 96, 256) for shape in SHAPES)]


Result = tuple[Call, dict[str, Any] | None, str]


def measure(calls: Sequence[Call], deadline: float) -> Iterator[Result]:
    """Yield each call with bench's JSON document (None: there is none), and why something is missing in it."""
    for call in calls:
        yield call, *_measured(call, deadline - time.monotonic())


def _measured(call: Call, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Make a call that ends within `seconds`; return its document and why it may be missing or incomplete."""
    if seconds < LEAST:
        return None, "not run: no time left"
    print(call.line(), flush=True)
    began = time.monotonic()
    out, told, code = _until(call.command(), seconds, ENVIRONMENT)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    why = "" if code == 0 else "not finished: no time left" if code is None else f"failed: {(told or ['?'])[-1]}"
    return json.loads(out[-1]) if out and out[-1].startswith("{") else None, why


def _until(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[list[str], list[str], int | None]:
    """Run a command; return its lines on stdout and on stderr, and its exit code, None if it was interrupted.

    It gets Ctrl-C GRACE seconds before the end of `seconds`, and may then still print.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | environment
    with subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=_heed, **streams) as process:
        try:
            out, told = process.communicate(timeout=seconds - GRACE)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            code = None
            try:
                out, told = process.communicate(timeout=GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                out, told = process.communicate()
    return out.strip().splitlines(), told.strip().splitlines(), code


def _heed() -> None:
    """Heed Ctrl-C in a process whose parent ignores it, as shells let background jobs do."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def table(results: Sequence[Result]) -> str:
    """Return the measurements as a table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join('---' for _ in COLUMNS)} |"]
    for call, found, why in results:
        for row in found["rows"] if found else ():
            lines.append(f"| {' | '.join([call.shape, format(row['load']['prompt'], ','), *_cells(row)])} |")
        if why:
            known = [call.shape, call.prompt, call.method, str(call.sequences), why]
            lines.append(f"| {' | '.join(known)}{' |' * (len(COLUMNS) - 4)}")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    def shown(form: str, value: float | None, scale: float = 1) -> str:
        return "" if value is None else form.format(value * scale)

    warm, evictions = row["warm"] or {}, row["evictions"] or {}
    return [
        row["system"],
        str(row["decoded"]),
        shown("{:,.0f}", warm.get("rate")),
        shown("{:,.0f}", warm.get("decode")),
        shown("{:.3g} s", row["first_seconds"]),
        shown("{:.1%}", evictions.get("share")),
        shown("{:.3g} µs", evictions.get("us")),
        shown("{:,.0f}", row["entries"]),
        shown("{:.0%}", row["roofline_share"]),
        shown("{:,.1f} GiB", row["peak_bytes"], 2**-30),
        ", ".join(f"{time['backend']} {time['share']:.0%}" for time in row["attention"] if time["share"] is not None),
    ]


def tests(seconds: float) -> tuple[bool, str]:
    """Run the tests with the mark cuda; return whether they passed, and pytest's last line.

    seconds: the most that they may take, unless TESTS_SECONDS is less.
    """
    limit = min(TESTS_SECONDS, seconds)
    command = [sys.executable, "-m", "pytest", "-v", "-m", "cuda", "-p", "no:cacheprovider", "tests/engine"]
    command += ["--durations=10"]
    if importlib.util.find_spec("xdist") is not None:
        processes = min(TEST_PROCESSES, os.cpu_count() or 1)
        command += ["-n", str(processes), "--dist", "worksteal"]  # single tests take far longer than others
    out, told, code = _until(command, limit, ENVIRONMENT | ONE_THREAD)
    lines = out or told or ["pytest printed nothing"]
    if code != 0:
        print("\n".join(lines[-200:]), file=sys.stderr)
    summary = lines[-1].strip("= ")
    return code == 0, summary if code is not None else f"interrupted after {limit - GRACE:.0f} s: {summary}"


def write(folder: Path, device: str, versions: str, tested: str, results: Any) -> Path:
    """Write the table and bench's documents; return the table's path."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    page = [
        f"# Decoding speed: {device}",
        f"`make gpu-check`, {versions}. Tests with the mark cuda: {tested}.",
        "Random weights, bfloat16, greedy, interval 128, one prompt for all sequences, the second of two runs in one\n"
        "process. [speed.md](../../docs/speed.md) says what the columns are.",
        table(results),
        "Commands:",
        "\n".join(f"    {call.line()}" for call, *_ in results),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    documents = [{"command": call.line(), "result": found, "missing": why} for call, found, why in results]
    (folder / f"{name}.json").write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    return folder / f"{name}.md"


def main() -> int:
    deadline = time.monotonic() + (float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
    import torch
    import transformers

    if not torch.cuda.is_available():
        print("gpu-check: this machine has no NVIDIA GPU that torch can use; nothing was measured.", file=sys.stderr)
        return 3
    driver = f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
    passed, tested = tests(deadline - time.monotonic())
    print(f"tests: {tested}", flush=True)
    results: list[Result] = []
    for result in measure(plan(), deadline):
        results.append(result)
        page = write(ROOT / "results/speed", torch.cuda.get_device_name(), driver, tested, results)
    print(f"{table(results)}\n\nwritten: {page.relative_to(ROOT)}")
    failed = any(why.startswith("failed") for *_, why in results)
    return int(failed or not passed)


if __name__ == "__main__":
    sys.exit(main())
