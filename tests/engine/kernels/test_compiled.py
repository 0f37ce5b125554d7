"""Compiled decoder layers give the plain layers' tokens, leave no trace, and say when they cannot be compiled.

torch compiles for the CPU here; on a GPU it makes Triton kernels of the same groups of operations.
"""

from __future__ import annotations

import contextlib
import re
import shutil

import pytest
import torch
from support.methods import small
from support.models import build, requests
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from kvbench.engine.attention import interface
from kvbench.engine.kernels.compiled import CompiledLayers
from kvbench.engine.loop import Engine
from kvbench.records import Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler on a CPU"),
]


def decoded(loaded, layers=None, method="tova"):
    """Tokens of every sequence, and the logits of every decode step."""
    engine = Engine(loaded, small(method), budget=24, interval=8, slots=3, max_tokens=200)
    run, logits = engine.reader.model.run, []

    def recorded(handler, states, **inputs):
        decoding = handler is engine.steps.writer
        with layers.active() if decoding and layers else contextlib.nullcontext():
            out = run(handler, states, **inputs)
        if decoding:
            logits.append(out.logits[:, -1].clone())
        return out

    engine.reader.model.run = recorded
    todo = requests(lengths=(9, 33, 60), new_tokens=(20, 12, 16), samples=1, sampling=Sampling())
    return {done.request.doc_id: done.token_ids for done in engine.generate(todo)}, torch.stack(logits)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt-oss"])
def test_the_plain_layers_tokens(architecture):
    loaded, told = build(architecture), []
    layers = CompiledLayers(loaded.model, told.append)
    tokens, logits = decoded(loaded)
    compiled_tokens, compiled_logits = decoded(loaded, layers)
    assert compiled_tokens == tokens
    torch.testing.assert_close(compiled_logits, logits, atol=1e-5, rtol=0)
    assert not torch.equal(compiled_logits, logits)
    assert told == []
    graphs = counters["stats"]["unique_graphs"]
    decoded(loaded, layers)
    assert counters["stats"]["unique_graphs"] == graphs  # another engine compiles nothing again
    assert torch.equal(decoded(loaded)[1], logits)


def test_methods_that_read_hidden_states():
    loaded, told = build("qwen3"), []
    layers = CompiledLayers(loaded.model, told.append)
    token, heard = torch.zeros(3, 1, dtype=torch.long), []

    def handler(call):
        heard.append(call.hidden)
        return call.value.repeat_interleave(2, 1).transpose(1, 2) + call.hidden.mean()

    with torch.inference_mode(), interface.route(loaded.model, handler, hidden=True):
        plain = interface.run(loaded.model, input_ids=token, position_ids=token).logits
        with layers.active():
            compiled = interface.run(loaded.model, input_ids=token, position_ids=token).logits
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=0)
    assert not layers.failed
    for before, after in zip(heard[:3], heard[3:], strict=True):
        torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


def test_a_layer_is_at_most_fourteen_launches_beside_attention():
    """The calls in the code that torch writes: matrix products, and groups of all else."""
    loaded = build("qwen3")
    layers = CompiledLayers(loaded.model, pytest.fail)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        token = torch.zeros(3, 1, dtype=torch.long)

        def step():
            value_of = lambda call: call.value.repeat_interleave(2, 1).transpose(1, 2)  # noqa: E731
            with torch.inference_mode(), interface.route(loaded.model, value_of), layers.active():
                return interface.run(loaded.model, input_ids=token, position_ids=token)

        _, code = run_and_get_code(step)
    calls = re.findall(r"^ {8}(?:extern_kernels\.|cpp_fused_)\w+\(", "\n".join(code), flags=re.MULTILINE)
    assert sum("extern" in call for call in calls) == 7  # all layers share the code: q, k, v, o, gate, up, down
    assert len(calls) <= 14


def test_a_failure_is_told_once_and_changes_no_token():
    loaded, told = build("qwen2"), []
    tokens, logits = decoded(loaded)
    layers = CompiledLayers(loaded.model, told.append)
    torch._dynamo.reset()
    with config.patch({"cpp.cxx": ("/nonexistent/c++",), "force_disable_caches": True}):
        again, same = decoded(loaded, layers)
    assert (again, layers.failed, len(told)) == (tokens, True, 1)
    assert torch.equal(same, logits)
    assert re.fullmatch(r"the model's layers run uncompiled: torch.compile failed: .*c\+\+.*", told[0])


def test_an_error_of_a_handler_stays_what_it_is():
    loaded = build("qwen3")
    layers = CompiledLayers(loaded.model, pytest.fail)
    token = torch.zeros(3, 1, dtype=torch.long)

    def handler(call):
        raise ZeroDivisionError("from a method")

    routed = interface.route(loaded.model, handler)
    with torch.inference_mode(), routed, layers.active(), pytest.raises(ZeroDivisionError, match="from a method"):
        interface.run(loaded.model, input_ids=token, position_ids=token)


def test_more_shapes_than_torch_may_compile_run_uncompiled(monkeypatch):
    loaded, told = build("qwen3"), []
    monkeypatch.setattr("kvbench.engine.kernels.compiled.VARIANTS", 1)
    layers = CompiledLayers(loaded.model, told.append)
    torch._dynamo.reset()

    def logits(slots):
        token = torch.zeros(slots, 1, dtype=torch.long)
        value_of = lambda call: call.value.repeat_interleave(2, 1).transpose(1, 2)  # noqa: E731
        with torch.inference_mode(), interface.route(loaded.model, value_of), layers.active():
            return interface.run(loaded.model, input_ids=token, position_ids=token).logits

    logits(2)
    assert not layers.failed
    logits(3)
    assert layers.failed
    assert re.fullmatch(r"the model's layers run uncompiled: torch.compile failed: .*limit.*", *told)
