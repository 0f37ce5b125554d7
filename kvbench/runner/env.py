"""Facts about the environment of a run: versions, git commit, machine.

`device_name`, `devices`, `memory_bytes` and `machine` import torch. The other functions read package metadata and
system files, or run git.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.store import manifest

if TYPE_CHECKING:
    import torch

PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "numpy"),
    *("pandas", "pyarrow", "datasets", "math-verify"),
)
OPTIONAL = ("flash-attn", "triton", "lm-eval", "peft", "pillow")


def version(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compared() -> dict[str, str | None]:
    """Return the installed versions of the packages in `manifest.VERSIONS`, which a continued run must keep."""
    return {name: version(name.removesuffix("_version")) for name in manifest.VERSIONS}


def versions() -> dict[str, str]:
    """Return the versions of kvbench, of Python and of those installed packages that can change results."""
    from kvbench import __version__

    return {"kvbench": __version__, "python": platform.python_version()} | {
        name: v for name in (*PACKAGES, *OPTIONAL) if (v := version(name))
    }


def git_commit() -> str | None:
    """Return the commit of the git work tree that kvbench runs from; None if git is missing, fails or does not track
    kvbench's files. "+changes" is appended if a tracked file differs from the commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)
        commit = git("rev-parse", "--short=12", "HEAD")
        return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None


def memory_bytes() -> int | None:
    """Return how many bytes of memory this process may use (`memory.total`); None if the system does not state it."""
    import torch

    from kvbench.engine import memory

    try:
        return memory.total(torch.device("cpu"))
    except (AttributeError, OSError, ValueError):  # a system without sysconf, or without this name
        return None


def load() -> float | None:
    """Return the machine's load average of the last minute, divided by its number of processor cores; None: unknown."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def code_hash() -> str:
    """Return the SHA-256 of kvbench's own Python files, their names included."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(package.rglob("[!.]*.py")):  # no lock files of editors
        found.update(f"{path.relative_to(package)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def processor() -> str:
    """Return the model name of the processor; if the system reports none, the name of its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    return {"platform": platform.platform(), "processor": processor(), "cores": cores(), "memory_bytes": memory_bytes()}


def device_name(device: torch.device, number: int = 0) -> str:
    """Return ``cpu`` or the GPU's name; for a model that is divided between two GPUs, ``2 x NAME``. number: how many
    GPUs the model is divided among; 0: the model is not divided."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{number} x {name}" if number > 1 else name


def devices() -> list[dict[str, Any]]:
    """Return the visible CUDA devices with their names and memory. Imports torch."""
    import torch

    visible = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        visible.append({"device": f"cuda:{index}", "name": properties.name, "memory_bytes": properties.total_memory})
    return visible
