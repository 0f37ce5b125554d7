"""Computes what a model's layers store per token, and which share of the full cache's memory can be evicted.

The layers with attention are described in run.json. The bytes of the states of recurrent layers are in the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.report.load import Loaded
from kvbench.report.rows import RUN, Rows
from kvbench.store import manifest

POSITION = 4  # bytes of the position that a KV head stores with each entry that may be evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of the model, as run.json describes it. `entry_bytes`: bytes of the key and the value of one token in
    one KV head. `window`: tokens that a sliding-window layer keeps; None for other layers."""

    kv_heads: int
    entry_bytes: int  # keys and values of one entry in one head
    window: int | None


def read_layers(path: Path) -> list[Layer] | None:
    """Return the layers of a run's model from the run's run.json; None if the run has no run.json, or if run.json names
    no layers. path: the run's folder, or a table in it. Raises SetupError if run.json is damaged."""
    folder = path if path.is_dir() else path.parent
    if not (folder / manifest.NAME).is_file():
        return None
    environment = manifest.read(folder)["environment"]
    try:
        cache = environment.get("kv_cache")
        if cache is None:
            return None
        return [_layer(layer, cache["element_bytes"]) for layer in cache["layers"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise SetupError(
            f"{quote(folder / manifest.NAME)} is damaged: its field kv_cache does not describe the model's layers. "
            f"Restore {manifest.NAME} from a copy."
        ) from None


def _layer(layer: Mapping[str, Any], element_bytes: int) -> Layer:
    sizes = [layer["kv_heads"], layer["head_dim"], layer["value_dim"], element_bytes]
    window = layer["window"]
    if not all(isinstance(size, int) and 0 <= size < 2**31 for size in [*sizes, window or 0]):
        raise ValueError("a size of a layer is not a whole number from 0 to 2**31 - 1")
    heads, keys, values, _ = sizes
    return Layer(kv_heads=heads, entry_bytes=(keys + values) * element_bytes, window=window)


def layers_of(loaded: Loaded) -> dict[str, list[Layer] | None]:
    """Return the layers of each run's model, in a dictionary by the run's name."""
    return {run["run"]: read_layers(Path(run["path"])) for run in loaded.runs}


def by_window(
    rows: Rows, later: Any, layers: Mapping[str, Sequence[Layer] | None]
) -> Iterator[tuple[Any, list[Layer], list[Layer]]]:
    """Yield three values for each run whose run.json describes layers: a mask of the run's rows, the layers with a
    sliding window, and all other layers. later: the result of `later_tokens`. layers: the result of `layers_of`.

    A layer whose window holds the longest sequence of all rows counts among the other layers, as in the engine. If the
    lengths of sequences are unknown, all layers count among the others.
    """
    longest, runs = longest_tokens(rows, later), rows.text(RUN)
    for code in runs.present():
        if (model := layers[runs.names[code]]) is not None:
            rings = [layer for layer in model if layer.window is not None and layer.window < longest]
            yield runs.codes == code, rings, [layer for layer in model if layer not in rings]


def window_bytes(rings: Sequence[Layer], tokens: Any) -> Any:
    """Return the bytes of keys and values that sliding-window layers hold. tokens: the tokens of each sequence."""
    return sum(least(tokens, float(ring.window or 0)) * ring.kv_heads * ring.entry_bytes for ring in rings)


def sequence_tokens(rows: Rows, later: Any) -> Any:
    """Return for each row how many tokens of its sequence the full cache holds at the end. later: the result of
    `later_tokens`."""
    import numpy as np

    # The model never reads the last token.
    return rows.number("prompt_tokens") + rows.number("output_tokens") - 1 + np.nan_to_num(later)


def longest_tokens(rows: Rows, later: Any) -> float:
    """Return the largest number of tokens that the sequence of any row may have (prompt, later questions and the limit
    of new tokens); NaN if the rows do not state these numbers."""
    import numpy as np

    lengths = rows.number("prompt_tokens") + rows.number("max_new_tokens") + np.nan_to_num(later)
    return float(np.fmax.reduce(lengths, initial=math.nan))


def evictable_share(rows: Rows, later: Any, layers: Mapping[str, Sequence[Layer] | None]) -> Any:
    """Return, for each row, the evictable share of the memory that the row's sequence takes in the full cache.

    The rest of this memory holds sliding windows and states of recurrent layers, which no method evicts. The plan of a
    dry run states the same share. The share is NaN if the run's run.json does not describe layers, or if the row has no
    measurements. later, layers: as for `by_window`.
    """
    import numpy as np

    share, tokens = np.full(len(rows), math.nan), sequence_tokens(rows, later)
    states = np.nan_to_num(rows.number("state_bytes"))
    for own, rings, others in by_window(rows, later, layers):
        evicted = tokens[own] * sum(g.kv_heads * (g.entry_bytes + POSITION) for g in others)
        fixed = states[own] + window_bytes(rings, tokens[own])
        share[own] = np.divide(evicted, evicted + fixed, out=np.full(own.sum(), math.nan), where=evicted + fixed > 0)
    return share


def evictable_note(shares: Any) -> list[str]:
    """Return a list with one line on the share of memory that methods can evict; an empty list if the share is 1 for
    all rows, or unknown. shares: the result of `evictable_share`."""
    known = shares[shares == shares]
    if not len(known) or known.min() == 1:
        return []
    low, high = (f"{share:.0%}" for share in (known.min(), known.max()))
    return [
        f"evictable KV: {low if low == high else f'{low} to {high}'} of a sequence's memory with the full cache; the "
        "rest are states of recurrent layers and sliding windows, which no method evicts."
    ]


def least(a: Any, b: Any) -> Any:
    """Return the smaller of a and b, elementwise: a where b is NaN, and NaN where a is NaN."""
    import numpy as np

    return np.where(b < a, b, a)


def later_tokens(rows: Rows) -> Any:
    """Return for each row how many tokens the later questions of its conversation have. This is the number of tokens
    that the full cache held in addition to the first prompt and the answers. It is 0 for a row of a question with one
    turn, and NaN if the full cache was not run on the conversation."""
    import numpy as np

    talks = rows.text("multi_turn_cache").codes >= 0
    questions, interval = rows.text("doc_id"), rows.number("interval")
    full = rows.where(talks & (interval != interval))
    beyond = full.number("entries_peak") - (full.number("prompt_tokens") + full.number("output_tokens") - 1)
    known = np.full(len(questions.names), math.nan)
    np.fmax.at(known, full.text("doc_id").codes, beyond.clip(0))
    return np.where(talks, known[questions.codes], 0.0)
