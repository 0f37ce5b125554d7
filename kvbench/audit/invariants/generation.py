"""The invariants of a generation: of its tokens, logits, memory and evictions.

Each public function that has a docstring checks one invariant; the first line of the docstring states it. The function
raises `Broken` if the invariant does not hold, `NotApplicable` if it cannot be checked, and `Stopped` if a generation
that it needs fails.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from kvbench.audit.invariants.events import evictions, held_at
from kvbench.audit.invariants.exam import CHUNK, TAIL, AuditLayout, Exam, Way
from kvbench.audit.invariants.trial import Trial, noise_keys
from kvbench.audit.outcome import DROPPED_NOTHING, EVICTS_NOTHING, Broken, NotApplicable
from kvbench.engine.cache.pool import PAGE
from kvbench.eviction.columns import expanded
from kvbench.records import Request

TOLERANCE = 1e-4  # largest difference of logits, relative to the largest logit; arithmetic is float32


def runs(exam: Exam, way: Way) -> None:
    """Every sequence is generated to its end, and every prompt that is longer than the budget is evicted."""
    trial = exam.main(way)
    for (doc, sample), done in trial.done.items():
        if done.status != "ok" or len(done.token_ids) != done.request.max_new_tokens:
            made = f"{len(done.token_ids)} of {done.request.max_new_tokens} tokens generated, status {done.status}"
            raise Broken(f"{doc} prompt, sample {sample}: {made} {done.note}".rstrip())
        if not exam.method.takes_budget:
            continue
        context, limit = done.request.compress_at or len(done.request.prompt_ids), exam.limit(way, done.request)
        if context > limit and not (done.usage and done.usage.evictions):
            raise Broken(f"{doc} prompt of {len(done.request.prompt_ids)} tokens: no eviction at budget {limit}")


def budget(exam: Exam, way: Way) -> None:
    """A sequence holds at most the budget after an eviction, and at most one interval's tokens more before the next."""
    takes_budget(exam)
    trial, kept = exam.main(way), defaultdict[tuple[str, int, int], dict[int, int]](dict)
    for e in evictions(exam, trial):
        if e.phase == "prefill" or exam.method.decode_bounded:
            # By layer: where a layer is decided twice at the same moment, the second decision counts.
            kept[e.request.doc_id, e.sample, e.seen][e.layer] = sum(len(head) for head in e.kept)
    heads = sum(g.kv_heads for g in exam.evicting) / exam.copies
    limits = {request.doc_id: exam.limit(way, request) for request in trial.requests}
    for (doc, sample, seen), layers in kept.items():
        total, limit = sum(layers.values()), limits[doc]
        if total > limit * heads:
            where = f"{doc} prompt, sample {sample}, {seen} tokens seen"
            raise Broken(f"{total / heads:.2f} entries per head kept at budget {limit}: {where}")
    for (doc, _), done in trial.done.items():
        most = limits[doc] + CHUNK * exam.copies
        if way == "chunked" and done.usage is not None and done.usage.entries_prefill_peak > most:
            raise Broken(
                f"{done.usage.entries_prefill_peak:.2f} entries held while the {doc} prompt is read; "
                f"at most {most} are allowed"
            )
    if not exam.method.decode_bounded:
        return
    for (doc, sample), done in trial.done.items():
        most = limits[doc] + ((exam.growth or 0) + (TAIL if way == "tail" else 0)) * exam.copies
        if done.usage is not None and done.usage.entries_peak > most:
            raise Broken(
                f"{done.usage.entries_peak:.2f} entries held at the peak; at most {most} are allowed: "
                f"{doc} prompt, sample {sample}"
            )


def protect(exam: Exam, way: Way) -> None:
    """No head evicts a protected entry. If the method protects text, every head evicts images first, then text.

    Protected entries are those sinks, recent tokens and prompt tokens that the method protects. Text is protected only
    against images: a head may evict entries of text once it has evicted all unprotected entries of images.
    """
    evicts(exam)
    _drops(exam, way)
    protects = False
    for e in evictions(exam, exam.main(way)):
        p = e.acting.keeps_always(e.allowed).at(exam.interval)
        images = e.images if p.text else set()
        protects = protects or bool(p.sinks or p.recent or p.prompt or images)
        ends = max(p.sinks, len(e.request.prompt_ids[: p.prompt_most]) if p.prompt else 0)
        for head, (before, kept) in enumerate(zip(e.before, e.kept)):
            always = {at for at in before if at < ends or at >= e.seen - p.recent}
            lost = always - set(kept)
            if lost:
                raise Broken(
                    f"{len(lost)} protected entries evicted, first at position {min(lost)}: {e.where}, head {head}"
                )
            text, shown = before - images - set(kept), images & set(kept) - always
            if text and shown:
                raise Broken(
                    f"{len(text)} entries of text evicted while {len(shown)} of images stay: {e.where}, head {head}"
                )
    if not protects:
        declared = any(p.sinks or p.recent or p.prompt for p in exam.protects())
        raise NotApplicable(
            "no eviction met a token that the method protects" if declared else "the method protects no tokens"
        )


def real(exam: Exam, way: Way) -> None:
    """Every kept entry belongs to a token that its head still held, and no token is kept twice."""
    evicts(exam)
    _drops(exam, way)
    for e in evictions(exam, exam.main(way)):
        for head, (before, kept) in enumerate(zip(e.before, e.kept)):
            if not kept:
                raise Broken(f"the eviction leaves a head no entry: {e.where}, head {head}")
            if strange := set(kept) - before:
                raise Broken(f"position {min(strange)} is kept, but the head did not hold it: {e.where}, head {head}")
            if len(set(kept)) < len(kept):
                raise Broken(f"{len(kept) - len(set(kept))} entries are kept twice: {e.where}, head {head}")


def batch(exam: Exam, layout: AuditLayout) -> None:
    """A sequence has the same tokens and kept entries alone, beside others, in another order, and in another slot."""
    _drops(exam, layout)
    main = exam.main(layout)
    for request, sample in main.sequences():
        _same(main, exam.backwards(layout), request, sample, "when the requests run in reverse order")
    first, second, _ = exam.repeated(layout)
    for alone in (first, second):
        [request] = alone.requests
        _same(main, alone, request, 0, "when the sequence runs alone")


def leak(exam: Exam, layout: AuditLayout) -> None:
    """A sequence has the same tokens and kept entries when it runs again after another sequence has used its slot."""
    _drops(exam, layout)
    first, _, again = exam.repeated(layout)
    [request] = first.requests
    _same(first, again, request, 0, "when the sequence runs again")


def memory(exam: Exam, layout: AuditLayout) -> None:
    """A slot's bytes match the entries it holds (within one page per head if paged); all pages are free at the end."""
    _drops(exam, layout)
    trial = exam.main(layout)
    if trial.lost_pages:
        raise Broken(trial.lost_pages)
    g = exam.evicting[0]
    decode = exam.method.during("decode")
    columns = 0 if exam.growth is None else len(expanded(decode.columns(), exam.group))
    size = (g.head_dim + g.value_dim) * exam.loaded.dtype.itemsize + 4 + 4 * columns
    if any((other.head_dim, other.value_dim) != (g.head_dim, g.value_dim) for other in exam.evicting):
        raise NotApplicable("layers have entries of different sizes")
    for h in trial.holdings:
        counts = held_at(exam, trial, h.key, h.seen)
        if abs(h.entries - sum(counts) / len(counts)) > 1e-6:
            mean = sum(counts) / len(counts)
            raise Broken(
                f"after {h.seen} tokens the cache holds {h.entries:.2f} entries per head, but its log of evictions "
                f"gives {mean:.2f}"
            )
        low, high = sum(counts) * size, sum(counts) * size
        if layout == "paged":
            pages = [-(-count // PAGE) for count in counts]
            low, high = sum(pages) * PAGE * size, (sum(pages) + len(pages)) * PAGE * size
        if not low <= h.bytes <= high:
            raise Broken(
                f"after {h.seen} tokens the cache takes {h.bytes} bytes for {sum(counts)} entries; expected: {low} to "
                f"{high}"
            )
    if exam.method.takes_budget and exam.method.decode_bounded:
        rows, allowed = trial.cache.shape.rows, exam.size + (exam.growth or 0) * exam.copies
        if rows * exam.copies > allowed + exam.copies:
            raise Broken(
                f"a slot has room for {rows * exam.copies} entries per KV head, but budget plus interval is only "
                f"{allowed}"
            )


def full(exam: Exam, layout: AuditLayout) -> None:
    """With a budget above the length of every sequence, logits and tokens equal the full cache's."""
    takes_budget(exam)
    theirs, mine = exam.full(), exam.unlimited(layout)
    for request, sample in theirs.sequences():
        _, key = noise_keys(request, sample)
        for step in range(request.max_new_tokens):
            a, b = theirs.seen.logits[key, step], mine.seen.logits[key, step]
            if (change := relative(a, b)) > TOLERANCE:
                raise Broken(
                    f"with a budget that no sequence fills, logits differ from the full cache's by {change:.1e} "
                    f"(relative) at step {step} after the {request.doc_id} prompt"
                )
        at = request.doc_id, sample
        if theirs.done[at].token_ids != mine.done[at].token_ids:
            raise Broken(
                f"with a budget that no sequence fills, sample {sample} of the {request.doc_id} prompt gets other "
                "tokens than with the full cache"
            )


def oracle(exam: Exam, way: Way) -> None:
    """Logits equal those of a pass without a cache, in which a mask hides evicted entries. If the engine gave an entry
    a wrong position, the logits would differ."""
    _drops(exam, way)
    for request, sample in exam.main(way).sequences():
        _compare(exam, way, request, sample, masked=True, upto=None)


def past(exam: Exam, layout: AuditLayout) -> None:
    """An eviction changes no logits of earlier tokens: up to the first eviction they equal the full cache's."""
    evicts(exam)
    _drops(exam, layout)
    trial = exam.main(layout)
    for request, sample in trial.sequences():
        times = [seen for seen, _ in trial.kept(request, sample)]
        # A prompt is evicted after it was read, so its last logits are always compared.
        first = max(min(times), len(request.prompt_ids)) if times else None
        _compare(exam, layout, request, sample, masked=False, upto=first)


def layouts(exam: Exam, layout: AuditLayout) -> None:
    """The dense and the paged layout give the same tokens and kept entries."""
    if len(exam.layouts) < 2:
        raise NotApplicable("the method keeps unequal numbers of entries per head, so it runs in the paged layout only")
    _drops(exam, layout)
    dense, paged = exam.main("dense"), exam.main("paged")
    for request, sample in dense.sequences():
        _same(dense, paged, request, sample, "in the paged layout")


def generate(exam: Exam, layout: AuditLayout) -> None:
    """EvictionCache in model.generate gives the greedy tokens of the engine."""
    _drops(exam, layout)
    for row, (mine, theirs) in enumerate(zip(*exam.greedy(), strict=True)):
        if mine != theirs:
            step = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
            raise Broken(
                f"the tokens of engine and EvictionCache differ from step {step} of {len(mine)} on, "
                f"for prompt {row} of the batch"
            )


def takes_budget(exam: Exam) -> None:
    evicts(exam)
    if not exam.method.takes_budget:
        raise NotApplicable("the method takes no budget")


def evicts(exam: Exam) -> None:
    if not exam.method.evicts:
        raise NotApplicable(EVICTS_NOTHING)


def _drops(exam: Exam, way: Way) -> None:
    """Raise NotApplicable if the method can evict but dropped no entry in the trial, which then proves nothing."""
    if exam.method.evicts and not any(e.dropped for e in evictions(exam, exam.main(way))):
        raise NotApplicable(DROPPED_NOTHING)


def _same(a: Trial, b: Trial, request: Request, sample: int, how: str) -> None:
    """Compare one sequence in two trials. Raises Broken if an eviction or a generated token differs. how: how the
    second trial ran, in words for the message."""
    place = f"{request.doc_id} prompt, sample {sample}"
    mine, theirs = a.kept(request, sample), b.kept(request, sample)
    for (seen, layer), heads in sorted(mine.items()):
        others = theirs.get((seen, layer))
        if heads != others:
            n = sum(len(set(x) - set(y)) for x, y in zip(heads, others)) if others else sum(map(len, heads))
            raise Broken(f"{n} kept entries differ {how}: {place}, layer {layer}, {seen} tokens seen")
    if extra := set(theirs) - set(mine):
        raise Broken(f"{len(extra)} evictions occur only {how}: {place}")
    mine_ids, other_ids = (t.done[request.doc_id, sample].token_ids for t in (a, b))
    if mine_ids != other_ids:
        step = next((i for i, (x, y) in enumerate(zip(mine_ids, other_ids)) if x != y), len(mine_ids))
        raise Broken(f"from step {step} on, generated tokens differ {how}: {place}")


def _compare(exam: Exam, way: Way, request: Request, sample: int, *, masked: bool, upto: int | None) -> None:
    """Compare the engine's logits with those of a pass without a cache (`Exam.dense`), at positions below `upto`.

    Raises Broken if they differ by more than rounding. masked: whether the pass hides evicted entries. upto: None
    compares all positions.
    """
    trial, dense = exam.main(way), exam.dense(way, request, sample, masked=masked).logits
    _, key = noise_keys(request, sample)
    for step in range(len(trial.done[request.doc_id, sample].token_ids)):
        at = len(request.prompt_ids) - 1 + step
        if upto is not None and at >= upto:
            return
        change = relative(dense[at], trial.seen.logits[key, step])
        if not change <= TOLERANCE:
            when, how = ("", ", with evicted entries masked,") if masked else ("before the first eviction, ", "")
            raise Broken(
                f"{when}logits differ from those of a pass without a cache{how} by {change:.1e} (relative) at position "
                f"{at}: {request.doc_id} prompt, sample {sample}"
            )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))
