"""Base of methods with retention gates: trained networks that predict how slowly an entry's worth decays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, get_args

from kvbench.eviction.api import Column, Method, Needs, Protect, option
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.learned import LearnedWeights, Shapes, Sizes, misfit
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.gates import WIDTH, Gate, GateForm, Tie, form_of, log_retention
from kvbench.eviction.terms.retention import log_gain
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


@dataclass(frozen=True)
class Gated(Method):
    """A method that scores an entry by the logarithm of its coming retention (`retention.log_gain`).

    The retention of an entry is multiplied by its beta, at most 1, at each further token. A trained gate gives each new
    entry its log beta. Subclasses choose which entries compete with each other.
    """

    kind = "weights"
    trained = True
    stacked = True
    name: ClassVar[str]  # registered name of the method, and kind of its weights
    usual: ClassVar[GateForm]  # form of the published gates

    gates: str = option("auto", "file with the trained gates; auto: `<method>.safetensors` beside the model's weights")
    gate: Literal["auto", "rg", "rg2", "rg3", "rg10"] = option(
        "auto",
        "form of the gate. rg, rg10: from hidden states, rg10 with one layer more; rg2, rg3: from keys and values; "
        "auto: as in the gates' file",
    )
    tie: Literal["auto", "none", "layers", "layers_and_heads"] = option(
        "auto", "which layers and heads share the gate's last projection; auto: as in the gates' file"
    )
    horizon: int = option(1, "number of coming queries over which an entry's retention is summed", low=1)
    age_offset: int = option(0, "number of tokens that is added to the age of every entry", low=0)
    knorm: bool = option(False, "multiply an entry's summed retention by the norm of its key")
    recent: int = option(0, "newest tokens that always stay", low=0)

    def weights(self) -> LearnedWeights:
        where = {"kind": self.name, "path": self.gates, "recipe": self.name, "option": "gates"}
        return LearnedWeights(**where, what="gate", shapes=self._shapes, check=self._check)

    def columns(self) -> tuple[Column, ...]:
        return (GivenColumn(name="log_beta"),)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def needs(self) -> Needs:
        return Needs(keys=self.knorm)

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        """Return the column `log_beta` of new tokens: the gate computes it once, and every later eviction reads it."""
        return {"log_beta": log_retention(new)}

    def score(self, view: LayerView) -> torch.Tensor:
        age = view.seen[:, None, None] - view.positions + self.age_offset
        score = log_gain(view.columns["log_beta"], age, self.horizon)
        return score + view.keys.float().norm(dim=-1).clamp_min(1e-12).log() if self.knorm else score

    def _shapes(self, model: Sizes) -> Shapes:
        gate = self.usual.gate if self.gate == "auto" else self.gate
        tie = self.usual.tie if self.tie == "auto" else self.tie
        return GateForm(cast(Gate, gate), cast(Tie, tie), min(WIDTH, model["hidden_size"])).shapes(model)

    def _check(self, tensors: Mapping[str, torch.Tensor], model: Sizes) -> str:
        form = form_of(tensors)
        if form is None:
            return f"their tensors are none of the gates {', '.join(get_args(Gate))}"
        for name, wanted, actual in (("gate", self.gate, form.gate), ("tie", self.tie, form.tie)):
            if wanted not in ("auto", actual):
                return f"the method has {name}={wanted}, these weights have {actual}"
        return misfit(tensors, form.shapes(model))
