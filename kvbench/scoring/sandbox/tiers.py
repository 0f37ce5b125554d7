"""The tiers of the sandbox, strongest first; docs/sandbox.md says what each of them is.

`kvbench.scoring.sandbox.selftest` tests whether a tier works here. Programs cannot write files, except in the tier
"none"; a compiler writes in its own folder only.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from kvbench.scoring.sandbox import inside, interpreter
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.plan import NEEDED, Plan, drop_root, limits, lock, machine, own_tasks
from kvbench.scoring.sandbox.seccomp import AUDIT_ARCH

# The driver's environment; a program sees almost none of it. MALLOC_ARENA_MAX: an arena per thread would fill the
# program's address space.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
_PROBE_SECONDS = 10.0  # for a container service to answer


class Tier(ABC):
    """One way to isolate programs: it gives the command that starts a box, and the lockdown of a program in the box.

    The lockdown consists of the steps by which the program's process gives up its rights.
    """

    name: ClassVar[str]  # the value of the row column `sandbox_tier`
    shared: ClassVar[bool] = False  # one box serves many programs, because it starts slowly
    same_python: ClassVar[bool] = True  # the box contains the Python that runs kvbench
    namespaces: ClassVar[bool] = False  # the box isolates programs even without the lockdown

    def missing(self) -> str:
        """Return why this tier cannot run on this machine; "" if it can."""
        if not sys.platform.startswith("linux"):
            return "needs Linux"
        return "" if machine() in AUDIT_ARCH else f"no system-call table for {machine()}"

    @abstractmethod
    def plan(self, bounds: Limits, packages: Sequence[str] = (), *, tools: Sequence[str] = (), work: str = "") -> Plan:
        """Return the parts of the lockdown for programs with these limits and allowed packages.

        For a compiler: tools: the folders that it may read and execute. work: the folder in which it may make files.
        """

    def command(self, plan: Plan) -> list[str]:
        """Return the command that starts a driver in a box."""
        return [*plan.arguments(), *inside.command(interpreter.program())]

    def environment(self) -> dict[str, str]:
        return _environment(interpreter.prefix())

    def packages(self, names: Sequence[str]) -> list[tuple[str, str]]:
        """Return, for each allowed package that the box has, its name and its folder inside the box."""
        return [(name, folders[0]) for name in names if (folders := interpreter.package(name))]

    def folder(self) -> str:
        """Make a working directory, deleted after use, and return its path; "" in tiers where programs cannot write."""
        return ""

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()


class Bwrap(Tier):
    """Tier bwrap. kvbench starts Bubblewrap with an empty environment; Bubblewrap sets NO_NEW_PRIVS."""

    name, namespaces = "bwrap", True

    def __init__(self) -> None:
        self.program = shutil.which("bwrap") or ""

    def missing(self) -> str:
        return super().missing() or ("" if self.program else "not installed")

    def plan(self, bounds: Limits, packages: Sequence[str] = (), *, tools: Sequence[str] = (), work: str = "") -> Plan:
        root = os.geteuid() == 0
        capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL") if root else ()
        outer = [
            *((part, (part,)) for part in ("--unshare-pid", "--unshare-net", "--unshare-ipc")),
            ("--unshare-uts", ("--unshare-uts", "--hostname", "box")),
            (NEEDED, ("--die-with-parent", *(() if root else ("--unshare-user",)))),
            (NEEDED, tuple(word for name in capabilities for word in ("--cap-add", name))),
            *self._tree(packages, tools, work),
            (NEEDED, tuple(word for pair in _environment("/py").items() for word in ("--setenv", *pair))),
            (NEEDED, ("--chdir", "/")),
        ]
        threads = bounds.threads
        if not root:  # RLIMIT_NPROC also counts driver and bubblewrap; before Linux 5.14, all processes of this user
            old = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 14)
            threads += 2 + (own_tasks() if old else 0)
        # The modes of the folders above do not matter: bubblewrap makes its own.
        files = [os.path.dirname(os.__file__), os.__file__]
        shown = [] if all(os.stat(path).st_mode & 0o004 for path in files) else files
        return Plan(outer=tuple(outer), inner=(*limits(bounds, threads), *drop_root(shown), *lock()))

    def command(self, plan: Plan) -> list[str]:
        program = f"/py/bin/{os.path.basename(interpreter.program())}"
        return [self.program, *plan.arguments(), "--", *inside.command(program)]

    def environment(self) -> dict[str, str]:
        return {}

    def packages(self, names: Sequence[str]) -> list[tuple[str, str]]:
        return [(name, f"/packages/{name}") for name in names if interpreter.package(name)]

    def _tree(self, packages: Sequence[str], tools: Sequence[str], work: str) -> list[tuple[str, tuple[str, ...]]]:
        """Return bubblewrap's arguments that put files into the box: read-only libraries, Python (at /py), allowed
        packages and tools; three devices; and the folder `work`, unless it is "".

        Parent folders are listed first, because only root can read folders that bubblewrap makes implicitly.
        """
        hidden: list[str] = []
        above = [str(parent) for path in (*tools, work) for parent in reversed(Path(path).parents[:-1])]
        parents = dict.fromkeys(("/usr", "/py", "/py/bin", "/dev", "/packages", *above))
        shown = [word for path in parents for word in ("--dir", path)]
        for folder in dict.fromkeys((*interpreter.system_libraries(), *tools)):
            if os.path.islink(folder):
                shown += ["--symlink", os.readlink(folder), folder]
            else:
                shown += ["--ro-bind", folder, folder]
                hidden += interpreter.installed(folder)
        shown += ["--ro-bind", interpreter.program(), f"/py/bin/{os.path.basename(interpreter.program())}"]
        prefix = interpreter.prefix()
        for name in interpreter.folders():
            folder = os.path.join(prefix, name)
            if os.path.isdir(folder):
                shown += ["--ro-bind", folder, f"/py/{name}"]
                hidden += [f"/py/{os.path.relpath(path, prefix)}" for path in interpreter.installed(folder)]
        for name in packages:
            for path in interpreter.package(name):
                shown += ["--ro-bind", path, f"/packages/{os.path.basename(path)}"]
        shown += ["--bind", work, work] if work else []
        for name in ("null", "zero", "urandom"):
            shown += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        cover = [word for path in hidden for word in ("--tmpfs", path, "--remount-ro", path)]
        return [(NEEDED, tuple(shown)), ("covers", tuple(cover)), ("--remount-ro", ("--remount-ro", "/"))]


class Landlock(Tier):
    """Tier landlock: the lockdown alone, with Landlock for files."""

    name = "landlock"

    def missing(self) -> str:
        return super().missing() or ("" if _landlock_version() > 0 else "kernel has none")

    def plan(self, bounds: Limits, packages: Sequence[str] = (), *, tools: Sequence[str] = (), work: str = "") -> Plan:
        folders = [path for name in packages for path in interpreter.package(name)]
        user = drop_root([interpreter.program(), os.path.dirname(os.__file__), os.__file__, *folders])
        threads = bounds.threads + (0 if user else own_tasks())
        shared = (*interpreter.system_libraries(), *filter(interpreter.installed, tools))
        libraries = {os.path.realpath(folder) for folder in shared}
        stores = libraries & set(interpreter.STORES)
        whole = [*stores, *folders, *(tool for tool in tools if tool not in shared)]
        readable = {"libraries": sorted(libraries - stores), "whole": whole, "work": work}
        return Plan(inner=(*limits(bounds, threads), *user, *lock(("privileges", None), ("landlock", readable))))


class Container(Tier):
    """Tier container. It runs the official image of this Python version.

    The image must exist locally, because scoring downloads nothing.
    """

    name, shared, same_python, namespaces = "container", True, False, True
    image: ClassVar[str] = f"python:{sys.version_info[0]}.{sys.version_info[1]}-slim"

    def missing(self) -> str:
        if machine() not in AUDIT_ARCH:
            return f"no system-call table for {machine()}"
        return self._engine[1]

    @functools.cached_property
    def _engine(self) -> tuple[str, str]:
        """Return the path of docker or podman, and "". If neither can be used, return "docker" and the reason."""
        reasons = []
        for name in ("docker", "podman"):
            if engine := shutil.which(name):
                if not _does(engine, "info"):
                    reasons.append(f"{name} does not answer")
                elif not _does(engine, "image", "inspect", self.image):
                    reasons.append(f"{name} has no image {self.image}")
                else:
                    return engine, ""
        return "docker", ", ".join(reasons) or "no docker or podman"

    def plan(self, bounds: Limits, packages: Sequence[str] = (), *, tools: Sequence[str] = (), work: str = "") -> Plan:
        room = str(bounds.memory + (256 << 20))
        outer = (
            ("--network", ("--network", "none")),
            ("--hostname", ("--hostname", "box")),
            (NEEDED, ("--read-only", "--user", "65534:65534", "--cap-drop", "ALL")),
            (NEEDED, ("--pids-limit", str(bounds.threads + 2), "--memory", room, "--memory-swap", room)),
            (NEEDED, tuple(word for name, value in _ENVIRONMENT.items() for word in ("--env", f"{name}={value}"))),
        )
        libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]  # of the image
        readable = {"libraries": libraries, "whole": [], "work": work}
        return Plan(outer=outer, inner=(*limits(bounds, None), *lock(("privileges", None), ("landlock", readable))))

    def command(self, plan: Plan) -> list[str]:
        name = f"kvbench-{os.getpid()}-{secrets.token_hex(4)}"
        head = [self._engine[0], "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--workdir", "/"]
        return [*head, *plan.arguments(), self.image, *inside.command("python3", compiled=False)]

    def environment(self) -> dict[str, str]:
        kept = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINER_HOST")
        return {name: os.environ[name] for name in kept if name in os.environ}

    def packages(self, names: Sequence[str]) -> list[tuple[str, str]]:
        return []  # the image has none

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        assert isinstance(process.args, list)
        _does(self._engine[0], "kill", str(process.args[process.args.index("--name") + 1]))
        process.kill()


class Unsafe(Tier):
    """The tier "none": resource limits, but no isolation. It is used only with --unsafe-run-code."""

    name = "none"

    def missing(self) -> str:
        return "" if os.name == "posix" else "needs Linux or macOS"

    def plan(self, bounds: Limits, packages: Sequence[str] = (), *, tools: Sequence[str] = (), work: str = "") -> Plan:
        threads = bounds.threads + own_tasks()
        steps = ("session", "environment", "descriptors")
        return Plan(inner=(*limits(bounds, threads), *((name, None) for name in steps)))

    def folder(self) -> str:
        return tempfile.mkdtemp(prefix="kvbench-program-")


def _environment(prefix: str) -> dict[str, str]:
    """Return the environment variables of a driver whose Python lies below the folder `prefix`."""
    search = [os.path.join(prefix, folder) for folder in interpreter.shared_library_path()]
    return _ENVIRONMENT | ({"LD_LIBRARY_PATH": ":".join(search)} if search else {})


def _does(*words: str) -> bool:
    """Return whether a command exits with 0 within `_PROBE_SECONDS`."""
    try:
        return subprocess.run(words, capture_output=True, timeout=_PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _landlock_version() -> int:
    import ctypes

    return int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))  # landlock_create_ruleset, VERSION


TIERS: tuple[type[Tier], ...] = (Bwrap, Landlock, Container)
