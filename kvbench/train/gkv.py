"""Trains a model to work with an evicted cache (G-KV, arXiv 2512.00504): the base of `gkv-distill` and `gkv-rl`.

The training changes all weights of the model, or only those of an adapter. The optimiser holds them in float32, because
steps of 1e-6 would vanish in bfloat16. In each step, the model with its current weights first generates or reads
answers under eviction. Then it reads them again in a forward pass with gradients, where masks hide the evicted entries
from later queries (`kvbench.train.sparse_masks`). Two held-out figures are the shares of questions that the model
answers correctly, with an evicted and with a full cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench import registry
from kvbench.engine.attention.geometry import check_evicts, for_lengths, homes, largest_group
from kvbench.engine.cache.layout import entry_budget
from kvbench.engine.loop import Engine
from kvbench.engine.meta import Answers
from kvbench.engine.model.fingerprint import fingerprint
from kvbench.engine.model.load import DTYPES, LoadedModel
from kvbench.engine.model.weights import Base, find, load_weights, read_card, save_weights
from kvbench.engine.rules import KeptLog
from kvbench.errors import UserError, bare, quote
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.options import check_budget
from kvbench.sources.adapters import MERGE
from kvbench.sources.quantised import form_of
from kvbench.train import lora
from kvbench.train.generation_memory import Generation
from kvbench.train.recipe import Recipe, Settings, check_choices, check_least
from kvbench.train.sparse_masks import Lifetimes
from kvbench.train.sparse_pass import RECOMPUTE, recomputes
from kvbench.train.traces import Question
from kvbench.train.trained_model import save_folder, write_model

SHORTER = "Give shorter texts or questions, or a smaller --opt max_tokens, until the longest fits into a window"
ADAPTER = "adapter"  # folder of a trained adapter


class SparseRecipe(Recipe):
    """The base class of recipes that train the model to work with an evicted cache."""

    kind, figure, higher = "model", "accuracy", True
    softness: ClassVar[str] = "temperature"  # name of the option whose value divides the logits

    def __init__(self, loaded: LoadedModel, settings: Settings, test: Sequence[Question]) -> None:
        super().__init__(settings)
        more = settings.more
        self.check(loaded, more)
        self.check_longest(loaded, more, max(len(q.ids) + q.max_new_tokens for q in test))
        self.method = choose.from_label(str(more["method"]))
        self.budget = int(more["budget"]) if self.method.takes_budget else None
        self.interval, self.micro, self.slots = int(more["interval"]), int(more["micro"]), int(more["slots"])
        self.temperature = float(more[self.softness])
        self.lifetimes = Lifetimes(homes(loaded.geometry))
        dtype = DTYPES[more["precision"]]
        for parameter in loaded.model.parameters():
            # Buffers keep their type: RoPE's frequencies, rounded to bfloat16, would move distant positions.
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)
        self.adapter = lora.Lora(loaded.model, more, settings.seed) if more["lora"] else None
        self.loaded, self.test = replace(loaded, dtype=dtype), test
        self.again = recomputes(loaded.model, more["recompute"])
        if (needed := self.method.weights()) is not None:
            # the settings name the weights, because with other weights the method evicts other entries
            sha256 = read_card(find(needed, loaded.folder))["sha256"]
            self.settings = replace(settings, more={**more, "method_sha256": sha256})

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_least(more, interval=1, micro=1, slots=1, group=2)
        check_choices(more, recompute=RECOMPUTE)
        recomputes(loaded.model, more["recompute"])
        if not more[cls.softness] > 0:
            raise UserError(f"--opt {cls.softness} must be above 0; got {more[cls.softness]:g}.")
        method = choose.from_label(str(more["method"]))
        if method.oracle or method.evicts != method.takes_budget:
            name = quote(more["method"])
            raise UserError(
                f"this training cannot use method {name}: the method is an oracle, or evicts without a budget. "
                "Give another method with --opt method=NAME."
            )
        if (form := form_of(loaded.model.config.to_dict())) is not None and form.kept:
            raise UserError(
                f"the model's weights stay quantised ({form.name}), and {cls.name} cannot train them. Give the model's "
                "unquantised repository with --model."
            )
        if any(hasattr(module, "quantization_scheme") for module in loaded.model.modules()):
            # compressed-tensors keeps its scales as parameters, and rounds the inputs of layers without a gradient
            raise UserError(
                f"the model's layers round their inputs as compressed-tensors prescribes, and {cls.name} cannot train "
                "such layers: rounding has no gradient. Give the model's unquantised repository with --model."
            )
        lora.check(loaded.model, method, more)
        budget = int(more["budget"]) if method.takes_budget else None
        check_budget(str(more["method"]), method, budget, word="--opt budget")
        if (needed := method.weights()) is not None:
            read_card(find(needed, loaded.folder))
        try:
            loaded.model.generation_config.validate(strict=True)
        except ValueError as error:
            why = "; ".join(line[2:] for line in str(error).splitlines() if line.startswith("- "))
            raise UserError(
                "the model's generation_config.json is invalid and could not be saved with the trained model; correct "
                f"it first: {why}"
            ) from None

    @classmethod
    def check_longest(cls, loaded: LoadedModel, more: Mapping[str, Any], longest: int) -> None:
        if choose.from_label(str(more["method"])).evicts:
            check_evicts(for_lengths(loaded.geometry, longest), longest, SHORTER)

    def fitting(self, texts: Sequence[tuple[int, int]], what: str) -> int:
        """Return how many of the texts are no longer than the budget, so that nothing is evicted from them. A method
        without a budget has no such limit: the result is 0. texts: for each text, the tokens of its prompt, and the
        tokens of prompt and answer together. what: what a text is, for the error. Raises UserError if all texts fit.
        """
        group = largest_group(self.loaded.geometry)
        limits = [entry_budget(self.method, self.budget, prompt, group) for prompt, _ in texts]
        whole = sum(limit is not None and total <= limit for (_, total), limit in zip(texts, limits))
        if whole == len(texts):
            raise UserError(
                f"every {what} fits into --opt budget={self.budget}, so nothing is evicted and there is nothing to "
                "train. Give longer questions, or a smaller --opt budget."
            )
        return whole

    @classmethod
    def check_origin(cls, place: str) -> None:
        if (Path(place) / ADAPTER).is_dir():
            raise UserError(f"{cls.name} does not continue from an adapter. {MERGE}.")
        raise UserError(
            f"{cls.name} trains a model: to continue, give --model {bare(Path(place) / cls.kind)}, not --continue-from."
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.loaded.model.named_parameters() if p.requires_grad}

    def held_out(self) -> dict[str, float]:
        """Return the share of held-out questions that the model answers correctly, with evicted and with full cache.
        Answers are greedy. If the method does not evict, there is one share, with the full cache."""
        figures = {"accuracy": self._accuracy(self.method, self.budget)}
        if self.method.evicts:
            full: Method = registry.methods.get("full")()
            figures["full_accuracy"] = self._accuracy(full, None)
        return figures

    @classmethod
    def answers(cls, settings: Settings, longest: int) -> Answers:
        budget = int(settings.more["budget"])
        return Answers(number=budget, marked=lambda length: min(budget, length))

    def rehearse_held_out(self) -> None:
        """Do nothing, because held-out figures take memory only while the engine generates answers. A plan counts this
        memory from what `generations` returns."""

    def generations(self) -> Sequence[Generation]:
        longest = max(len(q.ids) + q.max_new_tokens for q in self.test)
        sizes: dict[str, Any] = {"interval": self.interval, "slots": self.slots, "longest": longest}
        full: Method = registry.methods.get("full")()
        return (
            Generation(phase="answers under eviction", method=self.method, budget=self.budget, **sizes),
            Generation(phase="answers with the full cache", method=full, budget=None, **sizes),
        )

    def card(self) -> dict[str, Any]:
        return {"held_out": len(self.test)}

    def write(self, out: Path, *, base: Base, made: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Write the trained model or adapter; return its folder and card. made: facts about the training for the card.

        If the eviction method has weights of its own, also write a copy of these weights, with a card. The copy lies in
        the trained model's folder, and its card has the fingerprint of the trained model. With an adapter, the copy
        lies beside the adapter's folder, and its card has no fingerprint.
        """
        if self.adapter is None:
            folder, card = save_folder(out / self.kind, partial(write_model, self.loaded), base, made=made)
            beside, trained = folder, replace(base, fingerprint=fingerprint(self.loaded.model))
        else:
            write = partial(self.adapter.save, base_model=base.name)
            folder, card = save_folder(out / ADAPTER, write, base, made=made)
            # no fingerprint: it depends on the dtype in which a user merges the adapter
            beside, trained = out, replace(base, fingerprint=None)
        if (needed := self.method.weights()) is not None:
            config = self.loaded.model.config
            tensors = load_weights(needed, self.loaded.folder, config, "cpu", self.loaded.fingerprint)
            how = f"copied from {base.name}; {self.name} used them while it trained this model"
            before = read_card(find(needed, self.loaded.folder)).get("made") or {}
            about = {"how": how} | {name: before[name] for name in ("layers", "trained_at") if name in before}
            save_weights(beside / f"{needed.kind}.safetensors", needed.kind, tensors, trained, made=about)
        return folder, card

    def engine(
        self, questions: Sequence[Question], method: Method, budget: int | None, samples: int, log: KeptLog | None
    ) -> Engine:
        """Return an engine with which the caller can generate `samples` answers to each question. The caller must drop
        the engine before the backward pass, which needs the memory of the engine's cache."""
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
        for answer in self.engine(self.test, method, budget, 1, None).generate(q.request(q.name) for q in self.test):
            right += asked[answer.request.doc_id].is_right(answer.text)
        return right / len(self.test)
