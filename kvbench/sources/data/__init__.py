"""Task data from a folder, the bundled files or the hub; kvbench never falls back to another source silently.

Order: ``--data``, ``KVBENCH_DATA``, bundled, hub. If the user gives a folder that lacks the task's file, this is an
error, and kvbench does not try the next source. Row count and ids are compared with the task's manifest. Inside a data
folder, a sample named in the manifest replaces a missing file; a note and the run's record say so.
"""

from __future__ import annotations

from kvbench.sources.data.formats import FILE_LIMIT, json_type, read_jsonl, read_plain, read_rows
from kvbench.sources.data.hub_data import hub_error
from kvbench.sources.data.images import is_inside
from kvbench.sources.data.source import BUNDLED, Data

__all__ = [
    "BUNDLED",
    "FILE_LIMIT",
    "Data",
    "hub_error",
    "is_inside",
    "json_type",
    "read_jsonl",
    "read_plain",
    "read_rows",
]
