"""A method or an engine that breaks an invariant must be found, by the invariant that is about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvbench.audit import audit as audits
from kvbench.audit.outcome import Check
from kvbench.audit.subject import Subject, random_subject
from kvbench.engine.dense import DenseStore
from kvbench.engine.hf_cache import EvictionCache
from kvbench.engine.paged import PagedStore
from kvbench.eviction import select
from kvbench.eviction.api import Every, Method, Protect, ScoreOut
from kvbench.eviction.choose import make
from kvbench.eviction.view import LayerView

CALLS = [0]  # the module global that a method should not have


@pytest.fixture(scope="module")
def mqa(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    torch.set_num_threads(1)
    return random_subject("mqa", tmp_path_factory.mktemp("audit"))


def verdicts(method: Method, subject: Subject) -> tuple[set[str], list[Check]]:
    """Names of the invariants that fail, and those checks."""
    failed = [c for c in audits.audit([("mine", method)], [subject]) if c.verdict == "FAIL"]
    return {c.invariant for c in failed}, failed


def norms(view: LayerView) -> torch.Tensor:
    return view.keys.norm(dim=-1)


@dataclass(frozen=True)
class Good(Method):
    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        return norms(view)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=2, recent=4)


def test_a_good_method_holds_everything(mqa: Subject) -> None:
    assert verdicts(Good(), mqa) == (set(), [])


@dataclass(frozen=True)
class ReadsInvalid(Method):
    """The mean over all rows counts rows that do not exist."""

    scope = "layer"

    def score(self, view: LayerView) -> torch.Tensor:
        return -(view.keys - view.keys.mean(dim=2, keepdim=True)).norm(dim=-1)


@dataclass(frozen=True)
class ReadsInvalidSlightly(Method):
    """Order and so decisions stay; the scores do not."""

    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view) / norms(view).nan_to_num().sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class TakesStorageForText(Method):
    """The first rows for the oldest tokens."""

    def score(self, view: LayerView) -> torch.Tensor:
        return torch.arange(view.positions.shape[-1], dtype=torch.float32).expand(view.positions.shape) % 7


@dataclass(frozen=True)
class Leaks(Method):
    """Scores depend on how many there were before."""

    def score(self, view: LayerView) -> torch.Tensor:
        CALLS[0] += 1
        return torch.sin(norms(view) * 100 * CALLS[0])


@dataclass(frozen=True)
class MixesBatch(Method):
    """Scores depend on the other sequences that are evicted at the same time."""

    def score(self, view: LayerView) -> torch.Tensor:
        return torch.sin(norms(view) * 50 + len(view.seen))


@dataclass(frozen=True)
class IgnoresBudget(Method):
    """Always the same number of entries, whatever is allowed."""

    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        return 20


@dataclass(frozen=True)
class ExceedsBudget(IgnoresBudget):
    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        return (budget or 0) + 3


@dataclass(frozen=True)
class ExceedsQuotas(Good):
    scope = "layer"

    def quotas(self, allocation):  # type: ignore[no-untyped-def]
        return torch.full_like(allocation.held, allocation.budget + 1).minimum(allocation.held)


@dataclass(frozen=True, slots=True)
class Eager(Every):
    def full(self, held: float, budget: int) -> bool:
        return held > 20


@dataclass(frozen=True)
class EvictsWithoutNeed(Method):
    """Halves a cache that has not reached its budget."""

    scope = "layer"

    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view)

    def trigger(self, interval: int) -> Every:
        return Eager(interval)

    def quotas(self, allocation):  # type: ignore[no-untyped-def]
        return (allocation.held // 2).clamp(max=allocation.budget)


@dataclass(frozen=True)
class Crashes(Method):
    def score(self, view: LayerView) -> torch.Tensor:
        raise ValueError("no such luck")


@dataclass(frozen=True)
class ReturnsNan(Method):
    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view) * float("nan")


@pytest.mark.parametrize(
    ("method", "expected", "reason"),
    [
        (ReadsInvalid(), {"storage"}, "scores change by .* beside rows that are not valid"),
        (ReadsInvalidSlightly(), {"storage"}, "scores change by .* beside rows that are not valid and hold 1e4"),
        (TakesStorageForText(), {"storage"}, "in another storage order"),
        (Leaks(), {"leak", "batch", "storage"}, "entries kept differently the second time"),
        (MixesBatch(), {"batch", "storage"}, "without the other sequences of the batch"),
        (IgnoresBudget(), {"effect", "full"}, "budgets 24 and 40 keep the same 40 entries of the prompt"),
        (ExceedsBudget(), {"budget"}, "BudgetViolation: budget exceeded"),
        (ExceedsQuotas(), {"budget"}, "BudgetViolation: budget exceeded"),
        (EvictsWithoutNeed(), {"full"}, "logits differ by"),
        (Crashes(), {"runs"}, r"ValueError: no such luck \(test_broken_methods.py, line \d+\)"),
        (ReturnsNan(), {"runs"}, "BudgetViolation: the method returned NaN scores"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Method) else "",
)
def test_a_broken_method_fails(mqa: Subject, method: Method, expected: set[str], reason: str) -> None:
    CALLS[0] = 0
    names, failed = verdicts(method, mqa)
    assert expected <= names  # what else notices depends on how the engine groups sequences
    assert any(re.search(reason, c.reason) for c in failed if c.invariant in expected), failed


def test_an_engine_that_evicts_protected_entries(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "protected", lambda *a, **k: None)
    names, failed = verdicts(Good(), mqa)
    assert names == {"protect"}
    assert "protected entries evicted, first at position" in failed[0].reason


def test_an_engine_that_stores_wrong_positions(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = DenseStore.complete

    def shifted(self, batch):  # type: ignore[no-untyped-def]
        complete(self, batch)
        self.positions -= 1

    monkeypatch.setattr(DenseStore, "complete", shifted)
    names, _ = verdicts(Good(), mqa)
    assert {"real", "oracle", "layouts"} <= names


def test_an_engine_that_compacts_wrongly(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    compact = PagedStore.compact

    def keys_left_behind(self, batch, keep):  # type: ignore[no-untyped-def]
        before = self.pool.keys.clone()
        compact(self, batch, keep)
        self.pool.keys.copy_(before)

    monkeypatch.setattr(PagedStore, "compact", keys_left_behind)
    names, failed = verdicts(Good(), mqa)
    assert {"oracle", "layouts"} <= names
    assert {c.layout for c in failed if c.invariant == "oracle"} == {"paged"}


def test_an_engine_that_loses_pages(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    clear = PagedStore.clear

    def forgetful(self, slot):  # type: ignore[no-untyped-def]
        clear(self, slot)
        self.pool.free.pop()

    monkeypatch.setattr(PagedStore, "clear", forgetful)
    _, failed = verdicts(Good(), mqa)
    assert any(c.invariant == "memory" and "free, of" in c.reason for c in failed)


def test_an_engine_that_frees_nothing(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = PagedStore.reserve
    monkeypatch.setattr(
        PagedStore,
        "reserve",
        lambda self, slots, lengths: reserve(self, slots, lengths.clip(self.pages[slots] * 16)),
    )
    _, failed = verdicts(Good(), mqa)
    assert any(c.invariant == "memory" and c.layout == "paged" for c in failed)


def test_a_prompt_that_reads_its_evicted_cache(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill is another experiment: its later chunks see an evicted cache, and the audit must notice."""
    from kvbench.audit import trial

    engine = trial.Engine
    monkeypatch.setattr(trial, "Engine", lambda *a, **k: engine(*a, **k | {"prefill": "chunked"}))
    names, _ = verdicts(Good(), mqa)
    assert "past" in names
    assert "oracle" not in names  # the masks say what happened


def test_a_bridge_with_another_interval(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.audit import case

    monkeypatch.setattr(case, "EvictionCache", lambda *a, **k: EvictionCache(*a, **k | {"interval": 5}))
    names, failed = verdicts(Good(), mqa)
    assert names == {"generate"}
    assert "tokens differ from step" in failed[0].reason


def test_weights_that_cannot_be_drawn_are_told(mqa: Subject) -> None:
    from kvbench.eviction.api import Weights

    @dataclass(frozen=True)
    class Learned(Good):
        def weights(self) -> Weights:
            return Weights(kind="unheard-of")

    checks = audits.audit([("mine", Learned())], [mqa])
    assert {(c.verdict, "unheard-of" in c.reason) for c in checks} == {("n/a", True)}


def test_tables_and_drafts_are_supplied(mqa: Subject) -> None:
    method, loaded = mqa.serve(make("headkv", {}))
    table = method.options()["table"]
    assert Path(table).is_file()
    assert loaded.folder == Path(table).parent
    draft = mqa.serve(make("speckv+h2o", {}))[0].options()["speckv.draft"]
    assert (Path(draft) / "model.safetensors").is_file()
