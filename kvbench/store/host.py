"""Identifies processes and Slurm jobs across machines and restarts, to tell whether the owner of a lock still runs.

Systems reuse process ids. A process is therefore identified by its id, the boot id of its machine, and its start time
in clock ticks. Without /proc (macOS), boot id and start time are unknown: if a new process has the id of an ended
process, kvbench takes the new process for the ended one.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Return the first 40 characters of this machine's name. Characters other than ASCII letters, digits, "." and "-"
    are replaced by "_"."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())[:40] or "host"


def slurm_job() -> tuple[str, int]:
    """Return an id of the Slurm job that this process belongs to, and how often Slurm has restarted this job; ("", 0)
    outside of Slurm. Each task of a Slurm array has an id of its own, which a restart does not change."""
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if not job:
        return "", 0
    if cluster := os.environ.get("SLURM_CLUSTER_NAME"):
        job += f"@{cluster}"
    return job[:200], int(restarts) if restarts.isdecimal() else 0


def boot_id() -> str:
    """Return an id that changes with every start of this machine; "" if the system has no such id."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. None if the process has ended or is a zombie, or if
    the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # start after the command's name, which may hold blanks and brackets
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(pid: int, ticks: int | None) -> bool:
    """Return whether a process of this machine still runs. `ticks`: its start time in clock ticks; None: accept any
    process with this id. Without /proc, `ticks` is ignored."""
    if Path("/proc/self/stat").exists():
        now = start_ticks(pid)
        return now is not None and (ticks is None or now == ticks)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
