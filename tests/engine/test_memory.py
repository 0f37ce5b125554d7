"""Memory of a device: a container's limit counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.engine import memory


@pytest.mark.parametrize(("limit", "gib"), [("2147483648\n", 2), ("max\n", None), ("9223372036854771712\n", None)])
def test_the_limit_of_a_container_counts(limit: str, gib: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def text(path: Path, *more: object) -> str:
        if str(path).startswith("/sys/fs/cgroup/"):
            if path.name != "memory.max":
                raise FileNotFoundError(path)
            return limit
        return read(path)

    memory._host.cache_clear()
    monkeypatch.setattr(Path, "read_text", text)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 21}[name])
    assert memory.total(torch.device("cpu")) == (gib or 8) << 30
    memory._host.cache_clear()
