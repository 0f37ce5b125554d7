"""Where task data come from: a folder, the bundled files or the hub, never silently another source.

    data = Data("my-data")                 # Data(): KVBENCH_DATA, then bundled, then the hub at the pinned revision
    rows = data.rows("aime24", manifest)
    data.used["aime24"]                    # what was read: source, place, revision, hashes; for the run's record

Order: ``--data``, ``KVBENCH_DATA``, bundled, hub. The first that is *given* is the one that counts: a folder without
the task's file is an error, not a reason to look further. Row count and ids are compared with the task's manifest.
Inside a data folder a manifest's sample stands in for a file that is not there; the user is told so, and the record
says it.
"""

from __future__ import annotations

from kvbench.sources.data.formats import FILE_LIMIT, json_type, read_jsonl, read_plain
from kvbench.sources.data.hub_data import hub_error
from kvbench.sources.data.source import BUNDLED, Data, DataUsed

__all__ = ["BUNDLED", "FILE_LIMIT", "Data", "DataUsed", "hub_error", "json_type", "read_jsonl", "read_plain"]
