"""Decode steps in blocks and as a CUDA graph: the tokens and meters of single steps on the CPU, and no waiting.

The CUDA tests run on a pretended device, which captures and counts but has the CPU's arithmetic. Triton's kernel runs
in its interpreter there, which `test_the_kernel_in_a_graph` needs a process of its own for; the other tests use the
backend of PyTorch's operations. No test sees a real graph, its memory, or compiled layers: `test_cuda.py` does.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build, requests
from support.pretend_cuda import pretended_cuda

from kvbench.engine.graph import CaptureError, StepGraph
from kvbench.engine.loop import Engine
from kvbench.engine.memory import OutOfMemory
from kvbench.engine.model.load import prepare
from kvbench.engine.steps import DecodeSteps
from kvbench.errors import UserError
from kvbench.records import FollowUp, Sampling

METHODS = ("full", *EVICTING, *VARIANTS)
BUDGET, INTERVAL, ROOM = 24, 8, 120
TODO = requests(lengths=(9, 30, 33, 5), new_tokens=(20, 3, 25, 12), samples=1, sampling=Sampling())
DRAWN = requests(lengths=(9, 30), new_tokens=(14, 11), samples=2, sampling=Sampling(temperature=0.8, top_p=0.9))
TIMES = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "evict_seconds": 0.0, "decoding": ""}


@pytest.fixture(scope="module")
def loaded():
    return with_tables(build("qwen3"))


@pytest.fixture
def device():
    with pretended_cuda() as device:
        yield device


def on_gpu(architecture="qwen3"):
    model = build(architecture)
    return with_tables(prepare(model.model.to("cuda"), model.tokenizer))


def engine(loaded, method, slots=2, **more):
    made = small(method)
    budget = BUDGET if made.takes_budget else None
    apart = {"backend": "torch", "compiled": False} if loaded.device.type == "cuda" else {"look": 1}
    more = apart | more
    return Engine(loaded, made, budget=budget, interval=INTERVAL, slots=slots, max_tokens=ROOM, **more)


def results(made, todo):
    """All that a sample reports, times apart."""
    return {
        (d.request.doc_id, d.sample): dataclasses.replace(d, usage=dataclasses.replace(d.usage, **TIMES))
        for d in made.generate(todo)
    }


@dataclasses.dataclass(frozen=True)
class Talk:
    """Two more turns in the slot, then one as a new prompt."""

    def follow(self, answers):
        return FollowUp(ids=tuple(range(5, 16)), fresh=len(answers) == 3) if len(answers) < 4 else None


def special(free):
    """Requests with end tokens, stop strings, a least number of tokens, given continuations and several turns.

    free: the tokens of the first two of TODO without any of these.
    """
    a, b = TODO[0], dataclasses.replace(TODO[2], max_new_tokens=9)
    end, text = (free["0", 0].token_ids[6],), f" {free['2', 0].token_ids[4]} {free['2', 0].token_ids[5]}"
    made = [
        dataclasses.replace(a, stop_ids=end),
        dataclasses.replace(a, stop_ids=(free["0", 0].token_ids[0],), min_new_tokens=5),
        dataclasses.replace(TODO[2], stop_strings=(text,)),
        dataclasses.replace(a, forced=(7, 130, 12, 9, 44, 3, 3, 9, 100, 2, 1), max_new_tokens=11),
        dataclasses.replace(b, conversation=Talk(), max_tokens=ROOM),
        dataclasses.replace(b, conversation=Talk(), max_tokens=ROOM, stop_ids=(free["2", 0].token_ids[3],)),
        dataclasses.replace(b, conversation=Talk(), max_tokens=ROOM, stop_strings=(text,)),
    ]
    return [dataclasses.replace(request, doc_id=f"special {i}") for i, request in enumerate(made)]


# -- blocks of several steps, on the CPU


@pytest.mark.parametrize("layout", ["auto", "paged"])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_steps_give_the_results_of_single_steps(loaded, method, layout):
    if layout == "paged" and not small(method).uniform:
        pytest.skip("paged is this method's own layout")
    alone = results(engine(loaded, method, layout=layout), TODO)
    assert results(engine(loaded, method, layout=layout, look=5), TODO) == alone


@pytest.mark.parametrize("method", ["full", "gkv", "ada-kv while decoding", "trimkv"])
def test_whatever_ends_or_continues_a_turn_works_inside_a_block(loaded, method):
    todo = special(results(engine(loaded, method), TODO))
    alone = results(engine(loaded, method), todo)
    assert results(engine(loaded, method, look=8), todo) == alone
    assert {d.stop_reason for d in alone.values()} == {"stop", "stop_string", "length"}
    assert len(alone["special 4", 0].turns) == 4


def test_a_stop_string_before_another_turn_ends_in_a_ring_too():
    model = build("gemma2")  # every other layer is a ring of 24
    todo = special(results(engine(model, "gkv"), TODO))
    alone = results(engine(model, "gkv"), todo)
    assert results(engine(model, "gkv", look=8), todo) == alone


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3.5"])
def test_states_of_other_layers_do_not_outrun_a_turn(architecture):
    model = build(architecture)
    todo = special(results(engine(model, "gkv"), TODO))
    alone = results(engine(model, "gkv"), todo)
    assert results(engine(model, "gkv", look=8), todo) == alone


def test_a_block_of_nan_logits_ends_at_the_first():
    broken = build("qwen3")
    with torch.no_grad():
        broken.model.lm_head.weight[3] = float("nan")
    made = results(engine(broken, "full", look=4), TODO)
    assert {(d.status, d.token_ids) for d in made.values()} == {("nan_logits", ())}


def test_on_a_cpu_a_block_ends_with_the_first_sequence_that_ends(loaded):
    def steps(look):
        read = []
        made = engine(loaded, "gkv", look=look, on_step=lambda tokens, *_: read.append(tokens))
        results(made, TODO)
        return read

    single, blocks = steps(1), steps(8)
    assert sum(blocks) == sum(single)
    assert len(blocks) < len(single) / 3


def test_on_a_cpu_the_host_looks_for_stop_strings_after_every_step(loaded):
    read = []
    made = engine(loaded, "gkv", look=8, on_step=lambda tokens, *_: read.append(tokens))
    results(made, [dataclasses.replace(request, stop_strings=("never",)) for request in TODO])
    assert set(read) <= {1, 2}  # tokens of at most two slots


# -- the graph


@pytest.mark.parametrize("architecture", ["lfm2", "qwen3.5"])
def test_preparing_a_graph_leaves_the_states_of_other_layers(architecture, device):
    todo = [*TODO, *special(results(engine(build(architecture), "gkv"), TODO))[4:]]
    want = results(engine(build(architecture), "gkv"), todo)
    graph = engine(on_gpu(architecture), "gkv")
    assert {key: d.token_ids for key, d in results(graph, todo).items()} == {k: d.token_ids for k, d in want.items()}
    assert graph.decoding == "torch graph"


def test_every_method_decodes_from_a_graph_without_waiting(loaded, device):
    model = on_gpu()
    replays, steps = device.watch(StepGraph, "replay"), device.watch(DecodeSteps, "_step")
    for method in METHODS:
        for layout in ("dense", "paged") if small(method).uniform else ("paged",):
            want = results(engine(loaded, method, layout=layout), TODO[:3])
            captured, eager = len(steps), engine(model, method, layout=layout, graph=False)
            graph = engine(model, method, layout=layout)
            tokens = {key: d.token_ids for key, d in want.items()}
            assert {key: d.token_ids for key, d in results(graph, TODO[:3]).items()} == tokens, (method, layout)
            assert graph.decoding == "torch graph"
            grown = len(steps) - captured  # three steps per capture; a grown block table needs another
            assert grown in (3, 6)
            if method in ("gkv", "trimkv", "ada-kv"):
                assert {key: d.token_ids for key, d in results(eager, TODO[:3]).items()} == tokens
                assert eager.decoding == "torch"
    assert {(c.launches, c.syncs, c.waits, c.h2d, c.d2h) for c in replays} == {(1, 0, 0, 0, 0)}
    assert all((c.syncs, c.waits, c.h2d, c.d2h) == (0, 0, 0, 0) for c in steps)


def test_the_host_waits_once_per_block(device):
    blocks = device.watch(Engine, "_block")
    made = engine(on_gpu(), "full")
    results(made, requests(lengths=(9, 12), new_tokens=(81, 81), samples=1, sampling=Sampling()))
    assert len(blocks) == 10
    assert [(c.syncs + c.waits) for c in blocks[1:]] == [1] * 9  # the first one captures


@pytest.mark.parametrize("method", ["gkv", "ada-kv while decoding"])
def test_ends_turns_draws_and_refills_in_a_graph(loaded, device, method):
    model, todo = on_gpu(), special(results(engine(loaded, method), TODO))
    for some in (todo, DRAWN):
        want, got = (results(engine(m, method), some) for m in (loaded, model))
        for key, one in want.items():
            other = got[key]
            assert (other.turns, other.token_ids, other.stop_reason) == (one.turns, one.token_ids, one.stop_reason)
            assert other.log_probs == pytest.approx(one.log_probs, rel=1e-4, abs=1e-4)
            assert other.usage == one.usage


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_tokens_do_not_depend_on_neighbours_slots_or_refills(device, layout):
    model, todo = on_gpu(), requests(lengths=(9, 30, 33, 5), new_tokens=(14, 9, 20, 12), samples=2)
    together = results(engine(model, "gkv", slots=3, layout=layout), todo)
    for seed in range(2):
        shuffled = random.Random(seed).sample(todo, len(todo))
        assert results(engine(model, "gkv", slots=3, layout=layout), shuffled) == together
    alone = results(engine(model, "gkv", slots=3, layout=layout), [dataclasses.replace(todo[2], samples=(1,))])
    assert alone["2", 1].token_ids == together["2", 1].token_ids


def test_a_step_that_waits_is_not_captured_and_says_so(loaded, device, monkeypatch):
    from kvbench.engine import sampler

    draw = sampler.draw
    monkeypatch.setattr(sampler, "draw", lambda logits, *rest: (float(logits.sum()), draw(logits, *rest))[1])
    said: list[str] = []
    captures: list[object] = []
    monkeypatch.setattr(torch.cuda, "graph", captures.append)
    made = engine(on_gpu(), "gkv", notice=said.append)
    tokens = {key: d.token_ids for key, d in results(made, TODO).items()}
    assert made.decoding == "torch"
    assert said == ["decode steps run without a CUDA graph: called a synchronizing CUDA operation"]
    assert captures == []
    assert tokens == {key: d.token_ids for key, d in results(engine(loaded, "gkv"), TODO).items()}


def test_a_capture_that_fails_says_why_and_leaves_the_stream(device):
    stream, steps, restored = torch.cuda.current_stream(), [], []

    def step():
        steps.append(torch.cuda.current_stream() is stream)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    with pytest.raises(CaptureError, match=r"not permitted when stream is capturing \(synchronize\)"):
        StepGraph(step, torch.device("cuda"), lambda: restored.append(len(steps)))
    assert (steps, restored) == ([False, False, False], [1])
    assert torch.cuda.current_stream() is stream
    assert torch.cuda.get_sync_debug_mode() == 0


ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
OWN = ValueError("a step's own failure")


@pytest.mark.parametrize("run", [1, 2, 3], ids=["plain", "without waits", "captured"])
@pytest.mark.parametrize("failure", [ILLEGAL, FULL, OWN], ids=["device", "memory", "code"])
def test_a_failure_that_is_not_of_the_capture_is_raised(device, monkeypatch, failure, run):
    """In each of the three runs of a step that making a graph takes."""
    step, calls, said = DecodeSteps._step, [], []

    def failing(self):
        calls.append(1)
        if len(calls) == run:
            raise failure
        step(self)

    monkeypatch.setattr(DecodeSteps, "_step", failing)
    stream, made = torch.cuda.current_stream(), engine(on_gpu(), "gkv", notice=said.append)
    with pytest.raises(OutOfMemory if failure is FULL else type(failure)) as raised:
        results(made, TODO)
    assert failure in (raised.value, raised.value.__cause__)
    assert (len(calls), said) == (run, [])
    assert torch.cuda.current_stream() is stream
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: dependency created on uncaptured work in another stream",
        "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.",
        "a library that does not know graphs",
    ],
)
def test_a_failure_of_the_capture_alone_decodes_without_a_graph(loaded, device, monkeypatch, message):
    step, said = DecodeSteps._step, []

    def failing(self):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(message)
        step(self)

    monkeypatch.setattr(DecodeSteps, "_step", failing)
    made = engine(on_gpu(), "gkv", notice=said.append)
    tokens = {key: d.token_ids for key, d in results(made, TODO).items()}
    assert (made.decoding, said) == ("torch", [f"decode steps run without a CUDA graph: {message}"])
    assert tokens == {key: d.token_ids for key, d in results(engine(loaded, "gkv"), TODO).items()}


@pytest.mark.parametrize(
    ("architecture", "dtype", "layout", "said"),
    [
        ("qwen3", torch.float32, "dense", "float32"),
        ("qwen3", torch.bfloat16, "paged", "the paged layout"),
        ("gemma2", torch.bfloat16, "dense", "a softcap of attention"),
    ],
)
def test_a_model_that_varlen_does_not_serve_is_refused_before_prompts(device, architecture, dtype, layout, said):
    built = build(architecture)
    model = prepare(built.model.to("cuda", dtype), built.tokenizer)
    with pytest.raises(UserError, match=rf"varlen does not support {said}\. Use --decode-attn triton\.$"):
        engine(model, "gkv", layout=layout, backend="varlen")
