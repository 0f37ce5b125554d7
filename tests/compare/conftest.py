"""Runs made of invented rows, in two sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.compare.cell import Side
from kvbench.compare.reading import COLUMNS, of_tables
from kvbench.store import RunFolder, row_key
from kvbench.store.frames import to_table
from kvbench.store.schema import check_row

ROW: dict[str, Any] = {
    "task": "walk", "task_version": "1", "method": "gkv", "method_version": "1", "method_source": "aaaa", "options": {},
    "budget": 48, "model": "tiny", "model_revision": "r", "seed": 0, "interval": 32, "prompt_style": "default",
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 300, "dtype": "float32",
    "device": "cpu", "slots": 8, "status": "ok", "stop_reason": "stop", "prompt_sha256": "p", "output_tokens": 100,
    "decode_bounded": True, "entries_after_evict": 48.0, "entries_peak": 80.0, "kv_bytes_peak": 50_000,
    "kv_bytes_mean": 40_000, "decode_seconds": 1.0, "evict_seconds": 0.25, "no_answer": False, "attention": "sdpa",
    "tokens_per_second": 80.0, "kvbench_version": "0", "torch_version": "0", "transformers_version": "0",
}  # fmt: skip
SAME_MACHINE = {
    "kvbench_version": "0", "torch_version": "0", "transformers_version": "0", "threads": 1, "git": "abc", "chunk": 512,
    "machine": {"processor": "X", "cores": 1, "memory_bytes": 1, "platform": "Linux"},
}  # fmt: skip
Rows = list[dict[str, Any]]


def _rows(scores: list[float] | list[list[float]], **changes: Any) -> Rows:
    """A row for each score; a list in `scores` has the samples of one question. Equal scores have equal outputs."""
    made = []
    for number, samples in enumerate(scores):
        for sample, score in enumerate(samples if isinstance(samples, list) else [samples]):
            row = ROW | {"doc_id": f"q{number}", "sample": sample, "score_partial": score, "score": float(score == 1)}
            row |= {"output": f"answer {score}", "output_sha256": f"{score}"} | changes
            names = ("task", "doc_id", "sample", "method", "budget", "model", "seed", "options", "interval")
            made.append({**row, "row_key": row_key({name: row[name] for name in names})})
    return made


@pytest.fixture
def rows() -> Callable[..., Rows]:
    return _rows


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run("r1", rows(...), planned=None, **environment) -> the run's folder."""

    def make(name: str, *parts: Rows, planned: int | None = None, **environment: Any) -> Path:
        together = [dict(row) for part in parts for row in part]
        count = len(together) if planned is None else planned
        record = SAME_MACHINE | environment
        with RunFolder.open(
            tmp_path / "results", name, {"name": name, "prefill_chunk": 512}, environment=record, planned=count
        ) as run:
            with run.journal() as journal:
                for row in together:
                    journal.append(row, prompt="a prompt", output=row.pop("output"))
            run.seal()
            return run.path

    return make


@pytest.fixture
def side() -> Callable[..., Side]:
    """side("base", rows(...), planned=None, **environment) -> the side that a run of these rows would give."""

    def make(name: str, *parts: Rows, planned: int | None = None, **environment: Any) -> Side:
        together = [check_row({k: v for k, v in row.items() if k != "output"}) for part in parts for row in part]
        record = {name: SAME_MACHINE | environment}
        made = of_tables(name, [(name, to_table(together, COLUMNS))], record, {name: Path(name)})
        return made if planned is None else replace(made, unfinished={name: f"{len(together)} of {planned} rows"})

    return make
