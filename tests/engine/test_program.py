"""A decode step compiled as one program on a CPU: the tokens of the plain step, no neighbour in the bits of a slot, one
program per kind of step, and a line that says why a step runs plain."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil

import numpy as np
import pytest
import torch
from support.methods import small, with_tables
from support.models import build, requests

from kvbench.engine import program
from kvbench.engine.graph import CaptureError
from kvbench.engine.loop import Engine
from kvbench.engine.model.packing import packed_from
from kvbench.engine.program import StepProgram
from kvbench.engine.recording import Recording
from kvbench.records import Sampling

compiles = pytest.mark.skipif(not shutil.which("g++"), reason="torch needs a C++ compiler to compile for a CPU")
LENGTHS, TOKENS = (9, 33, 60), (20, 12, 16)


def decoded(loaded, method="tova", *, compiled=True, slots=3, lengths=LENGTHS, tokens=TOKENS, told=None, sampling=None):
    """Every sequence's tokens, the logits of every decode step, and the engine."""
    made, logits = small(method), []
    engine = Engine(
        loaded,
        made,
        budget=24 if made.takes_budget else None,
        interval=8,
        slots=slots,
        max_tokens=200,
        program=compiled,
        notice=pytest.fail if told is None else told.append,
    )
    draw = engine.steps._draw

    def recorded(rows, state):
        if len(rows) == slots and state is engine.steps.state:
            logits.append(rows.clone())
        draw(rows, state)

    engine.steps._draw = recorded
    todo = requests(lengths=lengths, new_tokens=tokens, samples=1, sampling=sampling or Sampling())
    return {done.request.doc_id: done.token_ids for done in engine.generate(todo)}, logits, engine


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("qwen3", "snapkv-decode"),  # stores queries
        ("gemma2", "gkv"),  # rings and softcap
        ("deepseek-v3", "tova"),  # latents and experts
        ("deepseek-v3.2", "tova"),  # an indexer chooses among the entries
        ("qwen3.5", "locret"),  # recurrent layers; a column computed from each new token
    ],
)
def test_the_plain_steps_tokens(architecture, method):
    loaded = with_tables(build(architecture))
    tokens, logits, engine = decoded(loaded, method, compiled=False)
    assert engine.decoding == "torch"
    again, close, engine = decoded(loaded, method)
    assert engine.decoding == "torch compiled"
    assert again == tokens
    for mine, plain in zip(close, logits, strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=0)
    assert not all(map(torch.equal, close, logits))  # rounds differently: the plain step did not run


@compiles
@pytest.mark.slow
def test_no_neighbour_in_a_slots_bits():
    """With sampling, and with more requests than slots."""
    loaded, sampling = build("qwen3"), Sampling(temperature=0.8, top_p=0.9)
    lengths, tokens = (9, 33, 60, 21, 40), (20, 12, 16, 30, 9)
    together, _, _ = decoded(loaded, lengths=lengths, tokens=tokens, sampling=sampling)
    todo = requests(lengths=lengths, new_tokens=tokens, samples=1, sampling=sampling)
    for alone in todo:
        engine = Engine(loaded, small("tova"), budget=24, interval=8, slots=3, max_tokens=200, program=True)
        [done] = engine.generate([alone])
        assert done.token_ids == together[alone.doc_id]
        assert done.usage.decoding == "torch compiled"


@compiles
@pytest.mark.slow
def test_one_program_per_kind_of_step(monkeypatch):
    loaded, compiled = build("llama"), []
    compile_ = program._inductor.compile
    monkeypatch.setattr(program._inductor, "compile", lambda *args, **kw: compiled.append(1) or compile_(*args, **kw))
    first = decoded(loaded)[0]
    assert decoded(loaded)[0] == first
    assert len(compiled) == 1  # another engine of the same size compiles nothing
    with torch.no_grad():
        loaded.model.lm_head.weight.mul_(-1)  # a program may hold a copy of the weights
    again = decoded(loaded)[0]
    assert len(compiled) == 2
    assert loaded.model in program._newest
    assert decoded(loaded, compiled=False)[0] == again != first
    assert loaded.model not in program._newest  # a plain engine frees the weights that the program holds


@compiles
@pytest.mark.slow
def test_bfloat16():
    if packed_from(0, torch.bfloat16) is None:
        pytest.skip("oneDNN has no bfloat16 product on this processor")
    loaded, told = build("qwen3"), []
    loaded = dataclasses.replace(loaded, model=loaded.model.to(torch.bfloat16), dtype=torch.bfloat16)
    _, logits, engine = decoded(loaded, told=told)
    assert (engine.decoding, told) == ("torch compiled", [])
    assert all(rows.dtype == torch.bfloat16 and rows.isfinite().all() for rows in logits)


@pytest.mark.parametrize("method", ["ada-kv", "retention"])
def test_heads_of_different_lengths_run_plain(method):
    loaded, told = with_tables(build("qwen3")), []
    tokens, logits, engine = decoded(loaded, method, told=told)
    assert told == ["decode steps run uncompiled: how many entries they read depends on the sequences"]
    plain, same, _ = decoded(loaded, method, compiled=False)
    assert (tokens, engine.decoding) == (plain, "torch")
    assert all(map(torch.equal, same, logits))


def test_without_a_compiler_the_step_runs_plain():
    from torch._inductor import config

    loaded, told = build("qwen2"), []
    plain, _, _ = decoded(loaded, compiled=False)
    with config.patch({"cpp.cxx": ("/nonexistent/c++",), "force_disable_caches": True}):
        tokens, _, engine = decoded(loaded, told=told)
    assert (tokens, engine.decoding) == (plain, "torch")
    assert re.fullmatch(r"decode steps run uncompiled: torch cannot compile the step: .*c\+\+.*", *told)


def test_a_program_with_other_logits_is_refused(monkeypatch):
    loaded, told = build("qwen2"), []
    plain, _, _ = decoded(loaded, compiled=False)
    wrong = lambda module, examples, options: lambda *inputs: (module(*inputs)[0] + 1,)  # noqa: E731
    monkeypatch.setattr(program._inductor, "compile", wrong)
    tokens, _, engine = decoded(loaded, told=told)
    assert (tokens, engine.decoding) == (plain, "torch")
    assert told == ["decode steps run uncompiled: the logits of the compiled step differ from those of the plain step"]


HOST = "shape or Python value may change at each step"


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (lambda x: x * float(x.sum()), HOST),
        (lambda x: x[x > 0], HOST),
        (lambda x: x if x.sum() > 0 else -x, HOST),
        (lambda x: x[torch.where(x > 0)], HOST),
        (lambda x: x.repeat_interleave(x.long()), HOST),
        (lambda x: x * x.tolist()[0], "host reads a tensor"),
        (lambda x: x * float(x.numpy()[0]), "host reads a tensor"),
        (lambda x: x * float(np.asarray(x)[0]), "host reads a tensor"),
        (lambda x: x + torch.rand(3), "draws random numbers"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, training=True), "draws random numbers"),
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]), "from Python numbers"),
    ],
)
def test_what_cannot_be_recorded(step, cause):
    x = torch.ones(3)
    with torch.inference_mode(), pytest.raises(CaptureError, match=cause):
        Recording(lambda: step(x), [])


def test_a_recording_runs_again():
    """In-place changes, views, several results, numbers as an index, and a dropout that does nothing."""
    weight, state, at = torch.arange(6.0).view(2, 3), torch.zeros(2, 3), torch.tensor([1, 0])

    def step():
        state[:, 1] += 1
        low, high = (state @ weight.T).sort().values.unbind(1)
        state.index_copy_(0, at, torch.stack([low, high, low], 1))
        return torch.nn.functional.dropout(state[at] + weight, 0.5, training=False)

    with torch.inference_mode():
        recording = Recording(step, [weight])
        assert recording.same_as(Recording(step, [weight]))
        assert [t is weight for t in recording.constants] == [True]
        assert {id(t) for t in recording.inputs} == {id(state), id(at)}
        before = state.clone()
        expected = step()
        after = state.clone()
        state.copy_(before)
        [again] = recording.module(*recording.inputs)
    assert torch.equal(again, expected)
    assert torch.equal(state, after)


def test_recordings_with_other_constants_differ():
    x, weights = torch.ones(2, 3), (torch.ones(3, 3), torch.zeros(3, 3))
    one, other = (Recording(lambda w=w: x @ w, weights) for w in weights)
    assert one.same_as(Recording(lambda: x @ weights[0], weights))
    assert not one.same_as(other)


def test_tensors_that_share_memory_are_refused_if_one_changes():
    state = torch.zeros(4, 3)
    apart, shared = (state[:, 0], state[:, 1]), (state[:3], state[2:])
    for pair, fits in ((apart, True), (shared, False)):
        assert program._overlap(pair) is not fits
    with torch.inference_mode():
        assert Recording(lambda: shared[0] + shared[1][:1], []).changed == []
        with pytest.raises(CaptureError, match="share memory"):
            StepProgram(lambda: shared[1] + shared[0].mul_(2)[:2], torch.nn.Linear(1, 1), 1, lambda: None)


def test_a_step_that_changes_with_the_host_is_refused():
    x, calls = torch.ones(3), []

    def step():
        calls.append(1)
        return x + len(calls)

    with torch.inference_mode(), pytest.raises(CaptureError, match="has other operations when it runs a second time"):
        StepProgram(step, torch.nn.Linear(1, 1), 1, lambda: None)


def test_infinite_logits_do_not_widen_the_tolerance():
    expected = torch.tensor([[-torch.inf, 1.0, 2.0]])
    program._compare(expected * 1.0001, expected)
    with pytest.raises(CaptureError, match="the logits of the compiled step differ"):
        program._compare(expected * torch.tensor([1.0, -5.0, -5.0]), expected)


def test_after_a_failure_the_linears_stay_as_they_were(monkeypatch):
    """So the bits of an answer do not depend on whether it came before the failure or, in a continued run, after it."""
    loaded, told, seen = build("qwen2"), [], []
    packs = lambda model, rows: contextlib.nullcontext(seen.append(rows))  # noqa: E731
    monkeypatch.setattr("kvbench.engine.loop.packed_linears", packs)
    monkeypatch.setattr(program._inductor, "compile", lambda *args, **kw: 1 / 0)
    _, _, engine = decoded(loaded, told=told)
    list(engine.generate(requests(lengths=(9,), new_tokens=(8,), samples=1)))
    assert (seen, len(told)) == ([0, 0], 1)
