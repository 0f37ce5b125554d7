"""What one program may use. The numbers are part of a benchmark's conditions and go into a run's record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program.

    Attributes:
        memory: bytes of address space; since no process can be made, the limit of all it uses.
        stack: bytes of the first thread's stack; 40,000 nested calls through C code fit.
        threads: how many it may have at once.
        files: open descriptors. file_bytes: size of a file (only without a sandbox is there a place to write one).
        output: bytes of standard output and of standard error, each.
    """

    memory: int = 1 << 30
    stack: int = 256 << 20
    threads: int = 64
    files: int = 64
    file_bytes: int = 16 << 20
    output: int = 1 << 20
