"""Delete a folder in which a hostile program could write.

Before Python 3.13 `shutil.rmtree` recurses: a tree of a few thousand levels ends it, and so does a path that is too
long. Here both stay short: every folder two levels deep is moved up one, until none is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path


def remove_tree(root: str | Path) -> None:
    """Delete a folder and all in it. Never raises; entries that cannot be deleted stay."""
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
        with os.scandir(folder) as scan:
            entries = list(scan)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
    return folders
