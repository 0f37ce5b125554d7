"""Prompts read with flash-attn: where it may be used, what it is asked for, and that the answers stay.

The package needs a GPU. Here a module of its name computes what flash-attn documents, with an explicit mask.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from support.methods import small, with_tables
from support.models import build, requests

from kvbench.cli.app import main
from kvbench.engine.attention.flash import check_attn, flash_attention
from kvbench.engine.loop import Engine
from kvbench.errors import SetupError, UserError
from kvbench.records import Sampling

SIZES = {"lengths": (9, 60, 33, 5, 100), "new_tokens": (30, 20, 30, 20, 10)}


def documented(q, k, v, *, softmax_scale, causal, window_size, softcap):
    """[b, t, Hq, D]; q: [b, t, Hq, D]; k, v: [b, n, Hk, D]. Causal and window from the bottom right corner."""
    assert causal
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bthd,bnhd->bhtn", q, k) * softmax_scale
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    t, n = logits.shape[-2:]
    at, left = torch.arange(t)[:, None] + (n - t), window_size[0]
    seen = torch.arange(n) <= at
    if left >= 0:
        seen &= torch.arange(n) >= at - left
    return torch.einsum("bhtn,bnhd->bthd", logits.masked_fill(~seen, float("-inf")).softmax(-1), v)


@pytest.fixture
def asked(monkeypatch):
    """The shapes (t, n) that flash-attn was asked for."""
    shapes = []

    def flash_attn_func(q, k, v, **settings):
        shapes.append((q.shape[1], k.shape[1]))
        return documented(q, k, v, **settings)

    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return shapes


def answers(loaded, method, **more):
    instance = small(method)
    budget = 24 if instance.takes_budget else None
    engine = Engine(loaded, instance, budget=budget, interval=8, slots=4, max_tokens=200, **more)
    todo = requests(**SIZES, samples=1, sampling=Sampling())
    return {done.request.doc_id: done.token_ids for done in engine.generate(todo)}


CHUNKS = {"prefill": "chunked", "prefill_chunk": 16}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "qwen2-sliding", "gpt-oss"])
@pytest.mark.parametrize(
    ("method", "how"),
    [(method, how) for method in ("full", "gkv", "h2o", "ada-kv", "kvzip") for how in ({}, {"prefill_chunk": 16})]
    + [(method, CHUNKS) for method in ("gkv", "h2o", "ada-kv")],
)
def test_answers_are_those_of_sdpa(architecture, method, how, asked):
    loaded = with_tables(build(architecture))
    wanted = answers(loaded, method, **how)
    assert asked == []
    assert answers(dataclasses.replace(loaded, attn="flash"), method, **how) == wanted
    assert bool(asked) == (architecture != "gpt-oss")  # its attention sinks are not flash-attn's


def test_blocks_are_whole_until_something_is_gone(asked):
    """100 tokens in blocks of 16. After an eviction a head's rows are older than a block all the same."""
    loaded = dataclasses.replace(build("qwen3"), attn="flash")
    answers(loaded, "full", prefill_chunk=16)
    assert {(16, 16), (16, 32), (4, 100)} <= set(asked)
    asked.clear()
    answers(loaded, "gkv", **CHUNKS)
    assert max(n for _, n in asked) == 24 + 16


def test_heads_of_unequal_length_are_read_with_sdpa(asked):
    loaded = dataclasses.replace(build("qwen3"), attn="flash")
    answers(loaded, "gkv", **CHUNKS)
    equal = len(asked)
    asked.clear()
    answers(loaded, "ada-kv", **CHUNKS)
    assert 0 < len(asked) < equal


def test_what_it_needs(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    check_attn("sdpa", cpu, torch.float32)
    with pytest.raises(SetupError, match=r"needs the package flash-attn, which is not installed\. Use --attn sdpa\."):
        check_attn("flash", cuda, torch.bfloat16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_attn("flash", cuda, torch.bfloat16)
    for device, dtype in ((cpu, torch.bfloat16), (cuda, torch.float32)):
        with pytest.raises(UserError, match="on CUDA in bfloat16 or float16"):
            check_attn("flash", device, dtype)


def test_a_run_without_the_package_is_refused_before_any_work(tmp_path, capsys):
    """B057."""
    run = ["run", "--model", "tiny", "--method", "gkv", "--budget", "48", "--task", "walk", "--attn", "flash", "-q"]
    assert main([*run, "--out", str(tmp_path / "r")]) == 3
    text = "error: --attn flash needs the package flash-attn, which is not installed. Use --attn sdpa.\n"
    assert capsys.readouterr().err == text
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, None), (None, 20.0)])
def test_the_package_computes_what_it_documents(window, softcap):
    pytest.importorskip("flash_attn", reason="needs flash-attn")
    torch.manual_seed(0)
    q = torch.randn(2, 8, 40, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 100, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    found = flash_attention(q, k, v, scaling=0.125, softcap=softcap, window=window)
    wanted = documented(
        *(x.transpose(1, 2).float().cpu() for x in (q, k, v)),
        softmax_scale=0.125,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
    )
    torch.testing.assert_close(found.float().cpu(), wanted, atol=2e-2, rtol=2e-2)
