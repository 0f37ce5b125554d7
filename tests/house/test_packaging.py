"""The wheel holds what the checkout holds. An editable install would hide a missing package; the list would not."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

from support.folders import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_DATA = {".py", ".pyc", ".pyi"}


def folder_of(package: str) -> Path:
    """The source folder of a package by the longest matching entry of package-dir."""
    mapped = max((m for m in SETUPTOOLS["package-dir"] if package == m or package.startswith(f"{m}.")), key=len)
    return ROOT.joinpath(SETUPTOOLS["package-dir"][mapped], *package.removeprefix(mapped).strip(".").split("."))


def test_every_package_is_listed() -> None:
    found = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert found == set(SETUPTOOLS["packages"])


def test_every_python_file_is_in_a_package() -> None:
    folders = {folder_of(package) for package in SETUPTOOLS["packages"]}
    for folder in ("kvbench", "methods", "tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.parent in folders, f"{path.relative_to(ROOT)} is in no listed package"


def test_data_files_are_declared() -> None:
    """Every file beside the code reaches the wheel: by a pattern of its package, relative to that package."""
    data = SETUPTOOLS["package-data"]
    packages = {folder_of(package): package for package in SETUPTOOLS["packages"]}
    for root in ("kvbench", "methods", "tasks"):
        for path in (ROOT / root).rglob("*"):
            if path.is_dir() or path.suffix in NOT_DATA or "__pycache__" in path.parts:
                continue
            home = next(parent for parent in path.parents if parent in packages)
            name = str(path.relative_to(home))
            patterns = [p for p in data["*"] if "/" not in name] + data.get(packages[home], [])
            assert any(fnmatch.fnmatch(name, p) for p in patterns), f"{path.relative_to(ROOT)} is not in the wheel"


def test_what_the_product_needs_at_run_time_is_there() -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (ROOT / "kvbench/tiny" / name).is_file(), name
    assert (ROOT / "kvbench/py.typed").is_file()
    assert (ROOT / "kvbench/config/suites/demo.toml").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_constraints_pin_every_direct_dependency() -> None:
    """Set-up never upgrades torch, and never pulls a build with another set of versions than the one checked here."""
    lines = (ROOT / "constraints/cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"]
    own = next(r for r in extras["dev"] if r.startswith("kvbench["))  # the extras that tests need
    used = [r for extra in own.removeprefix("kvbench[").removesuffix("]").split(",") for r in extras[extra]]
    direct = [*PROJECT["project"]["dependencies"], *(r for r in extras["dev"] if r != own), *used]
    assert len(used) >= 4
    for requirement in direct:
        name = requirement.split(">")[0].split("[")[0].split("=")[0].strip().lower()
        assert name in pinned, f"{name} is not pinned in constraints/cpu.txt"
    assert "torch==2.13.0" in lines
    assert not any("+" in line.split("#")[0] for line in lines), "a local version label exists on one index only"


def test_version_is_the_same_everywhere() -> None:
    from kvbench import __version__

    assert PROJECT["project"]["version"] == __version__


def test_running_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "kvbench", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, f"kvbench {PROJECT['project']['version']}")
