"""What a replay leaves in a folder: tidy tables and one JSON document with everything needed to repeat it.

replay.csv        a row for each task, method and budget
traces.parquet    a row for each of their traces
heads.parquet     a row for each of their attention heads
replay.json       settings, versions, the rows, and which methods were left out
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.replay.replay import Result
from kvbench.store import check_out
from kvbench.store.files import replacing


def write(out: str, results: Sequence[Result], document: Mapping[str, Any]) -> Path:
    """Earlier files of these names are replaced. Raises SetupError, UserError when the folder cannot be written."""
    import pandas as pd

    folder = check_out(out)
    rows = pd.DataFrame([row for result in results for row in result.rows]).astype({"budget": "Int64"})
    _put(folder / "replay.csv", rows.to_csv(index=False).encode())
    for name in ("traces", "heads"):
        table = pd.DataFrame([row for result in results for row in getattr(result, name)])
        buffer = io.BytesIO()
        table.astype({"budget": "Int64", "budget_share": "Float64"}).to_parquet(buffer, index=False)
        _put(folder / f"{name}.parquet", buffer.getvalue())
    _put(folder / "replay.json", (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    return folder


def _put(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)
