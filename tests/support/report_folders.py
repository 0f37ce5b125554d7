"""Makes sealed run folders of any size, for timings of `kvbench report`.

    PYTHONPATH=tests python -m support.report_folders OUT/r100k --cells 31 --questions 100 --samples 32

Scores, entries, bytes and seconds are drawn from a seed; names, keys, columns, types and files are those of a run that
was sealed and published (run.json, rows.parquet, texts.parquet, seal.json). The journal is left out: a million records
of it would be 3 GB and a report of a sealed run does not read them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.store import RunFolder, row_key, tables
from kvbench.store.frames import rows_schema, texts_schema
from kvbench.store.schema import FORMAT

TASKS = ("walk", "chain", "lookup")
METHODS = ("gkv", "h2o", "rkv", "tova", "streaming-llm", "knorm", "random", "snapkv-decode", "keydiff", "morphkv")
BUDGETS = (24, 32, 48, 64, 96, 128, 192, 256, 384)
INTERVAL = 32
VERSIONS = {"kvbench_version": "0.1.0", "torch_version": "2.13.0", "transformers_version": "5.17.0"}
FIXED: dict[str, Any] = {
    "task_version": "1", "method_version": "1", "options": "{}", "model": "tiny", "model_revision": "0" * 16,
    "seed": "0", "prompt_style": "default", "temperature": 1.0, "top_p": 1.0, "top_k": 0.0, "min_p": 0.0,
    "max_new_tokens": 400, "stop": "[]", "slots": 32, "device": "cpu", "dtype": "float32", "attention": "sdpa",
    "status": "ok", "prompt_tokens": 46, "no_answer": False, "score_pass": 0, **VERSIONS,
}  # fmt: skip
LAYER = {"kv_heads": 2, "head_dim": 32, "value_dim": 32, "window": None}
CACHE = {"element_bytes": 4, "layers": [LAYER] * 4}
ENTRY_BYTES = 4 * 2 * 64 * 4


def make_run(path: Path, *, cells: int, questions: int, samples: int, seed: int = 0) -> Path:
    """A sealed run of `cells` x `questions` x `samples` rows on up to three tasks."""
    generator = np.random.default_rng(seed)
    parts = [_cell(generator, *place, questions, samples) for place in _places(cells)]
    table = pa.concat_tables(parts)
    with RunFolder.open(
        path.parent, path.name, {"seed": seed}, environment=VERSIONS | {"kv_cache": CACHE}, planned=len(table)
    ) as run:
        with open(run.path / tables.ROWS, "x+b") as file:
            tables.write_rows(file, table)
        pq.write_table(_texts(table), run.path / tables.TEXTS, compression="zstd", write_page_checksum=True)
        _seal(run.path, len(table))
    return run.path


def _places(cells: int) -> list[tuple[str, str, int | None]]:
    """(task, method, budget) of each cell: the full cache of every task first, then the grid."""
    per_task = 1 + len(METHODS) * len(BUDGETS)
    tasks = TASKS[: -(-cells // per_task)] if cells < 2 * per_task else TASKS
    grid = [(task, method, budget) for budget in BUDGETS for method in METHODS for task in tasks]
    places = [*((task, "full", None) for task in tasks), *grid][:cells]
    return sorted(places, key=lambda place: (place[0], place[1], place[2] or 0))


def _cell(
    generator: np.random.Generator, task: str, method: str, budget: int | None, questions: int, samples: int
) -> pa.Table:
    """The rows of one method at one budget: questions differ in difficulty, methods and budgets in strength."""
    count = questions * samples
    strength = 0.8 if budget is None else 0.8 * budget / (budget + 4 * (1 + METHODS.index(method)))
    chance = np.clip(strength + 0.3 * np.sin(np.arange(questions) * 2.4), 0.02, 0.98).repeat(samples)
    partial = generator.binomial(8, chance) / 8
    tokens = generator.integers(200, 380, count)
    peak = (46.0 + tokens) if budget is None else np.full(count, float(budget + INTERVAL))
    seconds = tokens / generator.normal(400, 20, count)
    identity = {**FIXED, "task": task, "method": method, "budget": budget, "interval": budget and INTERVAL}
    ids = [f"{task}-{n}" for n in range(questions) for _ in range(samples)]
    numbers = [k for _ in range(questions) for k in range(samples)]
    columns: dict[str, Any] = identity | {
        "row_key": [row_key(identity | {"doc_id": d, "sample": k}) for d, k in zip(ids, numbers)],
        "doc_id": ids,
        "sample": numbers,
        "category": [f"{1 + n % 4}/{'odd' if n % 2 else 'even'}" for n in range(questions) for _ in range(samples)],
        "decode_bounded": True,
        "prompt_sha256": [_sha(d) for d in ids],
        "output_sha256": [_sha(f"{method}{budget}{d}{k}") for d, k in zip(ids, numbers)],
        "stop_reason": np.where(tokens > 370, "length", "stop"),
        "extracted": [str(a) for a in np.where(partial == 1, 7, generator.integers(0, 9, count))],
        "score": (partial == 1).astype(float),
        "score_partial": partial,
        "floor": None if budget is None else 0.1,
        "output_tokens": tokens,
        "entries_after_evict": None if budget is None else float(budget),
        "entries_peak": peak,
        "entries_mean": peak * 0.8,
        "entries_prefill_peak": 46.0,
        "kv_bytes_peak": (peak * ENTRY_BYTES).astype(int) + 640,
        "kv_bytes_extra": 640,
        "kv_bytes_mean": (peak * 0.8 * ENTRY_BYTES).astype(int),
        "kv_bytes_slot": (peak.max(initial=0) * ENTRY_BYTES).astype(int),
        "kv_bytes_prefill_peak": 46 * ENTRY_BYTES,
        "evictions": 0 if budget is None else tokens // INTERVAL,
        "prefill_seconds": 0.01,
        "decode_seconds": seconds,
        "evict_seconds": seconds * (0.0 if budget is None else 0.03),
        "tokens_per_second": (tokens - 1) / seconds,
        "roofline_share": generator.uniform(0.1, 0.4, count),
        "created": datetime(2026, 1, 1, tzinfo=UTC),
    }
    arrays = [_array(columns.get(field.name), count, field.type) for field in rows_schema()]
    return pa.Table.from_arrays(arrays, schema=rows_schema())


def _array(values: Any, count: int, kind: pa.DataType) -> pa.Array:
    """A column; a single value stands in every row."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if isinstance(values, (list, np.ndarray)):
        return pa.array(values).cast(plain).cast(kind)
    return pa.repeat(pa.scalar(values, plain), count).cast(kind)


def _texts(table: pa.Table) -> pa.Table:
    same = [pa.repeat(pa.scalar(text, pa.string()), len(table)) for text in ("a prompt", "an output", None)]
    return pa.Table.from_arrays([table.column("row_key"), *same], schema=texts_schema())


def _seal(path: Path, rows: int) -> None:
    """seal.json of a run whose journal was left behind."""
    counts = {"rows": rows, "ok": rows, "texts": rows, "duplicates": 0, "nondeterministic_duplicates": 0}
    hashes = {name: tables.sha256(path / name) for name in (tables.ROWS, tables.TEXTS)}
    content = {"format": FORMAT, "created": "2026-01-01T00:00:00+00:00", **counts, "dropped_records": 0, "segments": []}
    (path / tables.SEAL).write_text(json.dumps(content | {"sha256": hashes}, indent=2), encoding="utf-8")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    for name, value in (("cells", 31), ("questions", 100), ("samples", 32), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    given["path"].parent.mkdir(parents=True, exist_ok=True)
    print(make_run(given.pop("path"), **given))


if __name__ == "__main__":
    main()
