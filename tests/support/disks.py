"""Fixtures: a disk that is small, a folder that cannot be written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder = tmp_path / "small"
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", "size=4m", "kvbench-test", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def take_all_but(folder: Path, left: int) -> None:
    """Fill a disk until so many bytes are free."""
    disk = os.statvfs(folder)
    (folder / "ballast").write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - left))


def free(folder: Path) -> None:
    (folder / "ballast").unlink()


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that cannot be written: a read-only mount for root, who ignores mode bits, else mode 0555."""
    folder = tmp_path / "fixed"
    folder.mkdir()
    if os.geteuid() == 0:
        _mount("--bind", str(folder), str(folder))
        _mount("-o", "remount,ro,bind", str(folder))
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)
    else:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
