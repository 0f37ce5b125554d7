"""The source files that decide which entries a method keeps, and one hash over them.

The files are:

- the method's own module, and those of its base classes;
- the modules that these modules import, directly or indirectly, from `kvbench.methods`, from `kvbench.eviction` and, if
  the method is a plug-in, from the plug-in's own package;
- the same files of every other method that the method contains (both parts of ``snapkv+gkv``, the base of ``ada-kv``);
- the module that chooses entries by score.

The files are read and parsed, never imported. Files of the engine are not hashed: kvbench's version stands for them.
Modules that a plug-in imports from elsewhere are not hashed either.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.eviction.api import Method

SHARED = ("kvbench.methods", "kvbench.eviction")
SELECTION = "kvbench.eviction.select"


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a method: one hash over all its files, and the hash of each file by its label.

    A label is a path such as ``kvbench/methods/gkv.py``. The user may move a plug-in that is a single file, so
    its label has the file's hash in place of a path.
    """

    hash: str
    files: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Module:
    label: str
    sha256: str
    imports: tuple[str, ...]  # see `_imports`


def source_of(method: Method) -> Source:
    """Return the source of a method, which includes the files of the methods that it contains."""
    modules: dict[str, _Module] = {}
    for part in _parts(method):
        for name in (cls.__module__ for cls in type(part).__mro__ if issubclass(cls, Method)):
            own = name.partition(".")[0]
            _follow(name, SHARED if own == "kvbench" else (*SHARED, own), modules)
    _follow(SELECTION, SHARED, modules)
    files = {module.label: module.sha256 for module in sorted(modules.values(), key=lambda module: module.label)}
    lines = "".join(f"{digest}  {label}\n" for label, digest in files.items())
    return Source(hashlib.sha256(lines.encode()).hexdigest()[:12], files)


def _parts(method: Method) -> Iterator[Method]:
    """Yield the method itself and all methods in its fields, such as the two parts of ``snapkv+gkv``."""
    yield method
    for value in vars(method).values():
        if isinstance(value, Method):
            yield from _parts(value)


def _follow(name: str, packages: tuple[str, ...], modules: dict[str, _Module]) -> None:
    """Add a module to `modules`, and all modules of `packages` that it imports, directly or indirectly."""
    if name in modules or (module := _read(name)) is None:
        return
    modules[name] = module
    for imported in module.imports:
        if imported.startswith(tuple(f"{package}." for package in packages)):
            _follow(imported, packages, modules)


@functools.cache
def _read(name: str) -> _Module | None:
    """Read a module's file; return its label, its hash and the names it imports, or None if the module has no file."""
    path = _path(name)
    if path is None:
        return None
    content = path.read_bytes()
    package = path.name == "__init__.py"
    imports = tuple(_imports(ast.parse(content), name, package)) if path.suffix == ".py" else ()
    sha256 = hashlib.sha256(content).hexdigest()
    return _Module(_label(name, path) or f"plug-in {sha256[:12]}", sha256, imports)


def _path(name: str) -> Path | None:
    """Return a module's file; None if it has none. For a module not yet imported, search the folders of its package."""
    if file := getattr(sys.modules.get(name), "__file__", None):
        return Path(file)
    package = next((p for p in (*SHARED, name.partition(".")[0]) if name.startswith(f"{p}.")), name)
    for folder in getattr(sys.modules.get(package), "__path__", ()):
        stem = Path(folder, *name.removeprefix(f"{package}.").split("."))
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if path.is_file():
                return path
    return None


def _label(name: str, path: Path) -> str | None:
    """Return a module's label, such as ``kvbench/methods/gkv.py``, which does not depend on where kvbench is installed.
    None for a plug-in that is a single file."""
    if path.name == "__init__.py":
        return f"{name.replace('.', '/')}/__init__.py"
    return f"{name.replace('.', '/')}{path.suffix}" if path.stem == name.rpartition(".")[2] else None


def _imports(tree: ast.AST, name: str, package: bool) -> Iterator[str]:
    """Yield the full name of everything that a module imports: modules, and objects as ``module.object``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")
                above = parents[: len(parents) + package - node.level]
                base = ".".join([*above, base] if base else above)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
