"""Stores results durably: once the journal has confirmed a row, the row survives kill -9, a full disk and a power cut.

The runner uses `RunFolder`; reports use `read_run` and `read_columns`. docs/results.md describes the files. Importing
this package is cheap: pyarrow and pandas are imported only when a table is made or read.
"""

from kvbench.store.again import resume_command
from kvbench.store.folder import RunFolder, check_out, check_same, check_writable, existing, has_rows, list_runs
from kvbench.store.identity import row_key
from kvbench.store.journal import Journal
from kvbench.store.names import check_run_name
from kvbench.store.reading import Snapshot, parse_turns, read_columns, read_rows, read_run, read_texts, table_hash
from kvbench.store.schema import FINAL
from kvbench.store.tables import repair

__all__ = [
    "FINAL",
    "Journal",
    "RunFolder",
    "Snapshot",
    "check_out",
    "check_run_name",
    "check_same",
    "check_writable",
    "existing",
    "has_rows",
    "list_runs",
    "parse_turns",
    "read_columns",
    "read_rows",
    "read_run",
    "read_texts",
    "repair",
    "resume_command",
    "row_key",
    "table_hash",
]
