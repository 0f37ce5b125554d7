"""The stage of the scenarios, and disks that are small or read-only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"faults.{path.stem}" for path in Path(__file__).parent.glob("*.py")))

from faults.stage import RUN, Stage  # noqa: E402
from support.commands import Command, end_all  # noqa: E402
from support.disks import read_only, small_disk  # noqa: E402
from support.judges import serve  # noqa: E402

__all__ = ["read_only", "serve", "small_disk"]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = Command(RUN, cwd=folder).end()
    assert ended.code == 0, ended
    end_all()
    return folder / "results" / "r1"


@pytest.fixture
def stage(tmp_path: Path, undisturbed: Path, fault: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Stage]:
    yield Stage(tmp_path, undisturbed, fault, request)
    end_all()
