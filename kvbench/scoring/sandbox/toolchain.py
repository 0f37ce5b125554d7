"""Find the C++ compilers of this machine, and the files that a box for a compiler must contain."""

from __future__ import annotations

import glob
import os
import shutil

from kvbench.scoring.sandbox.plan import machine

PATH = "/usr/local/bin:/usr/bin:/bin"  # where the compiler finds its assembler and linker, after its own folder
_PREFIXES = ("/usr", "/usr/local")  # a compiler searches these for headers and libraries, wherever it lies itself


def compilers() -> list[str]:
    """Return the paths of the user's g++ and of the system's, each if there is one."""
    found = [path for path in (shutil.which("g++"), shutil.which("g++", path=PATH)) if path]
    # The folder without links: a box may lack them. The file's own links stay: a compiler may go by its name.
    places = (os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in found)
    return list(dict.fromkeys(places))


def folders(program: str) -> list[str]:
    """Return the folders from which the compiler `program` reads and executes files: those of the system's compiler,
    folders of the same names in the prefix of `program`, and the folder that holds `program`."""
    own = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    names = ("bin", "include", "lib", "lib32", "lib64", "libexec", f"{machine()}-*")
    patterns = [os.path.join(glob.escape(prefix), name) for prefix in (*_PREFIXES, own) for name in names]
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    places = ("/bin", "/etc/alternatives", os.path.dirname(program), *found)
    return [path for path in dict.fromkeys(places) if os.path.isdir(path)]
