"""Training of a model for the cache that it will have (G-KV, arXiv 2512.00504): what both ways have in common.

All weights are trained, in float32, because steps of 1e-6 would vanish in bfloat16. The answers that a step learns
from were written or read under eviction with the current weights, and the forward pass that has a gradient sees of
them what the evictions left (`kvbench.train.sparse_masks`). Held out is what counts in the end: how many questions the
model answers rightly with an evicted cache and, beside it, with a full one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.fingerprint import fingerprint
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import Base, load_weights, save_weights
from kvbench.engine.rules import KeptLog
from kvbench.errors import UserError, show
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.options import check_budget
from kvbench.records import Request, Sampling
from kvbench.train.gkv_model import save_model
from kvbench.train.recipe import Recipe, Settings, drawing
from kvbench.train.traces import Question

LARGE = 100_000_000  # parameters from which on activations are computed again, unless it is said otherwise


class SparseRecipe(Recipe):
    """A model that learns to work with an evicted cache.

    `settings.more`: method (with its options in brackets), budget, interval, temperature, slots (answers written at
    once), micro (answers in one forward pass with a gradient), recompute (auto, on, off).
    """

    kind, figure, higher = "model", "accuracy", True

    def __init__(self, loaded: LoadedModel, settings: Settings, test: Sequence[Question]) -> None:
        super().__init__(settings)
        self.check_judged(test)
        more = settings.more
        self.check(loaded, more)
        self.method, self.budget = choose.from_label(str(more["method"])), int(more["budget"])
        self.interval, self.micro, self.slots = int(more["interval"]), int(more["micro"]), int(more["slots"])
        self.temperature = float(more["temperature"])
        loaded.model.float().requires_grad_(True)
        self.loaded, self.test = replace(loaded, dtype=torch.float32), test
        self.again = _recompute(str(more["recompute"]), loaded.model)

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        for option, least in (("interval", 1), ("micro", 1), ("slots", 1), ("group", 2)):
            if (value := more.get(option, least)) < least:
                raise UserError(f"--opt {option} must be {least} or more; got {value}.")
        if not more["temperature"] > 0:
            raise UserError(f"--opt temperature must be above 0; got {more['temperature']:g}.")
        method, budget = choose.from_label(str(more["method"])), int(more["budget"])
        if not method.evicts or not method.takes_budget or method.oracle:
            raise UserError(f"method {show(more['method'])} does not evict to a budget; nothing can be learnt from it.")
        check_budget(str(more["method"]), method, budget)
        _recompute(str(more["recompute"]), loaded.model)
        try:
            loaded.model.generation_config.validate(strict=True)
        except ValueError as error:
            why = "; ".join(line[2:] for line in str(error).splitlines() if line.startswith("- "))
            raise UserError(f"the model's generation_config.json could not be saved with it: {why}") from None

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.loaded.model.named_parameters())

    def held_out(self) -> dict[str, float]:
        """Shares of right answers, greedy."""
        full: Method = registry.methods.get("full")()
        return {"accuracy": self._accuracy(self.method, self.budget), "full_accuracy": self._accuracy(full, None)}

    def card(self) -> dict[str, Any]:
        return {"held_out": len(self.test)}

    def write(self, out: Path, *, base: Base, made: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """The model, and beside it the weights that its method has: they were in use while it learned."""
        folder, card = save_model(out / self.kind, self.loaded, base_model=base.name, made=made)
        if (needed := self.method.weights()) is not None:
            config = self.loaded.model.config
            tensors = load_weights(needed, self.loaded.folder, config, "cpu", self.loaded.fingerprint)
            trained = replace(base, fingerprint=fingerprint(self.loaded.model))
            about = {"how": f"those of {base.name}, in use while {self.name} trained this model"}
            save_weights(folder / f"{needed.kind}.safetensors", needed.kind, tensors, trained, made=about)
        return folder, card

    def check_judged(self, questions: Sequence[Question]) -> None:
        """Raises UserError where nobody knows what a right answer is."""
        if any(q.right is None for q in questions):
            raise UserError(f"{self.name} needs to know what is right: give every line of --data a field 'answer'.")

    def drawn(self, step: int, count: int) -> list[int]:
        """Which of `count` items a step's batch has: all of them in a new order, again and again."""
        batch = self.settings.batch
        places = range(step * batch, (step + 1) * batch)
        orders = {}
        for epoch in {place // count for place in places}:
            generator = drawing(self.settings.seed, epoch)
            orders[epoch] = torch.randperm(count, generator=generator).tolist()
        return [orders[place // count][place % count] for place in places]

    def engine(
        self,
        questions: Sequence[Question],
        method: Method,
        budget: int | None,
        samples: int = 1,
        log: KeptLog | None = None,
    ) -> Engine:
        """One for `samples` answers to each question; its cache is to be gone before anything has a gradient."""
        return Engine(
            self.loaded,
            method,
            budget=budget,
            interval=self.interval,
            slots=min(self.slots, len(questions) * samples),
            max_tokens=max(len(q.ids) + q.max_new_tokens for q in questions),
            log=log,
        )

    def _accuracy(self, method: Method, budget: int | None) -> float:
        asked = {q.name: q for q in self.test}
        right = 0
        for answer in self.engine(self.test, method, budget).generate(request(q, q.name) for q in self.test):
            judge = asked[answer.request.doc_id].right
            assert judge is not None
            right += judge(answer.text)
        return right / len(self.test)


def request(
    question: Question, name: str, samples: int = 1, sampling: Sampling | None = None, seed: int = 0
) -> Request:
    """What the engine is asked for a question."""
    return Request(
        task="train",
        doc_id=name,
        prompt_ids=question.ids,
        samples=tuple(range(samples)),
        max_new_tokens=question.max_new_tokens,
        sampling=sampling or Sampling(),
        seed=seed,
    )


def _recompute(word: str, model: Any) -> bool:
    if word not in ("auto", "on", "off"):
        raise UserError(f"--opt recompute must be auto, on or off; got {show(word)}.")
    return word == "on" or (word == "auto" and sum(p.numel() for p in model.parameters()) >= LARGE)
