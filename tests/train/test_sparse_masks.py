"""Masks from logged evictions: a plain forward pass sees what the engine saw, layer by layer and token by token."""

from __future__ import annotations

import pytest
import torch
from support.methods import small, with_tables
from support.models import ARCHITECTURES, build
from support.traces import traces

from kvbench.engine.attention.geometry import homes
from kvbench.engine.loop import Engine
from kvbench.engine.reference import KeptHistory
from kvbench.eviction import noise
from kvbench.replay.reader import TraceReader
from kvbench.train.forward import forward
from kvbench.train.sparse_masks import NEVER, Lifetimes, SparseAttention, visible

BUDGET, INTERVAL, LONGEST = 24, 8, 160


class Silent:
    def opened(self, cache):
        pass

    def block(self, index):
        pass

    def attended(self, call, first, out):
        pass

    def predicted(self, first, logits):
        pass


def evict(loaded, method, asked):
    """What the engine predicted of forced answers, and what its evictions kept, told to both recorders."""
    history, lifetimes = KeptHistory(), Lifetimes(homes(loaded.geometry))

    def log(*event):
        history(*event)
        lifetimes(*event)

    budget = BUDGET if method.takes_budget else None
    engine = Engine(
        loaded,
        method,
        budget=budget,
        interval=INTERVAL,
        slots=len(asked),
        max_tokens=LONGEST,
        prefill_chunk=20,
        log=log,
    )
    done = {g.request.doc_id: g.log_probs for g in engine.generate([t.request for t in asked])}
    return [torch.tensor(done[t.request.doc_id]) for t in asked], history, lifetimes


def keys(trace):
    return [noise.signed64(trace.request.noise_key(sample)) for sample in (-1, 0)]


def length(asked):
    return max(len(t.prompt + t.answer) for t in asked)


def masked(loaded, asked, until, rows=1024):
    """Log-probabilities of the answers' tokens in one plain pass over all of them, shorter ones padded."""
    ids = torch.zeros(len(asked), length(asked), dtype=torch.int64)
    for row, t in enumerate(asked):
        ids[row, : len(t.prompt + t.answer)] = torch.tensor(t.prompt + t.answer)
    said = forward(loaded.model, SparseAttention(until, rows), input_ids=ids, logits=0).log_softmax(dim=-1)
    return [
        said[row, len(t.prompt) - 1 : len(t.prompt + t.answer) - 1].gather(-1, torch.tensor(t.answer)[:, None])[:, 0]
        for row, t in enumerate(asked)
    ]


def worst(found, wanted):
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_the_token_of_the_compression_still_sees_everything():
    lifetimes = Lifetimes({0: 0})
    lifetimes(7, 4, 0, [torch.tensor([0, 3]), torch.tensor([2, 1])])
    lifetimes(7, 6, 0, [torch.tensor([3, 5]), torch.tensor([2, 4])])
    until = lifetimes.tables([[7]], 8)[0]
    assert until[0].tolist() == [
        [6, 4, 4, NEVER, 6, NEVER, NEVER, NEVER],
        [4, 6, NEVER, 4, NEVER, 6, NEVER, NEVER],
    ]
    rows = visible(until, 0, 8)[0, 0].int().tolist()
    assert rows[3] == [1, 1, 1, 1, 0, 0, 0, 0]  # the token with which four were read
    assert rows[4] == [1, 0, 0, 1, 1, 0, 0, 0]  # the next one
    assert rows[5] == [1, 0, 0, 1, 1, 1, 0, 0]
    assert rows[6] == [0, 0, 0, 1, 0, 1, 1, 0]
    assert visible(until, 0, 8, window=2)[0, 0, 6].int().tolist() == [0, 0, 0, 0, 0, 1, 1, 0]
    assert torch.equal(visible(until, 5, 3), visible(until, 0, 8)[:, :, 5:])
    lifetimes.clear()
    assert lifetimes.tables([[7]], 8) == {}


@pytest.mark.parametrize(
    "name", ["gkv", "h2o", "streaming-llm", "snapkv", "tova", "ada-kv while decoding", "snapkv by query head"]
)
def test_a_plain_pass_under_the_masks_predicts_as_the_engine(name):
    loaded, asked = with_tables(build("qwen3")), traces([(45, 30), (13, 41), (20, 9)])
    wanted, history, lifetimes = evict(loaded, small(name), asked)
    until = lifetimes.tables([keys(t) for t in asked], length(asked))
    assert sorted(until) == [0, 1, 2]
    for layer, table in until.items():
        for row, trace in enumerate(asked):
            slow = history.visible(keys(trace), layer, table.shape[1], length(asked))
            assert torch.equal(visible(table, 0, length(asked))[row], slow)
    with torch.no_grad():
        assert worst(masked(loaded, asked, until), wanted) < 1e-4
        assert worst(masked(loaded, asked, {}), wanted) > 1e-2  # without them it does not


@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "gemma2", "gemma3n", "gpt-oss", "qwen2-sliding"])
def test_groups_windows_caps_and_sinks(architecture, monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, "llama-mha", ("LlamaConfig", {"num_key_value_heads": 4}))
    loaded, asked = build(architecture), traces([(45, 38)])
    wanted, _, lifetimes = evict(loaded, small("gkv"), asked)
    with torch.no_grad():
        assert worst(masked(loaded, asked, lifetimes.tables([keys(asked[0])], length(asked))), wanted) < 1e-4


def test_the_masks_of_one_layer_or_of_one_interval_before_are_others():
    """The two mistakes of the released code would show: every layer with the last one's mask, and masks that lag."""
    loaded, asked = build("qwen3"), traces([(45, 38)])
    wanted, _, lifetimes = evict(loaded, small("gkv"), asked)
    until = lifetimes.tables([keys(asked[0])], length(asked))
    lagging = {layer: table.where(table == NEVER, table + INTERVAL) for layer, table in until.items()}
    with torch.no_grad():
        assert worst(masked(loaded, asked, until), wanted) < 1e-4
        assert worst(masked(loaded, asked, dict.fromkeys(until, until[2])), wanted) > 1e-2
        assert worst(masked(loaded, asked, lagging), wanted) > 1e-2


def test_reading_finished_answers_logs_the_same_evictions():
    loaded, asked = build("qwen3"), traces([(45, 30), (45, 30)])
    _, _, generated = evict(loaded, small("gkv"), asked)
    read = Lifetimes(homes(loaded.geometry))
    reader = TraceReader(loaded, small("gkv"), budget=BUDGET, interval=INTERVAL, max_tokens=LONGEST, log=read)
    reader.read(asked, Silent())
    named = [keys(t) for t in asked]
    tables = read.tables(named, length(asked)), generated.tables(named, length(asked))
    assert all(torch.equal(tables[0][layer], tables[1][layer]) for layer in range(3))


@pytest.mark.parametrize("architecture", ["qwen3", "gpt-oss"])
def test_blocks_of_queries_give_the_same_gradients(architecture):
    loaded, asked = build(architecture, scale=1.0), traces([(45, 30), (20, 41)])
    _, _, lifetimes = evict(loaded, small("gkv"), asked)
    until = lifetimes.tables([keys(t) for t in asked], length(asked))
    found = []
    for rows in (1024, 7):
        loaded.model.zero_grad()
        loss = torch.cat(masked(loaded, asked, until, rows)).sum()
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in loaded.model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_a_method_that_never_evicts_leaves_a_causal_pass():
    loaded, asked = build("qwen3"), traces([(13, 5)])
    wanted, _, lifetimes = evict(loaded, small("gkv"), asked)  # 18 entries of 24
    assert lifetimes.tables([keys(asked[0])], length(asked)) == {}
    with torch.no_grad():
        assert worst(masked(loaded, asked, {}), wanted) < 1e-4
