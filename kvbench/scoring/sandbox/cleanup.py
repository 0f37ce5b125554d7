"""Deletes a folder in which a hostile program could write.

`shutil.rmtree` recurses before Python 3.13, and a tree of a few thousand levels ends it; so does a path that got too
long. Here both stay short: what lies two levels deep is moved up one, until nothing does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path


def remove_tree(root: str | Path) -> None:
    """Delete a folder and all in it. What cannot be deleted stays; nothing is raised."""
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
    """Delete the files of a folder; returns its folders."""
    folders: list[str] = []
    if os.path.islink(folder) or not os.path.isdir(folder):
        return folders
    with contextlib.suppress(OSError):
        os.chmod(folder, stat.S_IRWXU)
        with os.scandir(folder) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
    return folders
