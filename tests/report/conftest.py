"""Runs made of invented rows, written through the real store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.store import RunFolder, row_key

BASE: dict[str, Any] = {
    "task": "walk", "task_version": "1", "method_version": "1", "options": {}, "model": "tiny", "seed": 0,
    "interval": 32, "prompt_style": "default", "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
    "dtype": "float32", "status": "ok", "stop_reason": "stop", "prompt_sha256": "p", "output_tokens": 100,
    "decode_bounded": True, "entries_after_evict": 48.0, "entries_peak": 80.0, "entries_mean": 60.0,
    "kv_bytes_peak": 50_000, "kv_bytes_mean": 40_000, "decode_seconds": 1.0, "evict_seconds": 0.25, "floor": 0.1,
    "roofline_share": 0.5, "no_answer": False, "attention": "sdpa",
}  # fmt: skip
FULL = {
    "interval": None, "entries_after_evict": None, "entries_peak": 400.0, "kv_bytes_peak": 200_000, "floor": None,
    "evict_seconds": 0.0, "decode_seconds": 2.5,
}  # fmt: skip
Make = Callable[..., Path]


def _rows(method: str, budget: int | None, scores: list[float], **changes: Any) -> list[dict[str, Any]]:
    """One sample a question; `score_partial` is the headline of walk, `score` is 1 where it is 1."""
    made = []
    for number, score in enumerate(scores):
        row = BASE | (FULL if method == "full" else {}) | {"method": method, "budget": budget} | changes
        row |= {"doc_id": f"q{number}", "sample": 0, "score_partial": score, "score": float(score == 1)}
        identity = {k: row[k] for k in ("task", "doc_id", "method", "budget", "model", "seed", "options", "interval")}
        made.append({**row, "row_key": row_key(identity)})
    return made


@pytest.fixture
def rows() -> Callable[..., list[dict[str, Any]]]:
    return _rows


@pytest.fixture
def make_run(tmp_path: Path) -> Make:
    """make_run("r1", rows(...), rows(...), planned=None, seal=True, **environment) -> the run's folder."""

    def make(
        name: str, *parts: list[dict[str, Any]], planned: int | None = None, seal: bool = True, **environment: Any
    ) -> Path:
        together = [row for part in parts for row in part]
        versions = {"kvbench_version": "0", "torch_version": "0", "transformers_version": "0"} | environment
        count = len(together) if planned is None else planned
        with RunFolder.open(tmp_path / "results", name, {"name": name}, environment=versions, planned=count) as run:
            with run.journal() as journal:
                for row in together:
                    prompt, turns = row.pop("prompt", "a prompt"), row.pop("turns", ())
                    journal.append(row, prompt=prompt, output=row.pop("output", "an output"), turns=turns)
            if seal:
                run.seal()
            return run.path

    return make
