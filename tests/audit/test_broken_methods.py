"""A method that breaks an invariant must be found, by the invariant that is about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.audits import Good, norms, verdicts

from kvbench.audit.invariants import checks as audits
from kvbench.audit.invariants.subject import Subject
from kvbench.eviction.api import Column, Every, Method, Needs, Never, Protect
from kvbench.eviction.choose import make
from kvbench.eviction.view import LayerView

CALLS = [0]  # the module global that a method should not have


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
        return 5


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
        (ReadsInvalid(), {"storage"}, "scores change by .* when invalid entries hold .*use `view.valid`"),
        (ReadsInvalidSlightly(), {"storage"}, "scores change by .* when invalid entries hold 1e4"),
        (TakesStorageForText(), {"storage"}, "when entries are stored in another order"),
        (Leaks(), {"leak", "batch", "storage"}, "kept entries differ when the sequence runs again"),
        (MixesBatch(), {"batch", "storage"}, "without the rest of its batch"),
        (IgnoresBudget(), {"effect", "full"}, "budgets 6 and 96 keep the same 10 entries after 133 tokens"),
        (ExceedsBudget(), {"budget"}, "BudgetViolation: budget exceeded"),
        (ExceedsQuotas(), {"budget"}, "BudgetViolation: budget exceeded"),
        (EvictsWithoutNeed(), {"full"}, "logits differ from the full cache's by"),
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


@dataclass(frozen=True)
class ObservesStorage(Method):
    """The column counts rows of storage."""

    def needs(self) -> Needs:
        return Needs(queries="since_last")

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="row"),)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        rows = torch.arange(view.positions.shape[-1], dtype=torch.float32)
        return {"row": rows.expand(view.positions.shape).clone()}

    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view)


@dataclass(frozen=True)
class InheritsObserve(ObservesStorage):
    pass


@pytest.mark.parametrize("method", [ObservesStorage(), InheritsObserve()], ids=lambda x: type(x).__name__)
def test_what_a_method_observes_is_checked_even_if_inherited(mqa: Subject, method: Method) -> None:
    _, failed = verdicts(method, mqa)
    reasons = [c.reason for c in failed if c.invariant == "storage"]
    assert any("column 'row' changes by" in reason for reason in reasons), failed


@dataclass(frozen=True)
class KeepsAll(Method):
    """Would evict, but for sequences this short."""

    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view)

    def protect(self, budget: int) -> Protect:
        return Protect(prompt=True)

    @property
    def takes_budget(self) -> bool:
        return False

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        return 1000


def test_where_nothing_is_dropped_nothing_is_proved(mqa: Subject) -> None:
    checks = audits.audit([("mine", KeepsAll())], [mqa])
    assert not [c for c in checks if c.verdict == "FAIL"]
    assert {c.invariant for c in checks if c.verdict == "ok"} == {"runs"}
    for name in ("protect", "real", "batch", "leak", "memory", "oracle", "past", "layouts", "generate"):
        reasons = {c.reason for c in checks if c.invariant == name and c.layout != "share"}
        assert reasons == {"the method dropped nothing in sequences this short"}, name


def test_what_is_protected_is_asked_of_the_method(mqa: Subject) -> None:
    @dataclass(frozen=True)
    class ProtectsPrompt(KeepsAll):
        def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
            return prompt_len + 5

    checks = audits.audit([("mine", ProtectsPrompt())], [mqa])
    found = {
        (c.invariant, c.verdict)
        for c in checks
        if c.layout in ("dense", "paged") and c.invariant in ("protect", "real", "oracle")
    }
    assert found == {("protect", "ok"), ("real", "ok"), ("oracle", "ok")}

    # Of two methods, the one that protects may never have evicted: that is not to protect nothing.
    @dataclass(frozen=True)
    class Both(ProtectsPrompt):
        def during(self, phase):  # type: ignore[no-untyped-def]
            return Idle() if phase == "prefill" else Plain()

    @dataclass(frozen=True)
    class Idle(ProtectsPrompt):
        def trigger(self, interval: int) -> Never:
            return Never()

    @dataclass(frozen=True)
    class Plain(ProtectsPrompt):
        def protect(self, budget: int) -> Protect:
            return Protect()

    checks = audits.audit([("mine", Both())], [mqa])
    [reason] = {c.reason for c in checks if c.invariant == "protect" and c.layout == "dense"}
    assert reason == "no eviction met a token that the method protects"


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
