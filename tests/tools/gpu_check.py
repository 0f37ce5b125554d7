"""`make gpu-check`: on a machine with a GPU, runs the tests that need it, then measures decoding speeds.

Offline, random weights, under ten minutes: a measurement that no longer fits into the time is named as not run. Writes
results/speed/GPU.md and GPU.json, with the device's name and versions. Exit codes: 0 done; 1 a test or a measurement
failed; 3 no GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 570.0
TESTS_SECONDS = 200.0
LEAST = 30.0  # seconds that a measurement takes at least: loading and compiling
SHAPES = ("qwen3-4b", "r1-distill-qwen-7b")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0", "KVBENCH_NO_PROGRESS": "1"}


@dataclass(frozen=True)
class Speed:
    """One call of `kvbench bench`."""

    shape: str
    method: str
    budget: int
    prompt: int
    sequences: int
    baseline: str = "none"
    more: tuple[str, ...] = ("--device", "cuda", "--dtype", "bfloat16", "--interval", "128", "--new-tokens", "128")

    def command(self) -> list[str]:
        names = ("shape", "method", "budget", "prompt", "sequences", "baseline")
        options = [text for name in names for text in (f"--{name}", str(getattr(self, name)))]
        return [sys.executable, "-m", "kvbench", "bench", *options, "--repeats", "1", *self.more, "--json"]

    def line(self) -> str:
        return " ".join(["kvbench", *self.command()[3:]])


def plan() -> list[Speed]:
    """The measurements, the most telling first. The full cache is measured beside transformers' `generate`."""
    evicting = {budget: [Speed(s, "tova", budget, budget, 96) for s in SHAPES] for budget in (512, 1024, 2048, 4096)}
    full = {n: [Speed(s, "full", 1024, n, 131072 // n, "transformers") for s in SHAPES] for n in (8192, 16384, 32640)}
    order = (evicting[1024], full[32640], evicting[512], full[8192], evicting[4096], full[16384], evicting[2048])
    return [speed for pair in order for speed in pair]


def measure(speeds: Sequence[Speed], deadline: float) -> list[tuple[Speed, dict[str, Any] | str]]:
    """Return each measurement with bench's JSON document, or with the reason why there is none."""
    return [(speed, _measured(speed, deadline - time.monotonic())) for speed in speeds]


def _measured(speed: Speed, seconds: float) -> dict[str, Any] | str:
    if seconds < LEAST:
        return "not run: no time left"
    print(speed.line(), flush=True)
    try:
        done = subprocess.run(
            speed.command(), cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return "not finished: no time left"
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def table(results: Sequence[tuple[Speed, dict[str, Any] | str]]) -> str:
    """Return the measurements as a table in Markdown."""
    lines = [
        "| shape | method | budget | prompt | sequences | kvbench tok/s | generate tok/s | ratio | of the limit |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for speed, found in results:
        budget = "all" if speed.method == "full" else f"{speed.budget:,}"
        cells = [speed.shape, speed.method, budget, f"{speed.prompt:,}", str(speed.sequences)]
        if isinstance(found, str):
            lines.append(f"| {' | '.join(cells)} | {found} | | | |")
            continue
        row = found["rows"][0]
        warm = row["warm"]
        baseline, ratio = (
            ("-", "-") if warm["baseline"] is None else (f"{warm['baseline']:,.0f}", f"{warm['ratio']:.1f}")
        )
        lines.append(
            f"| {' | '.join(cells)} | {warm['kvbench']:,.0f} | {baseline} | {ratio} | {row['roofline_share']:.0%} |"
        )
    return "\n".join(lines)


def tests() -> tuple[bool, str]:
    """Run the tests with the mark cuda; return whether they passed, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=TESTS_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"not finished within {TESTS_SECONDS:.0f} s"
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    if done.returncode:
        print("\n".join(lines[-40:]), file=sys.stderr)
    return done.returncode == 0, lines[-1].strip("= ")


def write(folder: Path, device: str, versions: str, tested: str, results: Any) -> Path:
    """Write the table and bench's documents; return the table's path."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    page = [
        f"# Decoding speed: {device}",
        f"`make gpu-check`, {versions}. Tests with the mark cuda: {tested}.",
        "Random weights, bfloat16, greedy, 128 new tokens, interval 128, the second of two runs in one process.\n"
        "tok/s: of all sequences, reading the prompts included. Of the limit: see [speed.md](../../docs/speed.md).",
        table(results),
        "Commands:",
        "\n".join(f"    {speed.line()}" for speed, _ in results),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    documents = [{"command": speed.line(), "result": found} for speed, found in results]
    (folder / f"{name}.json").write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    return folder / f"{name}.md"


def main() -> int:
    deadline = time.monotonic() + SECONDS
    import torch
    import transformers

    if not torch.cuda.is_available():
        print("gpu-check: this machine has no NVIDIA GPU that torch can use; nothing was measured.", file=sys.stderr)
        return 3
    driver = f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}"
    passed, tested = tests()
    print(f"tests: {tested}", flush=True)
    results = measure(plan(), deadline)
    page = write(ROOT / "results/speed", torch.cuda.get_device_name(), driver, tested, results)
    print(f"{table(results)}\n\nwritten: {page.relative_to(ROOT)}")
    failed = any(isinstance(found, str) and found.startswith("failed") for _, found in results)
    return int(failed or not passed)


if __name__ == "__main__":
    sys.exit(main())
