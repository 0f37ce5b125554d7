"""Reading prompts: what is held at the peak, what the prompt itself sees, probes that leave nothing behind."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import pytest
import torch
from support.methods import small, with_tables
from support.models import build, requests

from kvbench.engine import prefill as reading
from kvbench.engine.loop import Engine
from kvbench.engine.probes import Drafts
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction.api import Column, Method, Needs, Once, Probe
from kvbench.eviction.choose import from_label
from kvbench.records import Sampling

BUDGET = 24


@pytest.fixture(scope="module")
def loaded():
    return with_tables(build("qwen3"))


def generate(loaded, method, length=200, tokens=1, **more):
    [request] = requests(lengths=(length,), new_tokens=(tokens,), samples=1, sampling=Sampling())
    engine = Engine(loaded, method, budget=BUDGET, interval=8, slots=1, max_tokens=300, prefill_chunk=16, **more)
    [done] = engine.generate([request])
    return done


def test_layer_by_layer_the_peak_is_one_full_layer(loaded):
    usage = generate(loaded, small("snapkv")).usage
    entry = loaded.geometry[0].entry_bytes(4)
    layer, window = 200 * entry, 8 * 4 * 16 * 4
    left = BUDGET * entry
    assert usage.kv_bytes_prefill_peak <= layer + 2 * left + 3 * window
    assert usage.kv_bytes_prefill_peak >= layer


def test_methods_that_need_all_layers_hold_them(loaded):
    assert generate(loaded, small("cake")).usage.kv_bytes_prefill_peak >= 3 * 200 * loaded.geometry[0].entry_bytes(4)


def test_chunked_memory_does_not_grow_with_the_prompt(loaded):
    short, long = (generate(loaded, small("snapkv"), n, prefill="chunked").usage for n in (100, 250))
    assert short.kv_bytes_prefill_peak == long.kv_bytes_prefill_peak
    assert long.entries_prefill_peak <= BUDGET + 16


@pytest.mark.parametrize("method", ["snapkv", "h2o", "ada-kv", "kvzip", "cake", "laq", "two methods"])
def test_the_first_token_is_the_full_cache_s(loaded, method):
    [request] = requests(lengths=(200,), new_tokens=(1,), samples=1, sampling=Sampling())
    full = Engine(loaded, small("full"), budget=None, interval=8, slots=1, max_tokens=300)
    [want] = full.generate([request])
    assert generate(loaded, small(method)).token_ids == want.token_ids


def test_probes_are_refused_by_chunked_reading(loaded):
    with pytest.raises(UserError, match="chunked"):
        generate(loaded, small("kvzip"), prefill="chunked")


@dataclass(frozen=True)
class Asking(Method):
    """Records what its probes see; keeps the newest."""

    log: list = field(default_factory=list, hash=False, compare=False)

    def needs(self):
        return Needs(probes=True)

    def trigger(self, interval):
        return Once()

    def columns(self):
        return (Column(name="seen"),)

    def probes(self, prompt):
        self.log.append(("prompt", prompt.ids, prompt.next_token, prompt.budget))
        token = yield Probe(tokens=(3, 4, 5))
        self.log.append(("answer", token))
        token = yield Probe(tokens=(6,), keep=True)
        token = yield Probe(tokens=(7, 8), against=small("knorm"), keep=True)
        yield Probe(tokens=(9,), against=small("knorm"))

    def observe(self, view):
        self.log.append((view.layer, view.probe.tokens, view.query_positions[0].tolist(), view.keys.shape[2]))
        self.log.append(view.probe_positions[0].tolist())
        return {"seen": view.columns["seen"] + 1}

    def score(self, view):
        assert bool((view.columns["seen"] == 4).all())  # each of four probes was seen once by every entry
        return view.positions.float()


def test_probes_have_true_positions_and_leave_nothing(loaded):
    method = Asking()
    done = generate(loaded, method, length=40, tokens=20)
    plain = generate(loaded, Newest(), length=40, tokens=20)
    assert done.token_ids == plain.token_ids
    assert done.usage.entries_after_evict == BUDGET
    log = [entry for entry in method.log if entry[0] == 0]
    assert [(tokens, positions, rows) for _, tokens, positions, rows in log] == [
        ((3, 4, 5), [40, 41, 42], 40),
        ((6,), [40], 40),
        ((7, 8), [40, 41], 40),
        ((9,), [42], 40),
    ]
    assert method.log[method.log.index(log[3]) + 1] == [40, 41, 42]  # the kept probe's keys and its own
    kind, ids, next_token, budget = method.log[0]
    assert (kind, len(ids), budget) == ("prompt", 40, BUDGET)
    assert next_token == done.token_ids[0]


@dataclass(frozen=True)
class Newest(Method):
    def trigger(self, interval):
        return Once()

    def score(self, view):
        return view.positions.float()


def test_a_probe_equals_the_same_tokens_in_a_longer_prompt(loaded):
    """The greedy token after a probe is the one after prompt + probe."""
    method = Asking()
    [request] = requests(lengths=(40,), new_tokens=(1,), samples=1, sampling=Sampling())
    generate(loaded, method, length=40)
    answer = next(entry[1] for entry in method.log if entry[0] == "answer")
    ids = torch.tensor([[*request.prompt_ids, 3, 4, 5]])
    with torch.no_grad():
        assert int(loaded.model(ids).logits[0, -1].argmax()) == answer


@dataclass(frozen=True)
class Watching(Method):
    """Probes, and remembers the queries that it scores with."""

    probing: bool = True
    log: list = field(default_factory=list, hash=False, compare=False)

    def needs(self):
        return Needs(queries="window", window=8, probes=self.probing)

    def trigger(self, interval):
        return Once()

    def probes(self, prompt):
        yield Probe(tokens=(3, 4, 5))
        yield Probe(tokens=(6, 7), keep=True)

    def observe(self, view):
        return {}

    def score(self, view):
        self.log.append((view.layer, view.query_positions.clone(), view.queries.clone()))
        return view.positions.float()


def test_scores_see_the_prompt_s_queries_whatever_was_probed(loaded):
    probed, plain = Watching(), Watching(probing=False)
    generate(loaded, probed, length=40)
    generate(loaded, plain, length=40)
    for (layer, positions, queries), (same, at, want) in zip(probed.log, plain.log, strict=True):
        assert (layer, positions.tolist()) == (same, at.tolist())
        torch.testing.assert_close(queries, want, rtol=1e-5, atol=1e-6)


def test_probes_open_the_reply_as_the_request_says(loaded, monkeypatch):
    headers = []
    monkeypatch.setattr(reading, "run_probes", lambda cache, prompt, *_: headers.append(prompt.reply_header))
    [request] = requests(lengths=(40,), new_tokens=(1,), samples=1, sampling=Sampling())
    engine = Engine(loaded, small("kvzip"), budget=BUDGET, interval=8, slots=1, max_tokens=300)
    list(engine.generate([replace(request, reply_header=(11, 12))]))
    assert headers == [(11, 12)]


def test_a_draft_is_greedy_whatever_its_model_s_settings_of_generation(loaded, monkeypatch):
    draft = copy.deepcopy(build("qwen3"))
    draft.model.generation_config.repetition_penalty = 5.0
    monkeypatch.setattr("kvbench.engine.probes.load_draft", lambda *_: draft)
    read = list(range(3, 60))
    for _ in range(8):
        read.append(int(draft.model(torch.tensor([read])).logits[0, -1].argmax()))
    assert len(set(read[57:])) < 8  # a penalty would show
    assert Drafts(loaded).continue_("draft", read[:57], 8) == tuple(read[57:])


def kept_of_chunks(loaded, label):
    """The positions that stay of a prompt of 100 tokens and an answer, by tokens seen and layer."""
    kept = {}

    def log(_, seen, layer, heads):
        kept.setdefault(seen, {})[layer] = [head.tolist() for head in heads]

    generate(loaded, from_label(label), 100, tokens=20, prefill="chunked", log=log)
    return kept


@pytest.mark.parametrize("label", ["pyramidkv(window=4)", "ada-kv(base=pyramidkv(window=4))"])
def test_layers_of_a_pyramid_that_grow_with_the_prompt_fill_the_budget(loaded, label):
    for layers in kept_of_chunks(loaded, label).values():
        sizes = [len(head) for heads in layers.values() for head in heads]
        assert sum(sizes) == BUDGET * len(sizes)


@pytest.mark.parametrize("options", ["", ", compat=reference", ", compat=reference, cascade=false"])
def test_cake_evicts_the_prompt_alike_with_and_without_decoding(loaded, options):
    once, always = (kept_of_chunks(loaded, f"cake(window=4, decode={d}{options})") for d in ("false", "true"))
    assert set(once) == {32, 48, 64, 80, 96, 100}
    assert all(layers == always[seen] for seen, layers in once.items())
    assert max(always) > 100
    sizes = [[len(heads[0]) for _, heads in sorted(always[seen].items())] for seen in always if seen >= 100]
    assert all(size == sizes[0] for size in sizes)


@dataclass(frozen=True)
class TakesTwice(Method):
    def score(self, view):
        return view.positions.float()

    def quotas(self, allocation):
        return torch.minimum(allocation.held, torch.full_like(allocation.held, 2 * allocation.budget))


@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_layers_decided_one_by_one_share_one_budget(loaded, prefill):
    with pytest.raises(BudgetViolation, match="budget exceeded"):
        generate(loaded, TakesTwice(), prefill=prefill)


def test_a_share_of_the_prompt(loaded):
    for length, want in ((200, 50), (40, 10), (12, 9)):  # 9 is the least that a window of 8 leaves a choice to
        [request] = requests(lengths=(length,), new_tokens=(5,), samples=1)
        engine = Engine(loaded, small("snapkv"), budget=0.25, interval=8, slots=2, max_tokens=300)
        [done] = engine.generate([request])
        assert (done.usage.budget_entries, done.usage.entries_after_evict) == (want, want)
