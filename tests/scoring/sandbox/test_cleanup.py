"""Deleting what a hostile program made."""

from __future__ import annotations

import os
from pathlib import Path

from support.sandboxes import run

from kvbench.scoring.sandbox.cleanup import remove_tree
from kvbench.scoring.sandbox.tiers import Unsafe


def test_a_tree_too_deep_for_recursion_and_for_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for level in range(1100):
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        if level % 500 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    remove_tree(root)
    assert not root.exists()


def test_links_are_not_followed_and_modes_are_no_hindrance(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    root = tmp_path / "root"
    (root / "closed" / "inner").mkdir(parents=True)
    (root / ".moved-0" / "a").mkdir(parents=True)
    (root / "link").symlink_to(kept)
    (root / "closed" / "link").symlink_to(kept / "file")
    (root / "closed").chmod(0)
    remove_tree(root)
    assert not root.exists()
    assert (kept / "file").read_text() == "x"


def test_only_folders(tmp_path: Path) -> None:
    remove_tree("/nonexistent/folder")
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    file.chmod(0o640)
    link.symlink_to(tmp_path)
    remove_tree(file)
    remove_tree(link)
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


def test_a_program_without_a_sandbox_leaves_no_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import os\nfor _ in range(1100):\n    os.mkdir('d')\n    os.chdir('d')\nprint('made')"
    assert run(Unsafe(), program).stdout == b"made\n"
    assert os.listdir(tmp_path) == []
