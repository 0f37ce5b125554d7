"""An `Exam` makes the generations that the invariants of one method on one model need. Each generation runs when an
invariant first asks for it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args

from kvbench.audit.invariants.dense import Pass, dense_pass
from kvbench.audit.invariants.prompts import generate_inputs
from kvbench.audit.invariants.subject import Subject
from kvbench.audit.invariants.trial import Bench, Trial, noise_keys
from kvbench.audit.outcome import Broken, NotApplicable, Stopped
from kvbench.engine.cache.layout import check_prefill, entry_budget, fit, ticks_every
from kvbench.engine.reference import KeptHistory
from kvbench.engine.setup import rules_for
from kvbench.errors import SetupError, UserError
from kvbench.eviction.api import Method, Protect
from kvbench.eviction.choose import make
from kvbench.eviction.modality import check_images
from kvbench.integrations.transformers_cache import EvictionCache
from kvbench.records import Request, Sampling

P = ParamSpec("P")
T = TypeVar("T")
AuditLayout = Literal["dense", "paged"]
Special = Literal["chunked", "tail", "share"]  # see docs/audit.md
Way = AuditLayout | Special
SPECIAL: tuple[Special, ...] = get_args(Special)

INTERVAL = 8
SLOTS = 2  # fewer than samples, so that slots are refilled
SMALLEST_BUDGET = 24
SHORT, MIDDLE, LONG = -6, 12, 37  # prompt lengths, minus the budget
OUTPUT = 26
SMALL_AND_LARGE = (0.25, 4)  # two budgets, as multiples of the exam's
# Tokens between evictions of a chunked prompt; prompt tokens read after its eviction; budget as a share of a prompt.
CHUNK, TAIL, SHARE = 16, 7, 0.4


def once(work: Callable[Concatenate[Exam, P], T]) -> Callable[Concatenate[Exam, P], T]:
    """Make a method of `Exam` run only once for the same arguments; later calls return the same result.

    If the method raises Broken or NotApplicable, the call raises this error unchanged, and the next call runs the
    method again. After any other error, this call and all later calls raise the same `Stopped`.
    """

    @functools.wraps(work)
    def cached(exam: Exam, *args: P.args, **options: P.kwargs) -> T:
        key = (work.__name__, *args, *options.values())
        if key not in exam.results:
            try:
                exam.results[key] = work(exam, *args, **options)
            except (Broken, NotApplicable):
                raise
            except Exception as error:
                exam.results[key] = error if isinstance(error, Stopped) else Stopped(error)
        result: T | Stopped = exam.results[key]
        if isinstance(result, Stopped):
            raise result
        return result

    return cached


class Exam:
    """Makes the generations that the invariants check, with one method on one model, and holds their results.

    Raises NotApplicable if the method cannot run on the model.
    """

    def __init__(self, method: Method, subject: Subject) -> None:
        self.subject = subject
        self.method, self.loaded = subject.serve(method)
        self.group = max((g.group for g in self.loaded.geometry), default=1)
        copies = self.group if self.method.per_query_head else 1
        self.copies = copies
        self.interval = ticks_every(self.method, INTERVAL, self.group)
        size = max(SMALLEST_BUDGET, (self.method.min_budget() + 8) * copies)
        self.size = size - size % copies
        self.budget = self.size if self.method.takes_budget else None
        self.max_tokens = self.size + LONG + OUTPUT
        if self.max_tokens > self.loaded.context:
            raise NotApplicable(
                f"the audit needs sequences of {self.max_tokens} tokens, but the model's context has "
                f"{self.loaded.context}"
            )
        self.requests = self._requests()
        try:
            geometry = fit(self.loaded.geometry, self.method, self.max_tokens)
            rules_for(self.method, self.loaded, INTERVAL, geometry)  # fails for weights of another model
            if any(request.images for request in self.requests):
                check_images(type(self.method).__name__, self.method)
        except (UserError, SetupError) as error:
            raise NotApplicable(str(error)) from None
        self.evicting = [g for g in geometry if g.evicts]
        self.results: dict[Any, Any] = {}  # of methods decorated with `once`

    @property
    def layouts(self) -> tuple[AuditLayout, ...]:
        return ("dense", "paged") if self.method.uniform else ("paged",)

    @property
    def growth(self) -> int | None:
        return self.method.during("decode").trigger(self.interval).growth

    @once
    def main(self, way: Way) -> Trial:
        """Return the trial that most invariants check. Raises Stopped if the generation fails, and NotApplicable if the
        method cannot run in this way.

        If `way` is a layout ("dense", "paged"), the trial runs all requests, on fewer slots than samples. If `way` is
        a special way ("chunked", "tail", "share"; see docs/audit.md), the trial runs one request with a long prompt and
        one with a short prompt.
        """
        if way == "dense" or way == "paged":
            return self._bench(way).run(self.requests)
        if way == "share" and self.budget is None:
            raise NotApplicable("the method takes no budget")
        if way == "chunked":
            try:
                check_prefill(self.method, "chunked")
            except UserError:
                raise NotApplicable(
                    "the method needs the whole prompt, for probes or hidden states, so it cannot evict in chunks"
                ) from None
        return self._special(way)

    def _special(self, way: Special) -> Trial:
        long, short = (replace(request, samples=(0,)) for request in self.requests[:2])
        if way == "chunked":
            return self._bench(self.layouts[0], prefill_chunk=CHUNK, prefill="chunked").run([long, short])
        if way == "share":
            return self._bench(self.layouts[0], SHARE).run([long, short])
        requests = [replace(request, compress_at=len(request.prompt_ids) - TAIL) for request in (long, short)]
        return self._bench(self.layouts[-1], tail=TAIL).run(requests)

    def limit(self, way: Way, request: Request) -> int:
        """Return how many entries per KV head the budget allows a request right after an eviction. The method must take
        a budget. way: the way of running, as in `main`."""
        budget = entry_budget(
            self.method, SHARE if way == "share" else self.budget, len(request.prompt_ids), self.group
        )
        assert budget is not None
        return budget * self.copies

    def protects(self) -> list[Protect]:
        """Return two declarations of the tokens that the method protects in the first request: one for the eviction of
        the prompt, one for evictions while the answer is generated."""
        length = len(self.requests[0].prompt_ids)
        budget = entry_budget(self.method, self.budget, length, self.group)
        phases = (self.method.during("prefill"), self.method.during("decode"))
        return [acting.keeps_always(acting.allowed(budget, length, length, 0)) for acting in phases]

    @once
    def backwards(self, layout: AuditLayout) -> Trial:
        """Run all requests in reverse order, so that sequences have other neighbours in the batch or other slots."""
        return self._bench(layout).run(self.requests[::-1])

    @once
    def repeated(self, layout: AuditLayout) -> tuple[Trial, Trial, Trial]:
        """Run one sequence, then another, then the first again, one at a time in the same engine."""
        a, b = (replace(request, samples=(0,)) for request in (self.requests[0], self.requests[-1]))
        bench = self._bench(layout)
        return bench.run([a]), bench.run([b]), bench.run([a])

    @once
    def two_budgets(self, layout: AuditLayout) -> dict[int, Trial]:
        """Run one long prompt at a quarter and at four times the exam's budget; return both trials.

        The keys are the two budgets, the smaller first. If a quarter is below the method's smallest budget, the
        smallest budget takes its place. The prompt is longer than both budgets. Raises NotApplicable if the model's
        context is too short for the prompt.
        """
        least = self.method.min_budget() * self.copies
        quarter, large = (int(self.size * factor) // self.copies * self.copies for factor in SMALL_AND_LARGE)
        length = large + LONG
        if length + OUTPUT > self.loaded.context:
            raise NotApplicable(
                f"the check at a small and a large budget needs sequences of {length + OUTPUT} tokens; the model's "
                f"context has {self.loaded.context}"
            )
        [prompt] = self.subject.prompts([length], seed=3)
        request = replace(self.requests[0], prompt_ids=prompt.ids, images=prompt.images, samples=(0,))
        budgets = (max(quarter, least), large)
        return {size: self._bench(layout, size, max_tokens=length + OUTPUT).run([request]) for size in budgets}

    @once
    def unlimited(self, layout: AuditLayout) -> Trial:
        """Run all requests at a budget that no sequence reaches."""
        return self._bench(layout, (self.max_tokens + 1) * self.copies).run(self.requests)

    def full(self) -> Trial:
        """Run all requests with the full cache; all methods that are audited at the same budget share this trial."""
        trials = self.subject.full
        if self.size not in trials:
            lengths = {"interval": INTERVAL, "slots": SLOTS, "max_tokens": self.max_tokens}
            trials[self.size] = Bench(self.loaded, make("full", {}), budget=None, **lengths).run(self.requests)
        trial: Trial = trials[self.size]
        return trial

    @once
    def dense(self, way: Way, request: Request, sample: int, *, masked: bool) -> Pass:
        """Return a pass without a cache over a prompt and the answer that the trial `main(way)` generated for a sample.
        masked: hide the entries that the engine had evicted."""
        trial = self.main(way)
        ids = [*request.prompt_ids, *trial.done[request.doc_id, sample].token_ids[:-1]]
        history = trial.history if masked else KeptHistory()
        return dense_pass(self.loaded, ids, history, noise_keys(request, sample), request.images)

    def greedy(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the greedy tokens of the engine, and the greedy tokens of `model.generate` with an `EvictionCache`.

        Both continue the same two long prompts, or one if the method runs probes. Raises NotApplicable if no
        `EvictionCache` can be made for this model and method.
        """
        rows = 1 if self.method.during("prefill").needs().probes else 2
        prompts = self.subject.prompts([self.size + LONG] * rows, seed=2)
        # EvictionCache gives its sequences the same task and document names, of which noise is a hash.
        requests = [
            Request(task="generate", doc_id=str(row), prompt_ids=p.ids, images=p.images, max_new_tokens=OUTPUT)
            for row, p in enumerate(prompts)
        ]
        trial = self._bench(self.layouts[0], slots=rows).run(requests)
        model, vocabulary = self.loaded.model, self.loaded.model.get_input_embeddings().weight.shape[0]
        config = copy.deepcopy(model.generation_config)
        config.pad_token_id = 0
        config.eos_token_id = vocabulary  # the id of no token: transformers would replace None by the model's end token
        config.max_new_tokens, config.do_sample = OUTPUT, False
        inputs = generate_inputs(requests, self.loaded.device)
        try:
            lengths: dict[str, Any] = {"budget": self.budget, "interval": INTERVAL, "max_tokens": self.max_tokens}
            cache = EvictionCache(model, self.method, **lengths, tokenizer=self.loaded.tokenizer)
        except SetupError as error:
            raise NotApplicable(str(error)) from None
        with cache:
            out = model.generate(**inputs, generation_config=config, past_key_values=cache)
        mine = [list(trial.done[request.doc_id, 0].token_ids) for request in requests]
        return mine, out[:, self.size + LONG :].tolist()

    def _bench(self, layout: AuditLayout, budget: float | None = None, slots: int = SLOTS, **reading: Any) -> Bench:
        return Bench(
            self.loaded,
            self.method,
            budget=(budget or self.budget) if self.method.takes_budget else None,
            interval=INTERVAL,
            slots=slots,
            layout=layout,
            **{"max_tokens": self.max_tokens} | reading,
        )

    def _requests(self) -> list[Request]:
        """Return three requests: a long and a middle prompt, which are longer than the budget, and a short one. The
        request with the long prompt has two samples, the others have one."""
        lengths = {"long": self.size + LONG, "short": self.size + SHORT, "middle": self.size + MIDDLE}
        prompts = self.subject.prompts([*lengths.values()], seed=1)
        return [
            Request(
                task="audit",
                doc_id=name,
                prompt_ids=prompt.ids,
                images=prompt.images,
                samples=(0, 1) if name == "long" else (0,),
                max_new_tokens=OUTPUT,
                sampling=Sampling(temperature=1.0),
            )
            for name, prompt in zip(lengths, prompts)
        ]
