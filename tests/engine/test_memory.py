"""Memory of a device: the limits of containers and Slurm jobs count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.engine import memory

OWN = {  # content of /proc/self/cgroup -> {file under /sys/fs/cgroup: GiB}
    "0::/slurm/job_7/step_0/task_0\n": {
        "slurm/job_7/memory.max": 3,
        "slurm/memory.max": 4,
        "slurm/job_7/step_0/memory.max": 5,
    },
    "4:memory,hugetlb:/slurm/job_7/step_0\n1:name=systemd:/x\n0::/\n": {
        "memory/slurm/job_7/memory.limit_in_bytes": 3,
        "memory/memory.limit_in_bytes": 6,
    },
    "0::/../../other\n": {"memory.max": 3, "../../other/memory.max": 1},
}


@pytest.mark.parametrize("own", OWN)
def test_the_limit_of_a_group_above_counts(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(path: Path, *more: object) -> str:
        if str(path) == "/proc/self/cgroup":
            return own
        if (file := str(path.relative_to("/sys/fs/cgroup"))) not in OWN[own]:
            raise FileNotFoundError(path)
        return str(OWN[own][file] << 30)

    assert _total(text, monkeypatch) == 3 << 30


def _total(read_text: object, monkeypatch: pytest.MonkeyPatch) -> int:
    """The memory of a machine with 8 GiB whose files `read_text` reads."""
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 21}[name])
    memory._host.cache_clear()
    found = memory.total(torch.device("cpu"))
    memory._host.cache_clear()
    return found


@pytest.mark.parametrize(("limit", "gib"), [("2147483648\n", 2), ("max\n", None), ("9223372036854771712\n", None)])
def test_the_limit_of_a_container_counts(limit: str, gib: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def text(path: Path, *more: object) -> str:
        if str(path).startswith("/sys/fs/cgroup/"):
            if path.name != "memory.max":
                raise FileNotFoundError(path)
            return limit
        return read(path)

    assert _total(text, monkeypatch) == (gib or 8) << 30
