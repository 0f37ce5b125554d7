"""Resource limits of one program. They affect scores, so a run records them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program.

    Attributes:
        memory: bytes of address space; the program cannot fork, so this bounds its total memory.
        stack: bytes of the first thread's stack; 40,000 nested calls through C code fit.
        threads: number of threads at a time.
        files: number of open descriptors.
        file_bytes: bytes of one written file; only in tier "none" can programs write files.
        output: bytes of standard output, and as many of standard error.
    """

    memory: int = 1 << 30
    stack: int = 256 << 20
    threads: int = 64
    files: int = 64
    file_bytes: int = 16 << 20
    output: int = 1 << 20
