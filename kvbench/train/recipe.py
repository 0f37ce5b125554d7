"""The interface of a recipe: the tensors that it trains, the loss of a step, and figures on held-out data.

The loop (`kvbench.train.loop`) provides the rest: optimiser, schedule, log, checkpoints, processes, weights file.
Importing this module loads no torch, so that a plug-in with a recipe can be listed quickly.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvbench.errors import UserError
from kvbench.eviction.learned import misfit
from kvbench.lazy import torch
from kvbench.train.entry import OPTIMISER
from kvbench.train.entry import Entry as Entry  # plug-ins take these from here
from kvbench.train.entry import Preset as Preset
from kvbench.train.entry import check_choices as check_choices
from kvbench.train.entry import check_least as check_least

if TYPE_CHECKING:
    from kvbench.engine.meta import Answers
    from kvbench.engine.model.load import LoadedModel
    from kvbench.engine.model.weights import Base
    from kvbench.train.generation_memory import Generation
    from kvbench.train.traces import Trace

T = TypeVar("T")
# A figure of a batch for the log: a mean over its items, or the sum and the count of terms whose count varies, such as
# tokens. The loop adds up sums and counts over all parts of the batch; the log has their ratio.
Figure = float | tuple[float, float]
TRAIN_SHORTER = "Give shorter texts or questions, until the longest fits into a window"  # for `check_evicts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings on which the losses of a training depend. A training continues from a checkpoint only if all
    settings except `steps` are equal; `kvbench.train.loop` says when `steps` may differ."""

    steps: int
    lr: float  # peak of AdamW's rate
    schedule: str = OPTIMISER["schedule"]  # course of the rate after a linear warm-up of `warmup` steps: `loop.rate`
    warmup: int = OPTIMISER["warmup"]
    floor: float = OPTIMISER["floor"]  # smallest rate after the warm-up, divided by the peak
    beta2: float = OPTIMISER["beta2"]  # decay of AdamW's mean of squared gradients
    weight_decay: float = OPTIMISER["weight_decay"]
    clip: float = 1.0  # gradients with a larger norm are scaled down to this norm
    batch: int = 8  # items (traces, questions or examples) per step, over all processes
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)  # the recipe's own settings

    @classmethod
    def of(cls, options: Mapping[str, Any], **numbers: Any) -> Settings:
        """Return the settings of a training. options: the optimiser's settings and those of the recipe, by name.
        numbers: other attributes, such as `steps` and `lr`."""
        optimiser = {name: options[name] for name in OPTIMISER if name in options}
        more = {name: value for name, value in options.items() if name not in OPTIMISER}
        return cls(**optimiser, more=more, **numbers)


def drawing(seed: int, number: int) -> torch.Generator:
    """Return a random generator on the CPU that is seeded with the training's seed and a number. The number is, for
    example, that of a step or an epoch."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)


def with_gradient(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a loss with the value and gradients of `loss`, but with a graph that holds no activations of the model.
    The gradients with respect to `parameters` are computed now; the new graph holds only these gradients."""
    parameters = list(parameters)
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
    pulls = [((p - p.detach()) * slope).sum() for p, slope in zip(parameters, slopes) if slope is not None]
    return loss.detach() + torch.stack(pulls).sum()


class Recipe(ABC):
    """The definition of one training: its trained tensors, its loss and its held-out figures.

    Attributes:
        entry: the recipe's defaults and presets; for built-in recipes, `kvbench.train.catalogue` has them.
        name: the recipe's name in ``kvbench train NAME``.
        version: raised on any change of losses, or of the items of a batch. A training continues only from a checkpoint
            of the same version; a checkpoint without a version has version 1.
        kind: the kind of weights that the recipe writes (`kvbench.eviction.api.Weights`).
        figure: the held-out figure that training should improve; higher: whether a larger figure is better.
        trained_at: the names of the budget and interval settings, also for long texts, on which the loss depends.
            A run that uses the weights at other values gets a warning (`kvbench.runner.trained_at`).
        stores: the most bytes of tensors that the recipe may keep in memory (see `stored`).
        at_once: the most items that one call of `loss` gets. Fewer items take less memory; the loop adds up the
            gradients of all calls. None: one call gets all items of the batch that this process computes.
    """

    entry: ClassVar[Entry]
    name: ClassVar[str] = ""
    version: ClassVar[int] = 1
    kind: ClassVar[str] = ""
    figure: ClassVar[str] = "loss"
    higher: ClassVar[bool] = False
    trained_at: ClassVar[tuple[str, ...]] = ()
    stores: ClassVar[int] = sys.maxsize
    at_once: ClassVar[int | None] = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def draw(self, items: Sequence[T], step: int) -> list[T]:
        """Return the items of a step's batch. Every epoch uses each item once, in a new random order."""
        batch = self.settings.batch
        places = range(step * batch, (step + 1) * batch)
        orders = {}
        for epoch in {place // len(items) for place in places}:
            generator = drawing(self.settings.seed, epoch)
            orders[epoch] = torch.randperm(len(items), generator=generator).tolist()
        return [items[orders[place // len(items)][place % len(items)]] for place in places]

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        """Raise UserError if a setting in `more` is invalid or does not fit the model. `prepare` calls it before the
        model answers questions."""
        return None

    @classmethod
    def check_longest(cls, loaded: LoadedModel, more: Mapping[str, Any], longest: int) -> None:
        """Raise UserError if the recipe cannot use texts of up to `longest` tokens. `prepare` calls it for the
        questions to which the recipe itself lets the model generate answers, before other questions are answered."""
        return None

    def about_data(self) -> list[str]:
        """Return notes to the user on the training data, one line each; `prepare` calls it before the first step.
        Raises UserError if there is nothing in the data to learn from."""
        return []

    @classmethod
    def answers(cls, settings: Settings, longest: int) -> Answers:
        """Return the made-up values that code gets when it reads values of a tensor in a rehearsal.

        A rehearsal (`kvbench.train.memory`) runs the code of a training on meta tensors, which have no values. longest:
        number of tokens of the longest item.
        """
        from kvbench.engine.meta import Answers

        return Answers()

    def rehearse_loss(self, share: slice) -> torch.Tensor:
        """Compute the loss of a step in a rehearsal. The computation must take as much memory as `loss`."""
        return self.loss(0, share)[0]

    def rehearse_held_out(self) -> None:
        """Compute the held-out figures in a rehearsal, except the generation of answers (see `generations`)."""
        self.held_out()

    def generations(self) -> Sequence[Generation]:
        """Return how the engine generates answers during steps and for held-out figures; empty if it generates none.
        `kvbench.train.memory` counts the memory of each generation separately from the rehearsal."""
        return ()

    def stored(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the tensors that the recipe keeps in memory for each item that it has read, by the item's name.

        With these tensors, the recipe need not read the item again at later steps. Items whose tensors no longer
        fit into `stores` bytes are missing.
        """
        return {}

    @classmethod
    def check_origin(cls, place: str) -> None:
        """Raise UserError if this recipe cannot start from the weights of the finished training in `place`."""
        return None

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the optimiser changes, by name."""

    @abstractmethod
    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, Mapping[str, Figure]]:
        """Return the mean loss of a part (`share`) of a step's batch, and further figures for the log.

        The figures must have the same names for every part. The loss must depend only on (settings, parameters, step,
        share), so that a resumed training reaches the same losses.
        """

    @abstractmethod
    def held_out(self) -> dict[str, float]:
        """Return figures on held-out data, by name; `Recipe.figure` names the most important one."""

    def after_step(self) -> None:
        """Change parameters after each step of the optimiser, for example clamp them. By default, do nothing."""
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the weights file holds, by name."""
        return {name: tensor.detach() for name, tensor in self.parameters().items()}

    def continue_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin with the tensors of a weights file instead of initial values.

        Raises UserError if a tensor is missing or has another shape. Also raises it if a tensor that is not trained has
        other values in the file than in this recipe.
        """
        own, trained = self.tensors(), self.parameters()
        why = misfit(tensors, {name: tuple(tensor.shape) for name, tensor in own.items()})
        fixed = sorted(own.keys() - trained.keys())
        if other := [] if why else [n for n in fixed if not torch.equal(own[n].cpu(), tensors[n].cpu())]:
            why = f"{other[0]} has other values"
        if why:
            raise UserError(
                f"the weights of --continue-from do not fit the settings of this training: {why}. Give the same --opt "
                "settings as on the card of these weights."
            )
        with torch.no_grad():
            self.put(tensors)

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors of a weights file into the trained tensors (the reverse of `tensors`)."""
        for name, trained in self.parameters().items():
            trained.copy_(tensors[name])

    def card(self) -> dict[str, Any]:
        """Return the facts that this recipe adds to the card of the weights. If the weights have values for every
        layer, but some layers stay untrained, the fact `layers` lists the trained layers; kvbench then refuses to evict
        from other layers."""
        return {}

    def write(self, out: Path, *, base: Base, made: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Write the trained weights below the folder `out`; return their file or folder, and their card. made: facts
        about the training for the card."""
        from kvbench.engine.model.weights import save_weights

        path = out / f"{self.kind}.safetensors"
        return path, save_weights(path, self.kind, self.tensors(), base, made=made)


class TraceRecipe(Recipe):
    """The base class of recipes that train a method's weights on answers of the model or of the data.

    The model is frozen. Subclasses create the tensors to train in `begin`.
    """

    version = 2  # version 1 drew batches with replacement

    def __init__(
        self, loaded: LoadedModel, settings: Settings, traces: Sequence[Trace], held_out: Sequence[Trace]
    ) -> None:
        super().__init__(settings)
        self.check(loaded, settings.more)
        loaded.model.requires_grad_(False)
        self.loaded, self.traces, self.test = loaded, traces, held_out
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Create the tensors to train. The attributes for model, settings and traces are already set."""

    def batch(self, step: int, share: slice) -> list[Trace]:
        return self.draw(self.traces, step)[share]

    def card(self) -> dict[str, Any]:
        return {"traces": len(self.traces), "held_out": len(self.test)}
