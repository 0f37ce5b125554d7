"""A room imports itself and the rooms below it, and torch only where it is used, not where names live.

`FLOORS` is the floor plan, the lowest floor first; rooms of one floor do not know each other. A room is a module or
folder of `kvbench/`. Imports are read with `ast`, those inside functions included: a lazy import is still a dependency.
Imports under TYPE_CHECKING are not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.folders import ROOT

FLOORS = """
    errors records lazy task
    console
    registry store tiny
    sources
    scoring
    eviction
    taskkit
    methods tasks
    config
    engine
    report runner
    replay integrations
    train audit compare
    cli
    __main__
"""
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS.split("\n")) for room in rooms.split()} | {"kvbench": 0}
UPWARDS = {
    ("kvbench", "integrations"): "kvbench.EvictionCache is a public name; it is imported when it is asked for",
}
WITH_TORCH = {"engine", "runner", "replay", "train", "audit", "integrations"}  # at module level


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in (("kvbench", "kvbench"), ("methods", "kvbench.methods"), ("tasks", "kvbench.tasks")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            yield ".".join(p for p in parts if p != "__init__"), path


MODULES = dict(modules())


def imports(tree: ast.AST, *, inside_functions: bool = True) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from imports(other, inside_functions=inside_functions)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif inside_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node, inside_functions=inside_functions)


def imported(module: str, *, inside_functions: bool = True) -> set[str]:
    """The modules of kvbench that a module imports."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    names = {n for n in imports(tree, inside_functions=inside_functions) if n.split(".")[0] == "kvbench"}
    return {n if n in MODULES else n.rpartition(".")[0] for n in names} - {module}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def test_every_room_has_its_floor() -> None:
    assert {room(module) for module in MODULES} == set(FLOOR)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_lower_floors(module: str) -> None:
    here = room(module)
    for there in sorted({room(target) for target in imported(module)} - {here}):
        assert FLOOR[there] < FLOOR[here] or (here, there) in UPWARDS, f"{module} imports {there}, which is not below"


def test_no_import_goes_round_in_a_circle() -> None:
    """A module whose imports at module level lead back to itself loads in one order only."""
    after = {module: imported(module, inside_functions=False) for module in MODULES}
    left = set(MODULES)
    while loose := {module for module in left if not after[module] & left}:
        left -= loose
    assert not left


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) not in WITH_TORCH])
def test_torch_only_where_it_is_used(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    heavy = [n for n in imports(tree, inside_functions=False) if n.split(".")[0] in ("torch", "transformers")]
    assert not heavy, (
        f"{module} imports {heavy[0]} at module level; methods use kvbench.lazy, others import it in a function"
    )


def test_an_upward_import_is_found() -> None:
    tree = ast.parse(
        "def f():\n    from kvbench.cli import main\nif TYPE_CHECKING:\n    import torch\nclass C:\n    import numpy"
    )
    assert list(imports(tree)) == ["kvbench.cli.main", "numpy"]
    assert list(imports(tree, inside_functions=False)) == ["numpy"]
