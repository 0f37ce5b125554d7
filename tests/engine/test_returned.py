"""Results of a method's functions with a wrong name or shape are refused, in both layouts, before they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.models import build, requests

from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import PluginError
from kvbench.eviction.api import Allocation, Column, Method, Needs, ScoreOut, State
from kvbench.eviction.choose import make
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.combined import Combined
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.view import LayerView

Change = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Observer(Method):
    change: Any = None

    def needs(self) -> Needs:
        return Needs(queries="since_last")

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="v"),)

    def states(self) -> tuple[State, ...]:
        return (State(name="s", shape=("kv_heads",)),)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        return self.change(view)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["v"]


@dataclass(frozen=True)
class Scorer(Method):
    change: Any = None

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="v"),)

    def score(self, view: LayerView) -> ScoreOut:
        return ScoreOut(view.columns["v"], self.change(view))


@dataclass(frozen=True)
class Teller(Method):
    change: Any = None

    def columns(self) -> tuple[Column, ...]:
        return (GivenColumn(name="v"),)

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        return self.change(new)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["v"]


@dataclass(frozen=True)
class Divider(Method):
    change: Any = None

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float()

    def quotas(self, allocation: Allocation) -> Any:
        return self.change(allocation)


@dataclass(frozen=True)
class Settler(Method):
    change: Any = None
    joint = True

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float()

    def settled(self, views: Any, outs: list[ScoreOut]) -> Any:
        return self.change(outs)


UNKNOWN = "which is none of its declared names: 's', 'v'."
RESULTS: dict[str, tuple[type[Method], Change, str]] = {
    "no head": (
        Observer,
        lambda v: {"v": v.columns["v"].mean(1)},
        "observe() must return for column 'v' a tensor [b, Hk",
    ),
    "short": (
        Observer,
        lambda v: {"v": v.columns["v"][..., :1]},
        "observe() must return for column 'v' a tensor [b, Hk",
    ),
    "state": (
        Observer,
        lambda v: {"s": v.states["s"][0]},
        "observe() must return for state 's' a tensor [b, *shape] = [",
    ),
    "name": (Observer, lambda v: {"w": v.columns["v"]}, f"observe() returns values for 'w', {UNKNOWN}"),
    "nothing": (Observer, lambda v: None, "observe() must return a dict of tensors by name; got 'NoneType'."),
    "score": (
        Scorer,
        lambda v: {"v": v.columns["v"][:, :1]},
        "score() must return for column 'v' a tensor [b, Hk, N] = [",
    ),
    "tokens": (
        Teller,
        lambda n: {"v": n.hidden.norm(dim=-1)},
        "on_tokens() must return for column 'v' a tensor [b, Hk, t]",
    ),
    "missing": (Teller, lambda n: {}, "on_tokens() must return for column 'v' a tensor [b, Hk, t] = ["),
    "quotas": (
        Divider,
        lambda a: a.held[:, :, :1],
        "quotas() must return a tensor [b, L, Hk] = [1, 1, 2]; got a tensor [1,",
    ),
    "shares": (Divider, lambda a: a.held * 0.5, "quotas() must return integers; got torch.float32."),
    "settled": (Settler, lambda outs: outs[:1], "settled() must return one ScoreOut per layer (3); got 1."),
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return build("qwen3")


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("name", RESULTS)
def test_a_wrong_result_is_refused(loaded: LoadedModel, name: str, layout: str) -> None:
    kind, change, words = RESULTS[name]
    method = kind(change=change)
    if layout == "dense" and not method.uniform:
        pytest.skip("a method with uneven heads needs the paged layout")
    engine = Engine(loaded, method, budget=16, interval=4, slots=1, max_tokens=60, layout=layout)
    with pytest.raises(PluginError) as raised:
        list(engine.generate(requests((30,), (12,), 1)))
    assert str(raised.value).startswith(f"{kind.__name__}.{words}")


def test_the_message_names_the_method_of_a_combination_whose_result_is_wrong(loaded: LoadedModel) -> None:
    wrong = Observer(change=lambda view: {"v": view.columns["v"].mean(1)})
    method = Combined(("snapkv", "observer"), make("snapkv", {"window": 4}), wrong)
    engine = Engine(loaded, method, budget=16, interval=4, slots=1, max_tokens=60)
    with pytest.raises(PluginError, match=r"^Observer\.observe\(\) must return for column 'v'"):
        list(engine.generate(requests((30,), (12,), 1)))


@dataclass(frozen=True)
class Flat(Method):
    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions[:, :1].float()  # one head for all


@pytest.mark.parametrize("wrapper", ["chunkkv", "criticalkv", "ada-kv"])
def test_a_wrapper_checks_the_scores_of_its_base(loaded: LoadedModel, wrapper: str) -> None:
    """Else the wrapper would broadcast them, and give every head the scores of the first."""
    method = make(wrapper, {"base": "streaming-llm" if wrapper == "chunkkv" else "snapkv"})
    method.__dict__["inner"] = Flat()
    engine = Engine(loaded, method, budget=16, interval=4, slots=1, max_tokens=60)
    with pytest.raises(PluginError, match=r"score\(\) must return a tensor \[b, Hk, N\] = "):
        list(engine.generate(requests((30,), (12,), 1)))
