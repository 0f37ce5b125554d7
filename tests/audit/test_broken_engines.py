"""An engine, or a cache for `generate`, that breaks an invariant must be found, by the invariant that is about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from support.audits import Good, verdicts

from kvbench.audit.invariants.subject import Subject
from kvbench.engine import prefill
from kvbench.engine.cache.block_table import BlockTable
from kvbench.engine.cache.dense import DenseStack
from kvbench.engine.cache.paged import PagedStack
from kvbench.engine.cache.prompt import PromptCache
from kvbench.eviction import select
from kvbench.eviction.api import Needs
from kvbench.eviction.choose import make
from kvbench.eviction.view import LayerView
from kvbench.integrations.transformers_cache import EvictionCache


def test_an_engine_that_evicts_protected_entries(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "protected", lambda *a, **k: None)
    names, failed = verdicts(Good(), mqa)
    assert names == {"protect"}
    assert "protected entries evicted, first at position" in failed[0].reason


def test_an_engine_that_stores_wrong_positions(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = DenseStack.complete

    def shifted(self, batch, new):  # type: ignore[no-untyped-def]
        complete(self, batch, new)
        self.positions -= 1

    monkeypatch.setattr(DenseStack, "complete", shifted)
    names, _ = verdicts(Good(), mqa)
    assert {"real", "oracle", "layouts"} <= names


def test_an_engine_that_compacts_wrongly(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    carry_out = PagedStack.carry_out

    def keys_left_behind(self, cut, counts, movers):  # type: ignore[no-untyped-def]
        before = self.pool.keys.clone()
        carry_out(self, cut, counts, movers)
        self.pool.keys.copy_(before)

    monkeypatch.setattr(PagedStack, "carry_out", keys_left_behind)
    names, failed = verdicts(Good(), mqa)
    assert {"oracle", "layouts"} <= names
    assert {c.layout for c in failed if c.invariant == "oracle"} == {"paged", "tail"}  # which is paged too


def test_an_engine_that_loses_pages(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    clear = BlockTable.clear

    def forgetful(self, rows):  # type: ignore[no-untyped-def]
        clear(self, rows)
        self.pool.free.pop()

    monkeypatch.setattr(BlockTable, "clear", forgetful)
    _, failed = verdicts(Good(), mqa)
    assert any(c.invariant == "memory" and "a page is lost" in c.reason for c in failed)


def test_an_engine_that_frees_nothing(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = BlockTable.reserve
    monkeypatch.setattr(
        BlockTable,
        "reserve",
        lambda self, rows, lengths: reserve(self, rows, lengths.clip(self.pages[rows] * 16)),
    )
    _, failed = verdicts(Good(), mqa)
    assert any(c.invariant == "memory" and c.layout == "paged" for c in failed)


def test_a_prompt_that_reads_its_evicted_cache(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prefill is another experiment: its later chunks see an evicted cache, and the audit must notice."""
    from kvbench.audit.invariants import trial

    engine = trial.Engine
    monkeypatch.setattr(trial, "Engine", lambda *a, **k: engine(*a, **k | {"prefill": "chunked"}))
    names, _ = verdicts(Good(), mqa)
    assert "past" in names
    assert "oracle" not in names  # the masks say what happened


@pytest.mark.parametrize("options", [{"n": 8, "window": 16}, {"n": 24, "window": 8}], ids=["few", "many"])
def test_a_prompt_whose_newest_queries_are_the_probes(
    mqa: Subject, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    method = make("speckv", options)
    assert verdicts(method, mqa) == (set(), [])
    run_probes = prefill.run_probes

    def forgetful(cache, prompt, forward, block):  # type: ignore[no-untyped-def]
        newest = {}

        def heard(writer, tokens, start):  # type: ignore[no-untyped-def]
            logits = forward(writer, tokens, start)
            newest.update({index: layer.queries for index, layer in cache.layers.items()})
            return logits

        run_probes(cache, prompt, heard, block)
        for index, queries in newest.items():
            cache.layers[index].queries = queries

    monkeypatch.setattr(prefill, "run_probes", forgetful)
    names, failed = verdicts(method, mqa)
    assert "queries" in names
    ways = {c.layout for c in failed if c.invariant == "queries"}
    assert ways == {"dense", "paged", "tail", "share"}  # probes are not run in chunked reading
    assert all("queries at positions" in c.reason for c in failed if c.invariant == "queries")


@dataclass(frozen=True)
class Voted(Good):
    """Scored by the newest queries."""

    def needs(self) -> Needs:
        return Needs(queries="window", window=4)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.attend()


@dataclass(frozen=True)
class Newest(Good):
    """Scored by the attention of the newest 4 and 8 queries, which decode steps sum at the audit's interval."""

    def needs(self) -> Needs:
        return Needs(queries="since_last", newest=(4, 8), sums=True)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        return {}

    def score(self, view: LayerView) -> torch.Tensor:
        few, more = view.newest_attention((4, 8))
        return (few + 2 * more).sum(dim=2)


def test_an_engine_that_begins_sums_at_wrong_steps(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(Newest(), mqa) == (set(), [])
    monkeypatch.setattr(DenseStack, "mark", lambda self, slots, number: None)
    names, _ = verdicts(Newest(), mqa)
    assert "layouts" in names  # the paged layout stores queries


def test_an_engine_that_shows_queries_of_later_steps_wrongly(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.engine.evict import Evictor

    assert verdicts(Voted(), mqa) == (set(), [])
    view = Evictor._view

    def reversed_(self, store, batch, width, **sums):  # type: ignore[no-untyped-def]
        shown = view(self, store, batch, width, **sums)
        shown.queries = shown.queries.flip(2)
        return shown

    monkeypatch.setattr(Evictor, "_view", reversed_)
    names, failed = verdicts(Voted(), mqa)
    assert "queries" in names
    # Reading in chunks is nothing that a slot's newest queries depend on.
    assert {c.layout for c in failed if c.invariant == "queries"} == {"dense", "paged", "chunked", "tail", "share"}


def test_an_engine_that_tells_wrong_positions_of_queries(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    view = PromptCache.view

    def shifted(self, layer, queries, positions, *more):  # type: ignore[no-untyped-def]
        return view(self, layer, queries, positions - 1, *more)

    monkeypatch.setattr(PromptCache, "view", shifted)
    _, failed = verdicts(Voted(), mqa)
    assert any(c.invariant == "queries" and "the view places queries at positions" in c.reason for c in failed)


def test_an_engine_that_reads_a_prompt_in_chunks_without_evicting(
    mqa: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    evict = prefill._PromptEvictions.evict

    def only_the_last(self):  # type: ignore[no-untyped-def]
        if self.cache.seen == self.context:
            evict(self)
        else:
            self.peak = max(self.peak, self.cache.held())

    monkeypatch.setattr(prefill._PromptEvictions, "evict", only_the_last)
    names, failed = verdicts(Good(), mqa)
    assert names == {"budget"}
    assert [c.layout for c in failed] == ["chunked"]
    assert re.search(r"61.00 entries held while the long prompt is read; at most 40 ", failed[0].reason)


def test_an_engine_that_forgets_the_gaps_of_an_evicted_prompt(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read after an eviction stands at its own positions, not behind the entries that are left."""
    from kvbench.engine.writers import BlockWriter

    begin = BlockWriter.begin

    def behind_the_rows(self, start, count, *more):  # type: ignore[no-untyped-def]
        return begin(self, min((layer.rows for layer in self.cache.layers.values()), default=start), count, *more)

    monkeypatch.setattr(BlockWriter, "begin", behind_the_rows)
    _, failed = verdicts(Good(), mqa)
    assert {c.layout for c in failed if c.invariant == "oracle"} == {"chunked", "tail"}


def test_an_engine_that_rounds_shares_up(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.engine import setup

    entry_budget = setup.entry_budget
    monkeypatch.setattr(
        setup, "entry_budget", lambda method, budget, *a: entry_budget(method, budget, *a) + isinstance(budget, float)
    )
    names, failed = verdicts(Good(), mqa)
    assert names == {"budget"}
    assert [c.layout for c in failed] == ["share"]
    assert "25.00 entries per head kept at budget 24" in failed[0].reason


def test_a_bridge_with_another_interval(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.audit.invariants import exam

    monkeypatch.setattr(exam, "EvictionCache", lambda *a, **k: EvictionCache(*a, **k | {"interval": 5}))
    names, failed = verdicts(Good(), mqa)
    assert names == {"generate"}
    assert "the tokens of engine and EvictionCache differ from step" in failed[0].reason


def test_a_bridge_that_serves_its_first_row_only(mqa: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_key = EvictionCache._noise_key
    monkeypatch.setattr(EvictionCache, "_noise_key", lambda self, row, sample: noise_key(self, 0, sample))
    names, failed = verdicts(make("random", {}), mqa)
    assert names == {"generate"}
    assert failed[0].reason.endswith("for prompt 1 of the batch")
