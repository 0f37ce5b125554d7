"""Finds, downloads and reads task data: from a user's folder, kvbench's bundled files, the hub or a web address.

Sources are tried in this order: ``--data``, ``KVBENCH_DATA``, bundled files, hub or web address. If the user gives a
folder that lacks the task's data, kvbench reports an error and does not try the next source. A task's manifest states
where the data come from and, if known, the number of rows and a hash of their ids. kvbench compares the data with the
manifest.

A manifest may name samples of the data: files with some rows, or with invented rows. If the user's folder has such a
file but not the data, kvbench reads the sample. A note to the user and the run's record then say so.
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
