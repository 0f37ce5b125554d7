"""Durable results: a row that was acknowledged survives kill -9, a full disk and a power cut.

`RunFolder` is what a runner needs, `read_run` and `read_table` what a report needs; docs/results.md describes the
files. Importing this package is cheap: pyarrow and pandas load when a table is made or read.
"""

from kvbench.console.redact import redact_argv, redact_config, redact_text, safe_environ
from kvbench.store.again import resume_command
from kvbench.store.folder import RunFolder, check_out, check_same, check_writable, list_runs
from kvbench.store.identity import canonical_json, config_hash, row_key
from kvbench.store.journal import Journal
from kvbench.store.lock import RunLock
from kvbench.store.names import check_run_name
from kvbench.store.reading import (
    Snapshot,
    read_columns,
    read_rows,
    read_run,
    read_table,
    read_texts,
    table_hash,
)
from kvbench.store.recovery import JournalContent, read_journal
from kvbench.store.schema import COLUMNS, DETERMINISTIC, FORMAT, NAMES, Column, check_row
from kvbench.store.tables import repair, seal

__all__ = [
    "COLUMNS",
    "DETERMINISTIC",
    "FORMAT",
    "NAMES",
    "Column",
    "Journal",
    "JournalContent",
    "RunFolder",
    "RunLock",
    "Snapshot",
    "canonical_json",
    "check_out",
    "check_row",
    "check_run_name",
    "check_same",
    "check_writable",
    "config_hash",
    "list_runs",
    "read_columns",
    "read_journal",
    "read_rows",
    "read_run",
    "read_table",
    "read_texts",
    "redact_argv",
    "redact_config",
    "redact_text",
    "repair",
    "resume_command",
    "row_key",
    "safe_environ",
    "seal",
    "table_hash",
]
