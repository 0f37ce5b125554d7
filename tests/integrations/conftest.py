"""lm-eval on the built-in model: requests as it makes them, and whole evaluations of kvbench's own YAML tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from support.folders import DATA

TASK_DATA = DATA / "tasks"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.setattr("kvbench.integrations.yaml_tasks._of_model", {})
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def instance() -> Callable[..., Any]:
    """instance("generate_until", (prompt, {...}), doc=0, repeats=1)"""
    from lm_eval.api.instance import Instance

    def make(kind: str, arguments: tuple[Any, ...], doc: int = 0, repeats: int = 1, idx: int = 0, **row: Any) -> Any:
        return Instance(kind, row, arguments, idx, metadata=("t", doc, repeats))

    return make


@pytest.fixture(scope="session")
def evaluate() -> Callable[..., Any]:
    """evaluate("kvbench_chain", {"model": "tiny", ...}, limit=4): lm-eval's results."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    import kvbench.integrations.lm_eval  # noqa: F401
    from kvbench.integrations import TASKS

    def run(task: str, model_args: dict[str, Any], **options: Any) -> Any:
        manager = TaskManager(include_path=TASKS, include_defaults=False, metadata=model_args)
        return lm_eval.simple_evaluate(
            model="kvbench", model_args=model_args, tasks=[task], task_manager=manager, bootstrap_iters=0, **options
        )

    return run
