"""Computes the keys of rows and the hashes of the parts of run.json, both as SHA-256 over canonical JSON.

`row_key` names a planned sample before it is generated, so that a resumed run knows which samples are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def canonical_json(value: object) -> str:
    """Return a value as JSON text with sorted keys and no blanks between its parts. Raises ValueError for NaN and
    infinities, TypeError for types that JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def row_key(identity: Mapping[str, object]) -> str:
    """Return the key of a row, 24 hex digits. identity: the settings that decide the sample's output.

    These settings include task, task_version, data revision, doc_id, sample, seed, method, options, budget, interval,
    model, model_revision and the generation settings. They do not include settings that may differ between hosts
    (device, slots).
    """
    return digest(identity)[:24]


def digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()
