"""Chooses the methods and budgets that a replay compares: the methods that the user names, and two yardsticks.

If the user names ``all``, every method that can run is chosen. The yardsticks are the methods `random` and `golden`
(the oracle). Without a budget there are no yardsticks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.config.run_config import MethodChoice
from kvbench.engine.attention.geometry import LayerGeometry, largest_group
from kvbench.engine.cache.layout import fit
from kvbench.engine.model.layer_weights import refuse_quantised
from kvbench.engine.model.weights import load_weights
from kvbench.engine.probes import check_probes
from kvbench.errors import KVBenchError
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget, label
from kvbench.eviction.modality import check_images
from kvbench.eviction.options import check_budget

ORACLE, FLOOR = MethodChoice(name="golden"), MethodChoice(name="random")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A method that the replay leaves out because it cannot run at this budget, and the reason.

    The budget is None if the reason is the same at all budgets, or if the method takes no budget.
    """

    method: str
    budget: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One method, with its options, at one budget (None: no budget) in a replay."""

    method: MethodChoice
    budget: Budget | None

    @property
    def columns(self) -> dict[str, Any]:
        """Return the columns method, budget and budget_share, which identify method and budget in every table."""
        share = self.budget if isinstance(self.budget, float) else None
        return {"method": self.method.label, "budget": self.budget if share is None else None, "budget_share": share}

    @property
    def label(self) -> str:
        return f"{self.method.label} {label(self.budget) if self.budget else ''}".strip()


def budget_of(row: Mapping[str, Any]) -> Budget | None:
    """Return a row's budget in the form that the user chose: a number of entries, a share of the prompt, or None."""
    if row["budget_share"] is not None:
        return float(row["budget_share"])
    return None if row["budget"] is None else int(row["budget"])


FULL = Chosen(method=MethodChoice(name="full"), budget=None)


@dataclass(frozen=True, slots=True)
class Target:
    """Checks whether a method can run, from facts about the model and about the sequences to read."""

    geometry: Sequence[LayerGeometry]
    config: Any  # of transformers
    folder: Path | None
    longest: int  # most tokens of a prompt plus its answer
    fingerprint: str | None = None  # known once the model is loaded
    images: bool = False  # whether any prompt has images

    def check(self, choice: MethodChoice, budget: Budget | None) -> None:
        """Raise KVBenchError when the method cannot run on this model at this budget."""
        method = choose.make(choice.name, dict(choice.options))
        check_budget(choice.label, method, budget, group=largest_group(self.geometry))
        method.drafts()
        if self.images:
            check_images(choice.label, method)
        geometry = fit(self.geometry, method, self.longest)
        refuse_quantised(choice.label, method, self.config)
        check_probes(method, self.config)
        if (needed := method.weights()) is not None:
            layers = [g.index for g in geometry if g.evicts]
            load_weights(needed, self.folder, self.config, "cpu", self.fingerprint, layers)


def plan(
    named: Sequence[MethodChoice], every: Sequence[MethodChoice], budgets: Sequence[Budget], target: Target
) -> tuple[list[Chosen], list[LeftOut]]:
    """Return the pairs of method and budget to replay, and the methods to leave out. With budgets, the oracle
    `golden` and the method `random` come first.

    named: methods that must run; raises KVBenchError if one of them cannot. every: other methods, which are left out if
    they cannot run.
    """
    chosen: list[Chosen] = []
    left_out: list[LeftOut] = []
    for choice in dict.fromkeys([ORACLE, FLOOR, *named, *every] if budgets else [*named, *every]):
        sizes: Sequence[Budget | None] = budgets or (None,)
        refused: list[LeftOut] = []
        for size in sizes if choice.takes_budget else (None,):
            try:
                target.check(choice, size)
            except KVBenchError as error:
                if choice in named:
                    raise
                refused.append(LeftOut(method=choice.label, budget=label(size) if size else None, reason=str(error)))
                continue
            chosen.append(Chosen(method=choice, budget=size))
        if len({r.reason for r in refused}) == 1 and len(refused) == len(sizes):
            refused = [LeftOut(method=choice.label, budget=None, reason=refused[0].reason)]
        left_out += refused
    return chosen, left_out
