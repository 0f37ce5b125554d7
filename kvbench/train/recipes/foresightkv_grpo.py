"""Second stage of `foresightkv`: group relative policy optimisation over evictions (arXiv 2602.03203).

An answer is read G times; in every reading the method draws its evictions with the current scorer. The reward of a
reading is high if the model predicts the answer nearly as well as with the full cache. Let d be the loss that eviction
adds to a token. The answer's tokens after the first eviction form two groups by the entropy of the model's prediction
with the full cache: `low` are the 80% with the least entropy, `high` are the others. The option `reward` chooses the
reward R:

    squared    minus the mean over low of d^2 [d > 1.5]      the paper's reward
    large      minus the mean over low of d [d > 1.5]
    low        minus the mean over low of d
    high       minus the mean over high of d
    all        minus the mean over all these tokens of d

[d > 1.5] is 1 for a token with d above 1.5, and 0 for other tokens.

    A_g   = (R_g - mean of R) / (standard deviation of R + 1e-8)                 the advantage of reading g
    loss  = policy loss of A_g and log softmax(phi) at the evicted entries (`kvbench.eviction.terms.objectives`)
            + kl * divergence from the initial scorer;      both are means over layers, heads, evictions and entries

phi is the scorer's output, high for entries to evict. Evicted entries are drawn without replacement among the entries
with the largest phi. As in the released code, the loss does not use the exact probability of this draw, but a softmax
over all competing entries. Every draw is used for one update only, so the ratio in the policy loss is 1 and is never
clipped. The gradient of the loss is added up while an answer is read (`kvbench.train.policy_gradient`). The model is
frozen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import find, load_weights, model_fields, read_card
from kvbench.errors import UserError
from kvbench.eviction.terms.foresight import Features, scorer_shapes
from kvbench.eviction.terms.objectives import advantages
from kvbench.registry import methods
from kvbench.train.foresight_scorer import MEASURED, Moments, ScorerRecipe, TrainedScorer
from kvbench.train.foresight_states import Take, TraceReading, ignore
from kvbench.train.policy_gradient import PolicyGradient
from kvbench.train.recipe import check_choices, check_least
from kvbench.train.traces import Trace

REWARDS = ("squared", "large", "low", "high", "all")
LARGE = 1.5  # nats: `squared` and `large` ignore tokens with a smaller d
LOW_SHARE = 0.8  # share of the tokens that form `low`
AUTO = "auto"


class PolicyRecipe(ScorerRecipe):
    """Trains a scorer by the rewards of evictions that it draws itself.

    Held-out figures:
        reward: the mean reward of `group` readings of every held-out trace.
        loss_increase: the mean loss, in nats, that eviction adds to a token after the first eviction.
        loss_ratio: the loss of these tokens under eviction divided by their loss with the full cache.
    """

    name, figure, higher = "foresightkv-grpo", "reward", True

    def begin(self) -> None:
        super().begin()
        more = self.settings.more
        self.before, self.origin = _initial(self.loaded, more["init"], more["features"], self.evictions.layers)
        # The settings identify the initial scorer by its hash, because its path may differ on another machine.
        where = {"init": Path(more["init"]).name, "init_sha256": self.origin["sha256"]}
        self.settings = replace(self.settings, more={**more, **where})
        measured = Moments({name: tuple(t.shape) for name, t in self.before.items()})
        for trace in self.traces[:MEASURED]:
            self.evictions_of(trace).golden(trace, measured.add)
        self.trained = TrainedScorer.of(self.before, measured)
        self._full: dict[str, TraceReading] = {}

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        super().check(loaded, more)
        check_choices(more, reward=REWARDS)
        check_least(more, group=2, clip=0, kl=0)
        _initial(loaded, more["init"], more["features"])

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        first = 1 + self.settings.batch * step
        drawn = list(enumerate(self.draw(self.traces, step), start=first))[share]
        losses, rewards, divergences, more = [], [], [], self.settings.more
        for number, trace in drawn:
            policy = PolicyGradient(self.trained.scorer(), self.before, more["group"], more["clip"])
            reward = self._rewards(trace, self._drawn(trace, number, policy.add))
            loss, divergence = policy.loss(advantages(reward), more["kl"])
            losses.append(loss)
            rewards.append(float(reward.mean()))
            divergences.append(float(divergence))
        figures = {"reward": sum(rewards) / len(drawn), "kl": sum(divergences) / len(drawn)}
        return torch.stack(losses).mean(), figures

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        rewards, more, base = [], 0.0, 0.0
        tokens = 0
        for trace in self.test:
            reading = self._drawn(trace, 0, ignore)
            rewards.append(float(self._rewards(trace, reading).mean()))
            first = _first(trace, reading)
            full = self._full_reading(trace).losses[0, first:]
            base += float(full.sum())
            more += float((reading.losses[:, first:] - full).mean(dim=0).sum())
            tokens += len(full)
        figures = {"loss_increase": more / tokens, "loss_ratio": 1 + more / base}
        return {"reward": sum(rewards) / len(rewards)} | figures

    def card(self) -> dict[str, Any]:
        return super().card() | {"began_with": dict(self.origin)}

    def stored(self) -> dict[str, list[torch.Tensor]]:
        return {name: [reading.losses, reading.entropy] for name, reading in self._full.items()}

    def _drawn(self, trace: Trace, number: int, take: Take) -> TraceReading:
        """Read a trace `group` times; each time the scorer draws other evictions. number: determines, together with the
        training's seed, the seeds of the draws. take: called with each eviction."""
        group = self.settings.more["group"]
        seeds = [(self.settings.seed << 32) + number * group + i for i in range(group)]
        return self.evictions_of(trace).drawn(trace, seeds, self.trained.scorer(), take)

    def _full_reading(self, trace: Trace) -> TraceReading:
        if trace.name not in self._full:
            self._full[trace.name] = self.evictions_of(trace).full(trace)
        return self._full[trace.name]

    def _rewards(self, trace: Trace, reading: TraceReading) -> torch.Tensor:
        """Return the rewards [G] of the G readings of a trace. reading: the record of these readings."""
        full, first = self._full_reading(trace), _first(trace, reading)
        added = reading.losses[:, first:] - full.losses[:, first:]
        return rewards(added, full.entropy[0, first:], self.settings.more["reward"])


def rewards(added: torch.Tensor, entropy: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the rewards [G] of G readings of one trace. added: [G, m], the loss that eviction adds to each of m
    tokens. entropy: [m], the entropy of the predictions with the full cache. kind: the value of the option `reward`."""
    order = entropy.argsort(stable=True)
    low = max(1, int(LOW_SHARE * len(order)))
    picked = {"all": order, "high": order[low:]}.get(kind, order[:low])
    if not len(picked):
        return added.new_zeros(len(added))
    d = added[:, picked]
    if kind in ("squared", "large"):
        d = torch.where(d > LARGE, d * d if kind == "squared" else d, 0.0)
    return -d.mean(dim=1)


def _first(trace: Trace, reading: TraceReading) -> int:
    """Return the index, within the answer, of the first token that the model predicts after an eviction."""
    return reading.unevicted - len(trace.prompt) + 1


def _initial(
    loaded: LoadedModel, location: str, features: Features, layers: Collection[int] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load the initial scorer. Return its tensors, and its hash and training command for the card.

    location: the option `init`, a path or "auto" (the model's folder). layers: the layers from which the training
    evicts entries. Raises UserError if "auto" finds no scorer, or if the scorer is untrained in one of `layers`.

    For a model on the meta device (a memory plan), this function reads no file. The tensors then have no values, the
    hash is "", and there is no command.
    """
    if loaded.device.type == "meta":  # in a memory plan only the scorer's size counts
        shapes = scorer_shapes(features, model_fields(loaded.model.config))
        return {name: torch.empty(shape, device=loaded.device) for name, shape in shapes.items()}, {"sha256": ""}
    method = methods.get("foresightkv")(features=features, scorer=location)
    weights = method.weights()
    beside = loaded.folder / f"{weights.kind}.safetensors" if loaded.folder else None
    if location == AUTO and not (beside and beside.is_file()):
        raise UserError(
            "foresightkv-grpo begins with a trained scorer, and the model's folder has none; "
            "train one with 'kvbench train foresightkv', then give --opt init=PATH."
        )
    config, device = loaded.model.config, loaded.device
    tensors = load_weights(weights, loaded.folder, config, device, loaded.fingerprint, layers)
    card = read_card(find(weights, loaded.folder))
    return tensors, {"sha256": card["sha256"], "command": card["made"].get("command", "")}
