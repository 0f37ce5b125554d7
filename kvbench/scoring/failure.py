"""The note of a row whose grader failed: the exception, and a hash of its traceback.

Rows have the same hash if their grader raised the same type of exception at the same place. A reader thus sees that one
fault causes many failures.
"""

from __future__ import annotations

import hashlib
import traceback
from pathlib import Path

LONGEST = 200  # characters of an exception's text


def failure(error: BaseException) -> str:
    """Return the note for a row whose grader raised `error`: "RuntimeError: no such key (traceback 1a2b3c4d)"."""
    frames = traceback.extract_tb(error.__traceback__)
    path = "\n".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    digest = hashlib.sha256(f"{type(error).__name__}\n{path}".encode()).hexdigest()[:8]
    return f"{type(error).__name__}: {str(error)[:LONGEST]} (traceback {digest})"
