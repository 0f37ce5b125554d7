"""The loop: tokens free of neighbours and slots, measured budgets, stops, bad prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build, requests

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.prefill import PromptReader
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction.api import Every, Method, Never, Once
from kvbench.eviction.choose import make
from kvbench.records import Sampling

BUDGET, INTERVAL = 24, 8


@pytest.fixture(scope="module")
def loaded():
    return with_tables(build("qwen3"))


def run(loaded, todo, *, method="gkv", slots=4, budget=BUDGET, **options):
    instance = small(method) if isinstance(method, str) else method
    engine = Engine(
        loaded,
        instance,
        budget=budget if instance.takes_budget else None,
        interval=INTERVAL,
        slots=slots,
        max_tokens=200,
        **options,
    )
    return {(d.request.doc_id, d.sample): d for d in engine.generate(todo)}


TODO = dict(lengths=(9, 60, 33, 5, 100, 48), new_tokens=(70, 50, 90, 40, 30, 60), samples=2)


@pytest.mark.parametrize(
    ("method", "threads"),
    [("full", 1), ("random", 1), ("h2o", 1), ("ada-kv while decoding", 1), ("kvzip", 1), ("gkv", 1), ("gkv", 2)],
)
def test_tokens_are_bit_equal_alone_and_beside_any_neighbours_in_any_slot(loaded, method, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        todo = requests(**TODO)
        together = run(loaded, todo, method=method)
        for seed in range(3):
            shuffled = random.Random(seed).sample(todo, len(todo))
            assert {k: d.token_ids for k, d in run(loaded, shuffled, method=method).items()} == {
                k: d.token_ids for k, d in together.items()
            }
        for request in todo[:3]:
            for sample in request.samples:
                alone = run(loaded, [dataclasses.replace(request, samples=(sample,))], method=method)
                assert alone[request.doc_id, sample].token_ids == together[request.doc_id, sample].token_ids
    finally:
        torch.set_num_threads(before)


def test_logits_are_bit_equal_in_every_slot(loaded, monkeypatch):
    from kvbench.engine import sampler

    logged: dict[tuple[int, int], list[torch.Tensor]] = {}
    original = sampler.draw

    def spy(logits, keys, steps, sampling):
        for row, key, step in zip(logits, keys.tolist(), steps.tolist()):
            if key:
                logged.setdefault((key, step), []).append(row.clone())
        return original(logits, keys, steps, sampling)

    monkeypatch.setattr(sampler, "draw", spy)
    todo = requests(**TODO)
    for seed in range(3):
        run(loaded, random.Random(seed).sample(todo, len(todo)))
    assert all(torch.equal(rows[0], row) for rows in logged.values() for row in rows[1:])
    assert sum(len(rows) == 3 for rows in logged.values()) > 500


def test_samples_differ_and_repeat(loaded):
    todo = requests(**TODO)
    first, again = run(loaded, todo), run(loaded, todo)
    assert all(first[k].token_ids == again[k].token_ids for k in first)
    assert all(first[r.doc_id, 0].token_ids != first[r.doc_id, 1].token_ids for r in todo)


@pytest.mark.parametrize("method", [*EVICTING, *VARIANTS])
def test_budget_as_large_as_the_sequence_equals_the_full_cache(loaded, method):
    todo = requests(lengths=(9, 60, 5, 100), new_tokens=(50, 30, 40, 30), samples=1)
    full = run(loaded, todo, method="full")
    evicting = run(loaded, todo, method=method, budget=400 if method == "snapkv by query head" else 160)
    assert {k: d.token_ids for k, d in evicting.items()} == {k: d.token_ids for k, d in full.items()}
    assert all(d.usage.evictions == 0 for d in evicting.values())


@pytest.mark.parametrize("method", [*EVICTING, *VARIANTS])
def test_measured_entries_never_exceed_the_rule(loaded, method):
    bounded, uniform = small(method).decode_bounded, small(method).uniform
    for done in run(loaded, requests(**TODO), method=method).values():
        usage, prompt = done.usage, len(done.request.prompt_ids)
        total = prompt + len(done.token_ids) - 1  # the last token is never cached
        if bounded:
            assert usage.entries_peak <= BUDGET + INTERVAL
        if prompt > BUDGET or (bounded and total >= BUDGET + INTERVAL):
            most = BUDGET + (0 if bounded else total - prompt)  # a head that streams may be evicted again later
            assert BUDGET - 1 <= usage.entries_after_evict <= most
            assert usage.first_eviction <= max(prompt, BUDGET + INTERVAL)
            if uniform:
                assert usage.entries_after_evict == BUDGET
        assert usage.budget_entries == BUDGET
        assert usage.entries_mean <= usage.entries_peak
        assert usage.kv_bytes_mean <= usage.kv_bytes_peak <= usage.kv_bytes_slot
        assert usage.entries_prefill_peak == prompt * (2 if method == "snapkv by query head" else 1)


def test_full_cache_keeps_everything(loaded):
    for done in run(loaded, requests(**TODO), method="full").values():
        assert done.usage.entries_peak == len(done.request.prompt_ids) + len(done.token_ids) - 1
        assert done.usage.entries_after_evict is None


def test_long_unbounded_caches_read_slot_by_slot(loaded, monkeypatch):
    from kvbench.engine import step_writers

    todo = requests(**TODO)
    whole = run(loaded, todo, method="full")
    monkeypatch.setattr(step_writers, "FIXED_ROWS", 16)
    single = run(loaded, todo, method="full")
    shuffled = run(loaded, todo[::-1], method="full")
    assert {k: d.token_ids for k, d in single.items()} == {k: d.token_ids for k, d in shuffled.items()}
    assert {k: d.token_ids for k, d in single.items()} == {k: d.token_ids for k, d in whole.items()}


def test_stops_at_end_tokens_and_strings(loaded):
    [request] = requests(lengths=(9,), new_tokens=(60,), samples=1, sampling=Sampling())
    free = run(loaded, [request])["0", 0]
    at = 20
    stopping = dataclasses.replace(loaded, stop_ids=frozenset({free.token_ids[at]}))
    done = run(stopping, [request])["0", 0]
    first = free.token_ids.index(free.token_ids[at])
    assert (done.stop_reason, done.token_ids) == ("stop", free.token_ids[: first + 1])
    text = f" {free.token_ids[at]} {free.token_ids[at + 1]}"
    done = run(loaded, [dataclasses.replace(request, stop_strings=(text,))])["0", 0]
    assert done.stop_reason == "stop_string"
    assert text not in done.text
    assert free.text.startswith(done.text)
    assert free.stop_reason == "length"


def test_prompts_beyond_the_context_become_rows_not_crashes(loaded):
    good, long = requests(lengths=(9, 40), new_tokens=(20, 500), samples=2)
    done = run(loaded, [long, good])
    assert {d.status for k, d in done.items() if k[0] == long.doc_id} == {"prompt_too_long"}
    assert all(done[long.doc_id, s].usage is None for s in (0, 1))
    assert done[good.doc_id, 0].status == "ok"


def test_nan_logits_end_a_sequence_with_a_status(loaded):
    broken = build("qwen3")
    with torch.no_grad():
        broken.model.lm_head.weight[3] = float("nan")
    done = run(broken, requests(lengths=(9,), new_tokens=(20,), samples=1))["0", 0]
    assert (done.status, done.token_ids) == ("nan_logits", ())


@contextlib.contextmanager
def nan_from(module, bad):
    """Let a module's output be NaN: for the token `bad` or, if `bad` is None, after 39 tokens of a pass."""

    def poison(module, inputs, out):
        if bad is not None:
            return torch.where(inputs[0][..., None] == bad, float("nan"), out)
        return torch.cat([out[:, :39], out[:, 39:] * -float("nan")], dim=1)

    hook = module.register_forward_hook(poison)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("at", [2, INTERVAL - 1], ids=["between ticks", "in the step of a tick"])
@pytest.mark.parametrize("method", ["full", "tova", "ada-kv while decoding"])
def test_a_sequence_with_nan_leaves_none_in_its_slot(loaded, method, at):
    """It is longer than the next sequence in the slot, which never overwrites the places with NaN."""
    long, short = requests(lengths=(30, 12), new_tokens=(10, 15), samples=1)
    [alone] = run(loaded, [short], method=method, slots=1).values()
    bad = min(set(range(100)) - {*alone.token_ids, *short.prompt_ids, *long.prompt_ids, 5, 6})
    forced = [5, 6] * 5
    forced[at] = bad
    with nan_from(loaded.model.get_input_embeddings(), bad):
        done = run(loaded, [dataclasses.replace(long, forced=tuple(forced)), short], method=method, slots=1)
    assert [d.status for d in done.values()] == ["nan_logits", "ok"]
    assert [*done.values()][1].token_ids == alone.token_ids


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("method", ["tova", "snapkv", "cake", "ada-kv", "knorm"])
def test_nan_in_a_prompt_is_a_row_and_the_next_prompt_is_read(loaded, method, prefill):
    """With `knorm`, the eviction drops all entries whose keys are NaN; only the logits still show it."""
    good, long = requests(lengths=(30, 60), new_tokens=(10, 10), samples=2)
    with nan_from(loaded.model.model.layers[-1].self_attn.k_proj, None):
        done = run(loaded, [long, good], method=method, slots=1, prefill=prefill, prefill_chunk=40)
    assert [d.status for d in done.values()] == ["nan_logits"] * 2 + ["ok"] * 2
    assert {d.note for d in done.values()} == {"activations were NaN or infinite at step 0", ""}


def test_a_sample_that_ends_with_its_first_token_is_returned_before_the_next_prompt_is_read(loaded, monkeypatch):
    read, reading = [], PromptReader.read
    monkeypatch.setattr(PromptReader, "read", lambda *given: (read.append(1), reading(*given))[1])
    engine = Engine(loaded, small("full"), budget=None, interval=INTERVAL, slots=1, max_tokens=200)
    todo = requests(lengths=(9, 12, 15), new_tokens=(1, 1, 1), samples=2)
    assert [len(read) for _ in engine.generate(todo)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("method", ["full", "snapkv", "pyramidkv", "kvzip", "snapkv+gkv", "expected-attention+gkv"])
def test_bytes_do_not_depend_on_whether_the_first_token_is_the_last(method):
    """A row counts what a slot holds: no queries, columns and states that only the prompt's eviction reads, and in
    layers with a sliding window no tokens that they no longer see."""
    mixed, made = build("qwen2-sliding"), make(method, {})
    for layout in ("dense", "paged") if made.uniform else ("paged",):
        one, two = (
            run(mixed, requests(lengths=(100,), new_tokens=(n,), samples=1), method=made, budget=40, layout=layout)[
                "0", 0
            ].usage
            for n in (1, 2)
        )
        assert one.kv_bytes_mean == one.kv_bytes_peak <= two.kv_bytes_peak <= two.kv_bytes_slot
        if layout == "dense":
            entries, beside = two.entries_peak - one.entries_peak, two.kv_bytes_extra - one.kv_bytes_extra
            columns = 1 if method.endswith("gkv") else 0
            assert (entries, beside) == (1, 4 * (1 + columns) * 2 * 2)  # two heads in each of two evicted layers


def test_a_slot_stores_no_columns_and_states_of_a_method_that_evicts_the_prompt_only(loaded):
    todo = requests(lengths=(60,), new_tokens=(30,), samples=1)
    pair, alone = (
        run(loaded, todo, method=make(name, {}))["0", 0].usage
        for name in ("expected-attention+streaming-llm", "streaming-llm")
    )
    assert (pair.kv_bytes_peak, pair.kv_bytes_slot) == (alone.kv_bytes_peak, alone.kv_bytes_slot)
    [snapkv, kvzip] = (run(loaded, todo, method=name, layout="paged")["0", 0].usage for name in ("snapkv", "kvzip"))
    assert kvzip.kv_bytes_slot == snapkv.kv_bytes_slot


def test_caches_per_query_head_gain_at_most_interval_entries_per_kv_head(loaded):
    method = make("snapkv+gkv", {"snapkv.heads": "query", "snapkv.window": 8, "gkv.window": 8})
    usage = run(loaded, requests(lengths=(100,), new_tokens=(50,), samples=1), method=method, budget=48)["0", 0].usage
    assert (usage.entries_after_evict, usage.entries_peak) == (48, 48 + INTERVAL)


@dataclasses.dataclass(frozen=True)
class Greedy(Method):
    """Says that it protects more than its budget."""

    def protect(self, budget):
        from kvbench.eviction.api import Protect

        return Protect(sinks=budget, recent=4)

    def score(self, view):
        return view.positions.float()


@dataclasses.dataclass(frozen=True)
class Broken(Method):
    def score(self, view):
        return view.keys.norm(dim=-1) * float("nan")


@pytest.mark.parametrize("method", [Greedy(), Broken()])
def test_a_method_that_breaks_its_promise_stops_the_run(loaded, method):
    engine = Engine(loaded, method, budget=BUDGET, interval=INTERVAL, slots=2, max_tokens=200)
    with pytest.raises(BudgetViolation):
        list(engine.generate(requests(lengths=(60,), new_tokens=(20,), samples=1)))


def test_uneven_methods_are_refused_by_the_dense_layout(loaded):
    @dataclasses.dataclass(frozen=True)
    class Uneven(Broken):
        scope = "layer"

    with pytest.raises(UserError, match="paged"):
        Engine(loaded, Uneven(), budget=BUDGET, interval=INTERVAL, slots=2, max_tokens=200, layout="dense")


def test_triggers():
    assert [c for c in range(1, 33) if Every(8).due(c)] == [8, 16, 24, 32]
    assert [c for c in range(1, 33) if Every(8, after=4).due(c)] == [12, 20, 28]
    assert not Once().due(8)
    assert not Never().due(128)


def test_a_model_of_sliding_layers_only_is_refused_for_eviction():
    with pytest.raises(UserError, match=r"every layer .* a sliding window .* \(--max-new-tokens; max_tokens of Evict"):
        run(build("mistral-sliding"), requests(**TODO))


def test_a_sample_of_one_token_still_held_its_prompt(loaded):
    [request] = requests(lengths=(40,), new_tokens=(1,), samples=1)
    usage = run(loaded, [request])["0", 0].usage
    assert (usage.entries_peak, usage.entries_mean, usage.entries_after_evict) == (BUDGET, BUDGET, BUDGET)
    assert usage.kv_bytes_peak > 0


def test_a_request_beyond_the_engine_is_an_error_not_a_stray_write(loaded):
    engine = Engine(loaded, registry.methods.get("full")(), budget=None, interval=8, slots=2, max_tokens=20)
    with pytest.raises(ValueError, match="max_tokens=20"):
        list(engine.generate(requests(lengths=(3,), new_tokens=(40,), samples=1)))
