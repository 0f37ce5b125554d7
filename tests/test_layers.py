"""A file imports only from lower layers or its own package, and torch only where it is used, not where names live.

The map names the longest prefix that decides. Imports are read with `ast`, those inside functions included: a lazy
import is still a dependency. Imports under TYPE_CHECKING are not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = {
    "kvbench": 0,  # the package itself: version and public names
    "kvbench.errors": 0,
    "kvbench.lazy": 0,
    "kvbench.records": 0,
    "kvbench.registry": 0,
    "kvbench.terminal": 0,
    "kvbench.streams": 0,
    "kvbench.signals": 0,
    "kvbench.faults": 0,
    "kvbench.problems": 0,
    "kvbench.budget": 0,
    "kvbench.plugins": 0,
    "kvbench.values": 0,
    "kvbench.config": 0,
    "kvbench.settings": 0,
    "kvbench.task": 0,
    "kvbench.hub": 0,
    "kvbench.task_names": 2,
    "kvbench.lm_eval_task": 2,
    "kvbench.lm_eval_source": 2,
    "kvbench.sandbox": 1,
    "kvbench.judge": 2,
    "kvbench.ruler": 2,
    "kvbench.tiny": 0,
    "kvbench.models": 1,
    "kvbench.model_files": 1,
    "kvbench.env": 1,
    "kvbench.stats": 1,
    "kvbench.data": 1,
    "kvbench.prompts": 1,
    "kvbench.reader": 2,
    "kvbench.store": 1,
    "kvbench.store.strict_json": -1,  # knows bytes only; model folders are read with it too
    "kvbench.store.redact": -1,  # knows texts only; `kvbench.terminal` hides keys in what it prints
    "kvbench.synthetic": 1,
    "kvbench.long_prompt": 2,
    "kvbench.math_task": 2,
    "kvbench.synthetic_task": 2,
    "kvbench.scoring": 1,
    "kvbench.scoring.livecodebench": 2,
    "kvbench.scoring.livecodebench_harness": 2,
    "kvbench.eviction": 2,
    "kvbench.tasks": 3,
    "kvbench.methods": 3,
    "kvbench.engine.geometry": 3,
    "kvbench.engine.prompt": 3,
    "kvbench.engine.cache": 3,
    "kvbench.engine.attention": 3,
    "kvbench.engine.sampler": 3,
    "kvbench.engine.fingerprint": 3,
    "kvbench.engine.flash": 3,
    "kvbench.engine.positions": 3,
    "kvbench.engine.model": 3,
    "kvbench.engine.weights": 3,
    "kvbench.engine": 4,
    "kvbench.train": 5,
    "kvbench.train.catalogue": 0,
    "kvbench.train.forced": 6,  # what replay reads
    "kvbench.train.foresight_scorer": 6,  # what its states replay
    "kvbench.train.foresight_states": 6,
    "kvbench.train.foresightkv": 6,
    "kvbench.train.foresightkv_grpo": 6,
    "kvbench.train.gates": 6,  # held-out answers are replayed
    "kvbench.train.gkv_distill": 6,  # its answers are replayed
    "kvbench.method_source": 3,
    "kvbench.work": 4,
    "kvbench.prepare": 5,
    "kvbench.task_data": 5,
    "kvbench.vocabulary": 1,
    "kvbench.progress": 4,
    "kvbench.rows": 5,
    "kvbench.cell_plan": 5,
    "kvbench.run": 5,
    "kvbench.same_run": 5,
    "kvbench.runner": 5,
    "kvbench.cell_run": 5,
    "kvbench.row_writer": 5,
    "kvbench.rescore": 5,
    "kvbench.bench": 5,
    "kvbench.weights_import": 5,
    "kvbench.parity": 5,
    "kvbench.replay": 5,
    "kvbench.audit": 5,
    "kvbench.report": 5,
    "kvbench.integrations": 5,
    "kvbench.commands": 6,
    "kvbench.cli": 7,
    "kvbench.__main__": 8,
}
# Public names and workers that reach up on purpose, each with its reason.
ALLOWED = {
    ("kvbench", "kvbench.engine.hf_cache"),  # kvbench.EvictionCache, imported when asked for
}
TORCH_LAYER = 3


def modules() -> Iterator[tuple[str, Path]]:
    for folder, package in (("kvbench", "kvbench"), ("methods", "kvbench.methods"), ("tasks", "kvbench.tasks")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            yield ".".join(p for p in parts if p != "__init__"), path


def layer(module: str) -> int:
    """The layer of the longest known prefix. A new top-level file must be given one."""
    name = module
    while name not in LAYERS:
        name = name.rpartition(".")[0]
        if name == "kvbench":
            pytest.fail(f"{module} has no layer: add it to LAYERS in {Path(__file__).name}")
    return LAYERS[name]


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


def _package(module: str) -> str | None:
    """``kvbench.parity`` of a module anywhere in it; None for a module that stands alone."""
    name = ".".join(module.split(".")[:2])
    return name if name in MODULES and MODULES[name].name == "__init__.py" else None


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_lower_layers(module: str) -> None:
    for name in imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if not name.startswith("kvbench"):
            continue
        target = name if name in MODULES else name.rpartition(".")[0]
        if target == module or (module, target) in ALLOWED:
            continue
        same_folder = MODULES[target].parent == MODULES[module].parent or (
            _package(target) is not None and _package(target) == _package(module)
        )
        allowed = layer(target) <= layer(module) if same_folder else layer(target) < layer(module)
        assert allowed, f"{module} (layer {layer(module)}) imports {target} (layer {layer(target)})"


@pytest.mark.parametrize("module", MODULES)
def test_torch_only_where_it_is_used(module: str) -> None:
    if layer(module) >= TORCH_LAYER and not module.startswith(
        ("kvbench.methods", "kvbench.tasks", "kvbench.c", "kvbench.report")
    ):
        return
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
