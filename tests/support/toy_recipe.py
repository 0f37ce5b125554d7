"""A recipe without a model, for tests of the loop."""

from __future__ import annotations

import time

import torch

from kvbench.train.recipe import Recipe, Settings

CONFIG = {"model_type": "toy", "num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 6}
SETTINGS = Settings(steps=60, lr=0.05, warmup=5, batch=4)


class Line(Recipe):
    """Fits the weights of a linear function from noisy samples that depend on the step alone."""

    name, kind = "line", "headkv"
    wanted = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])

    def __init__(self, settings: Settings, slow: float = 0.0) -> None:
        super().__init__(settings)
        self.slow = slow
        self.importance = torch.zeros(2, 3, requires_grad=True)

    def parameters(self):
        return {"importance": self.importance}

    def loss(self, step, share):
        time.sleep(self.slow)
        generator = torch.Generator().manual_seed(self.settings.seed * 1000 + step)
        x = torch.randn(self.settings.batch, 3, generator=generator)[share]
        error = (x @ (self.importance - self.wanted).T).square().mean()
        return error, {"error": error.item() ** 0.5}

    def held_out(self):
        return {"loss": float((self.importance.detach() - self.wanted).square().mean())}

    def card(self):
        return {"data": "made up"}
