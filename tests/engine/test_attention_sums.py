"""Attention that decode steps sum per entry equals that of stored queries, which the engine shows at the next tick."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from kvbench.methods.foresightkv import ForesightKV
from support.methods import small, with_tables
from support.models import build, requests

from kvbench.engine import loop
from kvbench.engine.cache.layout import stored_queries, sum_marks, sums_attention
from kvbench.engine.evict import Evictor
from kvbench.engine.kernels import backends, masked
from kvbench.eviction.choose import from_label
from kvbench.eviction.terms.foresight import WINDOWS
from kvbench.eviction.view import make_view
from kvbench.records import FollowUp

INTERVAL = 8


@dataclasses.dataclass(frozen=True)
class Talk:
    """A second turn in the cache of the first one."""

    def follow(self, answers):
        return FollowUp(ids=tuple(range(5, 24)), fresh=False) if len(answers) < 2 else None


def observed(
    monkeypatch,
    loaded,
    method,
    *,
    sums,
    budget=24,
    change=lambda engine: None,
    interval=INTERVAL,
    new_tokens=(40, 20, 33, 27),
    marks=(),
    **options,
):
    """Every answer's tokens, and the columns after each observation: (noise key, tokens seen, layer) -> columns."""
    columns, observe = {}, Evictor._observe

    def recorded(self, stack, batch):
        observe(self, stack, batch)
        layers, entries = stack.layer_indices(batch.rows).tolist(), stack.entries(batch)
        for i, (slot, layer) in enumerate(zip((batch.rows % stack.slots).tolist(), layers)):
            kept = {name: column[i].clone() for name, column in entries.columns.items()}
            columns[self.noise_key[slot], self.cache.seen[slot], layer] = kept

    with monkeypatch.context() as patch:
        patch.setattr(Evictor, "_observe", recorded)
        patch.setattr(loop, "sums_attention", lambda *given: sums and sums_attention(*given))
        engine = loop.Engine(loaded, method, budget=budget, interval=interval, slots=3, max_tokens=500, **options)
        assert [layer.sums is not None for layer in engine.cache.evicting] == [sums] * len(engine.cache.evicting)
        needs = method.during("decode").needs()
        width = needs.window if marks else needs.width
        assert engine.cache.shape.queries == (width if sums else max(width, interval))
        assert engine.cache.shape.marks == marks
        change(engine)
        todo = requests(lengths=(9, 60, 33, 14), new_tokens=new_tokens, samples=2)
        todo[2] = dataclasses.replace(todo[2], conversation=Talk(), max_tokens=400)
        done = {(d.request.doc_id, d.sample): d.token_ids for d in engine.generate(todo)}
    return done, columns


def check(wanted, got):
    assert got[0] == wanted[0]
    assert got[1].keys() == wanted[1].keys()
    assert len(got[1]) > 20
    for place, columns in wanted[1].items():
        for name, column in columns.items():
            torch.testing.assert_close(got[1][place][name], column, atol=1e-5, rtol=1e-5, msg=f"{place} {name}")


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("qwen3", "h2o"),
        ("qwen3", "h2o(reduce_g=max,group=2)"),
        ("qwen3", "foresightkv(sampling=false)"),
        ("gemma2", "h2o"),  # rings and softcap
        ("gpt-oss", "h2o"),  # sinks
        ("deepseek-v3", "h2o"),  # latents
        ("qwen3.5", "h2o"),  # recurrent layers
    ],
)
def test_equal_to_stored_queries(monkeypatch, architecture, method):
    loaded, made = build(architecture), from_label(method)
    loaded = with_tables(loaded) if made.weights() else loaded
    wanted = observed(monkeypatch, loaded, made, sums=False)
    check(wanted, observed(monkeypatch, loaded, made, sums=True))


@pytest.mark.parametrize("interval", [32, 33, 45, 70])
@pytest.mark.parametrize(
    "label", ["foresightkv(sampling=false)", "snapkv+foresightkv(snapkv.window=4,foresightkv.sampling=false)"]
)
def test_the_newest_queries_are_summed_apart(monkeypatch, interval, label):
    """From 32, 16 and 8 steps before each tick on; in prompts, and without sums, from stored queries."""
    method = from_label(label)
    decode, newest, score = method.during("decode"), {}, ForesightKV.score

    def scored(self, view):
        shown = torch.stack(view.newest_attention(WINDOWS), dim=2)
        layers = view.layer_index if isinstance(view.layer_index, torch.Tensor) else [view.layer_index]
        for i, layer in enumerate(layers):
            newest[int(view.noise_key[i]), int(view.seen[i]), int(layer)] = shown[i].clone()
        return score(self, view)

    monkeypatch.setattr(ForesightKV, "score", scored)
    loaded = with_tables(build("qwen3"))
    marks = (32, 16, 8)
    assert sum_marks(method, interval, True) == marks
    assert sum_marks(method, 31, True) == sum_marks(method, interval, False) == ()
    assert stored_queries(method, interval, 1000, True)[1] == 0
    tokens = {"interval": interval, "new_tokens": (100, 71, 3 * interval, 80)}
    wanted = observed(monkeypatch, loaded, method, sums=False, **tokens)
    stored = dict(newest)
    newest.clear()
    check(wanted, observed(monkeypatch, loaded, method, sums=True, marks=marks, **tokens))
    assert newest.keys() == stored.keys()
    assert decode.needs().newest == WINDOWS
    for place, shown in stored.items():
        torch.testing.assert_close(newest[place], shown, atol=1e-5, rtol=1e-5, msg=str(place))
    assert any(shown[:, 0].ne(shown[:, 2]).any() for shown in stored.values())


def test_slot_by_slot(monkeypatch):
    def change(engine):
        engine.steps.writer.fixed = False

    loaded, made = build("qwen3"), small("h2o")
    wanted = observed(monkeypatch, loaded, made, sums=False)
    monkeypatch.setattr("kvbench.engine.step_writers.FIXED_ROWS", 8)
    check(wanted, observed(monkeypatch, loaded, made, sums=True, change=change))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch needs a C++ compiler to compile for a CPU")
def test_in_a_compiled_program(monkeypatch):
    """Its preparation runs steps three times; the sums are those of one run."""
    loaded, made = build("qwen3"), small("h2o")
    wanted = observed(monkeypatch, loaded, made, sums=False)
    check(wanted, observed(monkeypatch, loaded, made, sums=True, program=True, notice=pytest.fail))


def test_an_ended_sequence_receives_nothing():
    """PyTorch's own backend; `decode_cases.py` compares the Triton kernel with it."""
    query, key, value = torch.randn(2, 4, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    keys, values, sums = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8), torch.zeros(2, 2, 2, 6)
    lengths = torch.tensor([[3], [5]])
    masked.decode(query, key, value, keys, values, lengths, torch.tensor([1, 0]), scaling=1.0, splits=1, sums=sums)
    torch.testing.assert_close(sums[0].sum(dim=-1), torch.ones(2, 2))
    assert (sums[0, ..., :4] > 0).all()
    assert (sums[0, ..., 4:] == 0).all()
    assert (sums[1] == 0).all()


@pytest.mark.parametrize(
    ("method", "layout", "backend", "summed"),
    [
        ("h2o", "auto", "triton", True),
        ("h2o", "dense", "torch", True),
        ("h2o", "paged", "triton", False),  # pages change owners between two ticks
        ("h2o", "auto", "varlen", False),  # returns no attention weights
        ("snapkv+h2o", "auto", "triton", True),
        ("h2o+snapkv-decode", "auto", "triton", False),
        ("ada-kv(base=h2o)", "auto", "triton", False),
        ("foresightkv", "auto", "triton", True),
        ("foresightkv(features=released8)", "auto", "triton", False),  # reads largest and smallest attention, too
        ("expected-attention", "auto", "triton", False),  # reads the queries themselves
        ("full", "auto", "triton", False),
    ],
)
def test_who_has_sums(method, layout, backend, summed):
    assert backend in backends.BACKENDS
    assert sums_attention(from_label(method), layout, backend) is summed


def test_a_method_that_asks_for_more_than_sums_is_told():
    sums = torch.rand(1, 2, 3, 7)
    view = make_view(torch.randn(1, 2, 7, 8), torch.randn(1, 6, 0, 8), budget=4, sums=sums)
    torch.testing.assert_close(view.attend(reduce_g=None, reduce_q="sum"), sums)
    torch.testing.assert_close(view.attend(reduce_q="sum"), sums.mean(dim=2))
    torch.testing.assert_close(view.attend(reduce_g="sum", reduce_q="sum"), sums.sum(dim=2))
    for asked in (
        dict(reduce_q="mean"),
        dict(reduce_q="sum", reduce_g="max"),
        dict(reduce_q="sum", domain="outside_window"),
        dict(reduce_q="sum", order="group_then_softmax"),
        dict(reduce_q="sum", among=torch.ones(1, 2, 7, dtype=torch.bool)),
    ):
        with pytest.raises(ValueError, match="sum"):
            view.attend(**asked)
