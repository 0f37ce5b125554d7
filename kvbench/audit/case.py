"""One method on one model: the generations that its invariants look at, each made when it is first asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch

from kvbench.audit.outcome import Broken, NotApplicable, Stopped
from kvbench.audit.subject import Subject
from kvbench.audit.trial import Bench, Trial
from kvbench.engine.hf_cache import EvictionCache
from kvbench.engine.layout import fit
from kvbench.engine.loop import rules_for
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.errors import SetupError, UserError
from kvbench.eviction import noise
from kvbench.eviction.api import Method
from kvbench.eviction.choose import make
from kvbench.records import Request, Sampling

AuditLayout = Literal["dense", "paged"]

INTERVAL = 8
SLOTS = 2  # fewer than samples, so that slots are refilled
SMALLEST_BUDGET = 24
SHORT, MIDDLE, LONG = -6, 12, 37  # prompt lengths, beyond the budget
OUTPUT = 26
MORE_BUDGET = 16  # what the second of two budgets has more


class Case:
    """Raises NotApplicable where the method cannot serve the model at all."""

    def __init__(self, method: Method, subject: Subject) -> None:
        self.subject = subject
        self.method, self.loaded = subject.serve(method)
        self.group = max((g.group for g in self.loaded.geometry), default=1)
        copies = self.group if self.method.per_query_head else 1
        self.copies = copies
        size = max(SMALLEST_BUDGET, (self.method.min_budget() + 8) * copies)
        self.size = size - size % copies
        self.budget = self.size if self.method.takes_budget else None
        self.max_tokens = self.size + LONG + OUTPUT
        if self.max_tokens > self.loaded.context:
            raise NotApplicable(
                f"needs sequences of {self.max_tokens} tokens, the model's context has {self.loaded.context}"
            )
        try:
            geometry = fit(self.loaded.geometry, self.method, self.max_tokens)
            rules_for(self.method, self.loaded)  # its weights, if it needs any, belong to this model
        except (UserError, SetupError) as error:
            raise NotApplicable(str(error)) from None
        self.evicting = [g for g in geometry if g.evicts]
        self.requests = self._requests()
        self._made: dict[Any, Any] = {}

    @property
    def layouts(self) -> tuple[AuditLayout, ...]:
        return ("dense", "paged") if self.method.uniform else ("paged",)

    @property
    def growth(self) -> int | None:
        return self.method.during("decode").trigger(INTERVAL).growth

    def main(self, layout: AuditLayout) -> Trial:
        """All requests, on fewer slots than samples. Raises Stopped."""
        return self._once(("main", layout), lambda: self._bench(layout).run(self.requests))

    def backwards(self, layout: AuditLayout) -> Trial:
        """The same in another order: other neighbours, other slots."""
        return self._once(("backwards", layout), lambda: self._bench(layout).run(self.requests[::-1]))

    def repeated(self, layout: AuditLayout) -> tuple[Trial, Trial, Trial]:
        """One sequence, another, and the first again, each alone in the same engine."""
        a, b = (replace(request, samples=(0,)) for request in (self.requests[0], self.requests[-1]))

        def make_three() -> tuple[Trial, Trial, Trial]:
            bench = self._bench(layout)
            return bench.run([a]), bench.run([b]), bench.run([a])

        return self._once(("repeated", layout), make_three)

    def larger(self, layout: AuditLayout) -> Trial:
        """The prompt of the first request at a larger budget."""
        request = replace(self.requests[0], max_new_tokens=2, samples=(0,))
        return self._once(
            ("larger", layout), lambda: self._bench(layout, self.size + MORE_BUDGET * self.copies).run([request])
        )

    def unlimited(self, layout: AuditLayout) -> Trial:
        """All requests at a budget that no sequence reaches."""
        return self._once(
            ("unlimited", layout), lambda: self._bench(layout, (self.max_tokens + 1) * self.copies).run(self.requests)
        )

    def full(self) -> Trial:
        """All requests with the full cache, made once for all methods on this model."""
        full = make("full", {})
        made = self.subject.full
        if self.size not in made:
            options = dict(budget=None, interval=INTERVAL, slots=SLOTS, max_tokens=self.max_tokens)
            made[self.size] = Bench(self.loaded, full, **options).run(self.requests)  # type: ignore[arg-type]
        trial: Trial = made[self.size]
        return trial

    def dense(self, trial: Trial, layout: AuditLayout, request: Request, sample: int, *, masked: bool) -> torch.Tensor:
        """[T, V] logits of one dense forward pass over a sequence, under the logged masks or without any."""
        keys = self.keys(request, sample)
        ids = [*request.prompt_ids, *trial.done[request.doc_id, sample].token_ids[:-1]]
        history = trial.history if masked else KeptHistory()
        return self._once(("logits", layout, masked, *keys), lambda: dense_logits(self.loaded, ids, history, keys))

    def keys(self, request: Request, sample: int) -> list[int]:
        return [noise.signed64(request.noise_key(s)) for s in (-1, sample)]

    def greedy(self) -> tuple[list[int], list[int]]:
        """Greedy tokens of the engine, and of `model.generate` with an `EvictionCache`."""
        # The bridge names its sequences so, and noise is a hash of these names.
        request = replace(
            self.requests[0], task="generate", doc_id="0", samples=(0,), sampling=Sampling(), max_new_tokens=OUTPUT
        )
        trial = self._bench(self.layouts[0], slots=1).run([request])
        model, vocabulary = self.loaded.model, self.loaded.model.get_input_embeddings().weight.shape[0]
        config = copy.deepcopy(model.generation_config)
        config.eos_token_id, config.pad_token_id = vocabulary, 0  # no token: None would be filled in by the model's
        config.max_new_tokens, config.do_sample = OUTPUT, False
        ids = torch.tensor([list(request.prompt_ids)], device=self.loaded.device)
        try:
            cache = EvictionCache(
                model,
                self.method,
                budget=self.budget,
                interval=INTERVAL,
                max_tokens=self.max_tokens,
                tokenizer=self.loaded.tokenizer,
            )
        except SetupError as error:
            raise NotApplicable(str(error)) from None
        with cache:
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                past_key_values=cache,
            )
        return list(trial.done["0", 0].token_ids), out[0, ids.shape[1] :].tolist()

    def _bench(self, layout: AuditLayout, budget: int | None = None, slots: int = SLOTS) -> Bench:
        return Bench(
            self.loaded,
            self.method,
            budget=(budget or self.budget) if self.method.takes_budget else None,
            interval=INTERVAL,
            slots=slots,
            max_tokens=self.max_tokens,
            layout=layout,
        )

    def _once(self, key: Any, work: Callable[[], Any]) -> Any:
        """The result of the work, or the error that it ended with, remembered."""
        if key not in self._made:
            try:
                self._made[key] = work()
            except (Broken, NotApplicable):
                raise
            except Exception as error:
                self._made[key] = Stopped(error)
        found = self._made[key]
        if isinstance(found, Stopped):
            raise found
        return found

    def _requests(self) -> list[Request]:
        """Prompts above and below the budget; the first with two samples, which are evicted together."""
        vocabulary = self.loaded.model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(1)
        lengths = {"long": (LONG, (0, 1)), "short": (SHORT, (0,)), "middle": (MIDDLE, (0,))}
        return [
            Request(
                task="audit",
                doc_id=name,
                prompt_ids=tuple(torch.randint(0, vocabulary, (self.size + beyond,), generator=generator).tolist()),
                samples=samples,
                max_new_tokens=OUTPUT,
                sampling=Sampling(temperature=1.0),
            )
            for name, (beyond, samples) in lengths.items()
        ]
