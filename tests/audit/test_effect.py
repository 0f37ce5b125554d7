"""The invariant `effect`: a method that ignores its budget fails, and every shipped method passes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.audits import Good, norms
from support.methods import EVICTING, SMALL

from kvbench.audit.invariants.effect import effect
from kvbench.audit.invariants.exam import Exam
from kvbench.audit.invariants.subject import Subject
from kvbench.audit.outcome import Broken, NotApplicable
from kvbench.eviction.api import Method
from kvbench.eviction.choose import make
from kvbench.eviction.view import LayerView


@dataclass(frozen=True)
class Five(Method):
    """Keeps 5 entries at every budget."""

    def score(self, view: LayerView) -> torch.Tensor:
        return norms(view)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        return 5


@dataclass(frozen=True)
class ForgetsWhileDecoding(Five):
    """Keeps the budget of the prompt, and 5 entries later."""

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        assert budget is not None
        return 5 if evictions else budget


@dataclass(frozen=True)
class Inverted(Five):
    """Keeps the fewer entries, the larger the budget."""

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        assert budget is not None
        return max(1, 30 // budget)


@pytest.mark.parametrize(
    ("method", "fact"),
    [
        (Five(), "budgets 6 and 96 keep the same 10 entries after 133 tokens"),
        (ForgetsWhileDecoding(), "budgets 6 and 96 keep .* 10 entries.* after 141 tokens"),
        (Inverted(), "budgets 6 and 96 keep 10 and 2 entries after 133 tokens; the larger budget must keep more"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Method) else "",
)
def test_a_deaf_method_fails_with_the_fact(mqa: Subject, method: Method, fact: str) -> None:
    with pytest.raises(Broken, match=fact):
        effect(Exam(method, mqa), "dense")


def test_equal_logits_fail(mqa: Subject) -> None:
    exam = Exam(Good(), mqa)
    effect(exam, "dense")
    first, second = exam.two_budgets("dense").values()
    second.seen.logits.update(first.seen.logits)
    with pytest.raises(Broken, match=r"budgets 7 and 96 give the same logits in all .* steps"):
        effect(exam, "dense")


@pytest.mark.parametrize("name", EVICTING)
def test_a_shipped_method_answers_to_its_budget(mqa: Subject, name: str) -> None:
    options = {option: value for option, value in SMALL.get(name, {}).items() if option != "draft"}
    exam = Exam(make(name, options), mqa)
    effect(exam, exam.layouts[0])


def test_methods_without_a_budget_are_exempt(mqa: Subject) -> None:
    for label, options in (("full", {}), ("lagkv", {"form": "rate"}), ("kvzap", {"strategy": "threshold"})):
        with pytest.raises(NotApplicable, match=r"evicts nothing|takes no budget"):
            effect(Exam(make(label, options), mqa), "dense")
