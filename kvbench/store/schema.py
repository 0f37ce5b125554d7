"""The columns of a row with their types, units and meanings, and the check that every row passes before it is written.

FORMAT is the number of the format of a run's files. A release that changes this format increases the number; added
columns (`ADDED`) do not count as a change. Format 1 belongs to release 0.1. A row may leave any column empty except
those in `REQUIRED`, because a failure can leave a gap anywhere; a failed row has no score (null, never 0).
`DETERMINISTIC` names the columns that two runs of one configuration must agree on; the other columns depend on the
clock or the host. Prompts and answers are in texts.parquet.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvbench.console.redact import fold_home, hide_keys, hide_secrets, redact_text
from kvbench.store.identity import canonical_json
from kvbench.store.strict_json import document

FORMAT = 1
FORMAT_KEY = "kvbench.format"
MOST_PASSES = 10**6  # upper limit of `score_pass`
OK = "ok"
FINAL = ("prompt_too_long", "prompt_empty")  # statuses of rows without an answer that no further attempt can answer
UNSCORED = ("unscored", "grader_error", "judge_error", "sandbox_error")  # statuses of answers without a score


@dataclass(frozen=True, slots=True)
class Column:
    """A column of rows.parquet: a field of every row. `varies`: why two runs of one configuration may differ in it; ""
    if they must agree."""

    name: str
    kind: str  # name (a repeated text, dictionary-encoded), text, int32, int64, float64, bool or time
    unit: str  # "JSON" for a text that holds JSON
    meaning: str
    varies: str = ""  # "", "timing" or "host"


COLUMNS: tuple[Column, ...] = (
    Column("row_key", "text", "", "hash of the settings that identify this sample; equal in every run of the sample"),
    Column("task", "name", "", "task name"),
    Column("task_version", "name", "", "raised when prompt, extraction or metric change"),
    Column("doc_id", "text", "", "id of the question within the task"),
    Column("sample", "int32", "", "number of the sample among the question's samples, from 0"),
    Column("cluster_id", "text", "", "source of the question, such as a text; standard errors cluster by it"),
    Column("category", "name", "", "the task's own grouping (subject, length)"),
    Column("method", "name", "", "eviction method"),
    Column("method_version", "name", "", "raised when the method's results change"),
    Column("method_source", "name", "", "hash of the source files that decide what the method keeps", "host"),
    Column("options", "name", "JSON", "the method's options"),
    Column("artefacts", "name", "JSON", "tables and draft models that the method used, with their hashes"),
    Column("budget", "int32", "entries", "entries allowed per layer and KV head right after an eviction"),
    Column("budget_share", "float64", "0 to 1", "budget as a share of the prompt; null: it was given in entries"),
    Column("interval", "int32", "tokens", "tokens decoded between two evictions"),
    Column("compress", "name", "", "query-aware: the prompt is evicted with its question; query-agnostic: before it"),
    Column("prefill", "name", "", "full: the prompt is evicted once read; chunked: after every chunk of it"),
    Column("prefill_chunk", "int32", "tokens", "tokens read between two evictions of a chunked prompt"),
    Column("decode_bounded", "bool", "", "whether the budget also bounds generated entries"),
    Column("model", "name", "", "model name or path"),
    Column("model_revision", "name", "", "the model's commit, or a hash of its files that decide tokens"),
    Column("adapter", "name", "", "LoRA adapter merged into the model: its folder's name and a hash of its files"),
    Column("seed", "name", "", "run seed, an unsigned 64-bit integer as text"),
    Column("prompt_style", "name", "", "variant of the task's prompt"),
    Column("thinking", "bool", "", "whether the answer holds a thinking block, by the chat template; null: unknown"),
    Column("temperature", "float64", "", "0 is greedy"),
    Column("top_p", "float64", "", "1 is off"),
    Column("top_k", "float64", "", "0 is off"),
    Column("min_p", "float64", "", "0 is off"),
    Column("max_new_tokens", "int32", "tokens", "most tokens that a sample may generate per turn"),
    Column("stop", "text", "JSON", "texts of --stop, which end an answer beside the task's own"),
    Column("multi_turn_cache", "name", "", "keep: later turns go on from the evicted cache; reset: new prompts"),
    Column("slots", "int32", "", "sequences decoded side by side", "host"),
    Column("slots_planned", "int32", "", "slots of the cell's plan; if memory ran out, slots is smaller", "host"),
    Column(
        "oom_retries", "int32", "", "how often memory had run out in the cell; each time the slots are halved", "host"
    ),
    Column("device_bytes_planned", "int64", "bytes", "peak memory of the plan, with weights and scratch", "host"),
    Column("device_bytes_peak", "int64", "bytes", "most GPU memory that torch has held in the cell so far", "host"),
    Column("device", "name", "", "cpu, or the GPU's name", "host"),
    Column("dtype", "name", "", "number type of weights and cache"),
    Column("attention", "name", "", "attention code that read the prompts: sdpa or flash"),
    Column(
        "decoding",
        "name",
        "",
        "code that decoded: torch, or on a GPU the kernel; with graph and compiled if used",
        "host",
    ),
    Column(
        "status",
        "name",
        "",
        "ok, nan_logits, oom, prompt_too_long, prompt_empty; unscored, grader_, judge_ or sandbox_error",
    ),
    Column("note", "text", "", "why a row failed or has no score", "host"),
    Column("stop_reason", "name", "", "stop, stop_string, or length (truncated, in any turn)"),
    Column("prompt_sha256", "text", "", "hash of the rendered prompt"),
    Column("prompt_tokens", "int32", "tokens", "length of the prompt"),
    Column("prompt_tokens_cut", "int32", "tokens", "tokens cut from the middle of a text that was too long"),
    Column("images", "int32", "", "number of images of the question, in all turns; null: the task has none"),
    Column("image_tokens", "int32", "tokens", "tokens that stand for these images"),
    Column("image_list", "text", "JSON", "name, size in pixels, tokens, turn and place in the prompt of each image"),
    Column("output_tokens", "int32", "tokens", "length of the output"),
    Column("output_sha256", "text", "", "hash of the output's text"),
    Column("extracted", "text", "", "the answer found in the output"),
    Column("score", "float64", "0 to 1", "the task's metric; null: failed or not scored"),
    Column("score_strict", "float64", "0 to 1", "score under a stricter extraction rule"),
    Column("score_partial", "float64", "0 to 1", "partial credit, such as the share of right steps"),
    Column("floor", "float64", "0 to 1", "headline score that no method falls below at this budget"),
    Column("aux", "text", "JSON", "further scores by name"),
    Column(
        "verdict", "name", "", "a program's verdict: pass, wrong_answer, runtime_error, time_limit, memory_limit, ..."
    ),
    Column("passed_lcb", "bool", "", "whether the program passes when run as by LiveCodeBench's own checker"),
    Column("passed_native", "bool", "", "whether the program passes when run as an ordinary process"),
    Column("sandbox_tier", "name", "", "tier of the sandbox that isolated the program", "host"),
    Column("sandbox_selftest", "name", "", "hash of the sandbox's self-test", "host"),
    Column("python_version", "name", "", "interpreter that ran the program", "host"),
    Column("judge", "name", "", "model that rated the answer, and when", "host"),
    Column("score_pass", "int32", "", "how often 'kvbench score' has scored the answer again", "host"),
    Column("no_answer", "bool", "", "whether no answer was found in the output; with several turns, in none of them"),
    Column(
        "entries_after_evict", "float64", "entries", "most entries right after an eviction; null: no eviction happened"
    ),
    Column("entries_peak", "float64", "entries", "most entries while decoding"),
    Column("entries_mean", "float64", "entries", "entries, mean over decode steps"),
    Column("entries_prefill_peak", "float64", "entries", "most entries while the prompt was read"),
    Column("kv_bytes_peak", "int64", "bytes", "live cache at its peak, with all that the method stores"),
    Column("kv_bytes_extra", "int64", "bytes", "part of kv_bytes_peak beside keys and values"),
    Column("kv_bytes_mean", "int64", "bytes", "live cache, mean over decode steps"),
    Column("kv_bytes_slot", "int64", "bytes", "bytes allocated for the sequence's slot"),
    Column("state_bytes", "int64", "bytes", "part of kv_bytes_peak: states of recurrent layers, never evicted"),
    Column("kv_bytes_prefill_peak", "int64", "bytes", "live cache at its peak while the prompt was read"),
    Column(
        "kept_text", "float64", "0 to 1", "share of the text tokens whose entries are held at the end; null: no images"
    ),
    Column(
        "kept_images",
        "float64",
        "0 to 1",
        "share of the image tokens whose entries are held at the end; null: no images",
    ),
    Column("evictions", "int32", "", "number of evictions"),
    Column("first_eviction", "int32", "tokens", "tokens read before the first eviction; null: no eviction happened"),
    Column("prefill_seconds", "float64", "s", "this sample's share of reading the prompts of its turns", "timing"),
    Column("decode_seconds", "float64", "s", "this sample's share of drawing its tokens, without evictions", "timing"),
    Column("evict_seconds", "float64", "s", "this sample's share of evicting", "timing"),
    Column(
        "tokens_per_second", "float64", "tokens/s", "speed of the whole engine while this sample was decoded", "timing"
    ),
    Column(
        "roofline_share",
        "float64",
        "0 to 1",
        "measured speed divided by the limit that memory and arithmetic set",
        "timing",
    ),
    Column("kvbench_version", "name", "", "version that made the row", "host"),
    Column("torch_version", "name", "", "version that made the row", "host"),
    Column("transformers_version", "name", "", "version that made the row", "host"),
    Column("created", "time", "UTC", "when the row was written", "timing"),
    Column("machine_load", "float64", "per core", "load average of one minute when the row was written", "timing"),
)
ADDED = (  # columns added to this format after its first tables; they read as null where a table lacks them
    *("machine_load", "decoding", "slots_planned", "oom_retries", "device_bytes_planned", "device_bytes_peak"),
    *("state_bytes", "adapter", "images", "image_tokens", "image_list", "kept_text", "kept_images"),
)
NAMES = tuple(c.name for c in COLUMNS)
DETERMINISTIC = tuple(c.name for c in COLUMNS if not c.varies)
REQUIRED = ("row_key", "task", "doc_id", "sample", "method", "status")

_BY_NAME = {c.name: c for c in COLUMNS}
_FREE_TEXT = ("model_revision", "note")  # redacted, because an exception or an address may carry a secret
_SETTINGS = ("model", "options", "artefacts")  # identify rows, so only values that look like secrets are hidden
_LISTS = ("stop", "image_list")
_LIMITS = {"int32": 2**31, "int64": 2**63}


def check_row(row: Mapping[str, object]) -> dict[str, Any]:
    """Return the row in JSON types with every column, in the order of `COLUMNS`, ready for the journal.

    In `row`, `options` and `aux` may be dictionaries, `seed` an integer, `created` a datetime (default: now), and
    numbers may be numpy scalars. NaN and infinities become null. Secrets in settings and notes are hidden. Raises
    ValueError for an unknown column, a wrong type, a missing required column, or a score in a row whose status is not
    "ok". A caller's error is thus found before the table is made.
    """
    unknown = sorted(set(row) - set(NAMES))
    if unknown:
        raise ValueError(f"a row has unknown columns: {unknown}")
    checked = {name: as_stored(name, row.get(name)) for name in NAMES}
    checked["created"] = checked["created"] or datetime.now(UTC).isoformat(timespec="microseconds")
    missing = [n for n in REQUIRED if checked[n] in (None, "")]
    if missing:
        raise ValueError(f"a row lacks required columns: {missing}")
    if checked["status"] != OK and checked["score"] is not None:
        raise ValueError(f"a row with status {checked['status']!r} must have no score")
    return checked


def as_stored(column: str, value: Any) -> Any:
    """Return a value converted to the JSON type of this column, with secrets hidden. Raises ValueError for a wrong
    type, and for a value that `read_row` would refuse, such as deeply nested JSON."""
    stored = None if value is None else _convert(_BY_NAME[column], value)
    if stored is not None and not _FITS[column](stored):
        raise ValueError(f"column {column}: {value!r} does not read back as written")
    return stored


def read_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Check a row read from a journal, and return it with every column. None if a value does not fit its column, if a
    required column is empty, or if the row has a score although its status is not "ok"."""
    checked: dict[str, Any] = {}
    for name, fits in _FITS.items():
        value = checked[name] = row.get(name)
        if value is not None and not fits(value):
            return None
    if any(checked[n] in (None, "") for n in REQUIRED) or (checked["status"] != OK and checked["score"] is not None):
        return None
    return checked


def is_text(value: object) -> bool:
    """Return whether a value is text that UTF-8 can hold."""
    return type(value) is str and (value.isascii() or _encodes(value))


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.lru_cache(4096)  # options repeat from row to row
def _is_json(text: str, kind: type) -> bool:
    try:
        return isinstance(document(text), kind)
    except ValueError:
        return False


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _fitting(column: Column) -> Callable[[Any], bool]:
    """Return a function that tests whether a value read from a journal is valid in this column."""
    limit = _LIMITS.get(column.kind, 2**53)
    if column.name == "score_pass":
        return lambda v: type(v) is int and 0 <= v <= MOST_PASSES
    if column.unit == "JSON":
        return lambda v: is_text(v) and _is_json(v, list if column.name in _LISTS else dict)
    match column.kind:
        case "int32" | "int64":
            return lambda v: type(v) is int and -limit <= v < limit
        case "float64":
            return lambda v: type(v) is float or (type(v) is int and -limit <= v <= limit)
        case "bool":
            return lambda v: type(v) is bool
        case "time":
            return _is_time
    return is_text


_FITS = {column.name: _fitting(column) for column in COLUMNS}


def clean_text(text: str) -> str:
    """Return the text with U+FFFD in place of unpaired surrogates. Models do write such surrogates, and UTF-8 cannot
    hold them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def sort_key(row: Mapping[str, Any]) -> tuple[object, ...]:
    """Return a key that orders rows by task, method, budget, options, interval, question and sample, not by time.
    Numbers in a doc_id compare as numbers: q2 before q10."""
    return (
        row.get("task") or "",
        row.get("method") or "",
        row.get("budget_share") or 0.0,
        _number(row.get("budget")) if row.get("budget_share") is None else 0,  # differs from prompt to prompt
        row.get("options") or "",
        _number(row.get("interval")),
        natural(row.get("doc_id") or ""),
        _number(row.get("sample")),
        row.get("row_key") or "",
    )


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key for a text. Successive digits compare as one number: q2 comes before q10."""
    parts = re.split(r"([0-9]+)", text)
    return tuple((0, len(p.lstrip("0")), p.lstrip("0")) if p.isdigit() else (1, 0, p) for p in parts if p)


def _number(value: Any) -> int:
    return -1 if value is None else int(value)


def _convert(column: Column, value: Any) -> Any:
    if hasattr(value, "item"):  # numpy scalars
        value = value.item()
    match column.kind:
        case "bool" if isinstance(value, bool):
            return value
        case "int32" | "int64" if isinstance(value, int) and not isinstance(value, bool):
            limit = _LIMITS[column.kind]
            if -limit <= value < limit:
                return value
        case "float64" if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) if math.isfinite(value) else None
        case "time" if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC).isoformat(timespec="microseconds")
        case "time" if isinstance(value, str):
            return _convert(column, datetime.fromisoformat(value))
        case "name" | "text":
            return _convert_text(column, value)
    raise ValueError(f"column {column.name}: {value!r} is not {column.kind}")


def _convert_text(column: Column, value: Any) -> str:
    if column.unit == "JSON":
        text = value if isinstance(value, str) else json.dumps(value, default=lambda scalar: scalar.item())
        parsed = json.loads(text, parse_constant=lambda _: None)  # NaN and infinities become null
        value = canonical_json(hide_secrets(parsed))
    elif column.name == "seed" and isinstance(value, int):
        value = str(value)
    if not isinstance(value, str):
        raise ValueError(f"column {column.name}: {value!r} is not text")
    if column.name in _SETTINGS:
        value = fold_home(value if column.unit == "JSON" else hide_keys(value))
    return clean_text(redact_text(value) if column.name in _FREE_TEXT else value)
