"""Delete a folder that a hostile program may have filled.

Before Python 3.13 `shutil.rmtree` recurses and fails on a tree of a few thousand levels or on a path that is too long.
This module avoids deep paths: it moves every folder at level two up to level one, until none is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path


def remove_tree(root: str | Path) -> None:
    """Delete a folder and its content. Raises nothing; files and folders that cannot be deleted stay."""
    numbers = itertools.count()
    progress = True
    while progress:
        progress = False
        for folder in _strip(root):
            for below in _strip(folder):
                with contextlib.suppress(OSError):
                    os.rename(below, os.path.join(root, f".moved-{next(numbers)}"))
                    progress = True
            with contextlib.suppress(OSError):
                os.rmdir(folder)
                progress = True
    with contextlib.suppress(OSError):
        os.rmdir(root)


def _strip(folder: str | Path) -> list[str]:
    """Delete the files in a folder and return its subfolders."""
    folders: list[str] = []
    if os.path.islink(folder) or not os.path.isdir(folder):
        return folders
    with contextlib.suppress(OSError):
        os.chmod(folder, stat.S_IRWXU)
        with os.scandir(folder) as scan:
            entries = list(scan)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
    return folders
