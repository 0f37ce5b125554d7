"""Find the files of the running Python that a box must contain.

A box contains the interpreter without installed packages, so `import kvbench` fails there. A task may allow packages by
name; the box then contains these packages too.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

STORES = ("/nix/store", "/gnu/store")  # one folder per package
_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", *STORES)


def program() -> str:
    """Return the path of the real Python executable, not of a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def folders() -> list[str]:
    """Return the names of the folders in Python's `prefix` that hold the standard library and the interpreter's
    libraries."""
    return sorted({"lib", sys.platlibdir})


def prefix() -> str:
    return os.path.realpath(sys.base_prefix)


def shared_library_path() -> list[str]:
    """Return the names of the folders in Python's `prefix` that may hold the interpreter's shared library; [] if it has
    none."""
    return folders() if sysconfig.get_config_var("Py_ENABLE_SHARED") else []


def system_libraries() -> list[str]:
    """Return the folders of shared libraries on this system; some may be links."""
    return [folder for folder in _SYSTEM if os.path.isdir(folder)]


def installed(folder: str) -> list[str]:
    """Return the folders with installed packages, of any Python 3 version, below a library folder."""
    return [
        path
        for name in ("site-packages", "dist-packages")
        for path in glob.glob(f"{glob.escape(folder)}/python3*/{name}")
        if os.path.isdir(path) and not os.path.islink(path)
    ]


@functools.cache
def package(name: str) -> tuple[str, ...]:
    """Return a package's folder and, if it exists, the folder of the libraries that the package bundles. The result is
    () if the package is not installed or is a single file."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = os.path.realpath(next(iter(spec.submodule_search_locations)))
    return tuple(path for path in (folder, f"{folder}.libs") if os.path.isdir(path))


def readable_by_others(paths: Sequence[str]) -> bool:
    """Return whether every user may read these paths, by the modes of the files and of the folders above them."""
    for path in map(Path, paths):
        if not path.stat().st_mode & 0o004:
            return False
        if not all(above.stat().st_mode & 0o001 for above in path.resolve().parents):
            return False
    return True
