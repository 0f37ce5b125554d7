"""The model that a plan had to load because only its weights show its shape."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from support.runs import configuration, model_folder

from kvbench.engine.attention.geometry import ProbeFailed
from kvbench.engine.model import shape
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError
from kvbench.runner import run_plan
from kvbench.runner.execute import execute
from kvbench.runner.workers.placement import HERE, Placement


class Stops:
    """An executor that notes whether this process still has the model when the first worker starts."""

    name, size, ahead = "stops", 1, 1

    def __init__(self, models: list[weakref.ref[Any]]) -> None:
        self.models = models
        self.held: list[bool] = []

    def start(self, worker: str) -> None:
        self.held = [model() is not None for model in self.models]
        raise SetupError("enough")

    def stop(self, seconds: float) -> None: ...


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """The models that this process loads; their shape cannot be read without weights."""
    loaded: list[weakref.ref[Any]] = []
    real = run_plan.load

    def load(*args: Any, **how: Any) -> LoadedModel:
        model = real(*args, **how)
        loaded.append(weakref.ref(model.model))
        return model

    def fail(config: Any) -> None:
        raise ProbeFailed("only its weights show the layers")

    monkeypatch.setattr(run_plan, "load", load)
    monkeypatch.setattr(shape, "read_shape", fail)
    return loaded


def test_workers_start_when_the_model_of_the_plan_is_gone(
    models: list[weakref.ref[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = Stops(models)
    monkeypatch.setattr(Placement, "executor", lambda *_: stops)
    with pytest.raises(SetupError, match="enough"):
        execute(configuration(model_folder(tmp_path / "model")), out=tmp_path, run_name="r")
    assert stops.held == [False]


def test_one_process_uses_the_model_of_the_plan(models: list[weakref.ref[Any]], tmp_path: Path) -> None:
    config = configuration(model_folder(tmp_path / "model"), limit=1, samples=1, max_new_tokens=2)
    assert execute(config, out=tmp_path, run_name="r", placement=HERE).done == 3
    assert len(models) == 1
