"""The finished training whose weights are the initial values of a new training (`--continue-from`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import find, load_weights, read_card
from kvbench.eviction.api import Weights
from kvbench.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Origin:
    """The weights of a finished training. The new training's settings name them by `sha256`, the hash of their file."""

    weights: Weights
    sha256: str

    @classmethod
    def of(cls, recipe: type[Recipe], place: str) -> Origin:
        """Return the finished training whose weights are in `place`: a weights file, or the folder that holds it.

        Raises UserError for a recipe that cannot start from such weights, SetupError if the file or its card is missing
        or damaged.
        """
        recipe.check_origin(place)
        weights = Weights(kind=recipe.kind, path=place, recipe=recipe.name)
        return cls(weights, str(read_card(find(weights, None)).get("sha256")))

    def load(self, loaded: LoadedModel) -> dict[str, torch.Tensor]:
        """Return the weights as tensors by name. Raises SetupError if they were made for another model."""
        return load_weights(self.weights, None, loaded.model.config, loaded.device, loaded.fingerprint)
