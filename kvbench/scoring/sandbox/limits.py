"""Resource limits of one program. They are conditions of the benchmark, so a run records them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program.

    Attributes:
        memory: bytes of address space; the program cannot fork, so this bounds all that it uses.
        stack: bytes of the first thread's stack; 40,000 nested calls through C code fit.
        threads: at a time.
        files: open descriptors. file_bytes: size of a file; only tier "none" has a place to write one.
        output: bytes of standard output, and of standard error.
    """

    memory: int = 1 << 30
    stack: int = 256 << 20
    threads: int = 64
    files: int = 64
    file_bytes: int = 16 << 20
    output: int = 1 << 20
