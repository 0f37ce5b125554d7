"""Resource limits of one program. They affect scores, so a run records them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program's resources."""

    memory: int = 1 << 30  # bytes of address space; the program cannot fork, so this bounds its total memory
    stack: int = 256 << 20  # bytes of the first thread's stack; 40,000 nested calls through C code fit
    threads: int = 64  # at a time
    files: int = 64  # open descriptors
    file_bytes: int = 16 << 20  # bytes of one written file; only in tier "none" can programs write files
    output: int = 1 << 20  # bytes of standard output, and as many of standard error
