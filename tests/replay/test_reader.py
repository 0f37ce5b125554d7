"""Reading in blocks equals generating token by token: what every eviction keeps, and every log-probability."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build
from support.traces import traces
from support.vision import model_reader, picture, repository

from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.reference import KeptHistory
from kvbench.records import Request
from kvbench.replay.reader import TraceReader
from kvbench.replay.traces import ForcedTrace
from kvbench.task import IMAGE, Doc, Turn

BUDGET, INTERVAL = 24, 8
LONGEST = 160
UNIFORM = [name for name in (*EVICTING, *VARIANTS) if small(name).uniform]


class Losses:
    """Log-probabilities of the answers' tokens, [b, n]."""

    def __init__(self, asked):
        self.targets = torch.tensor([t.answer for t in asked])
        self.parts = []

    def opened(self, cache):
        pass

    def block(self, index):
        pass

    def attended(self, call, first, out):
        pass

    def predicted(self, first, logits):
        target = self.targets[:, first : first + logits.shape[1], None]
        self.parts.append(logits.log_softmax(dim=-1).gather(-1, target)[..., 0])

    def value(self):
        return torch.cat(self.parts, dim=1)


def forced(loaded, method, asked, **more):
    """The slow way: log-probabilities and kept positions of the engine, one slot a trace."""
    log = KeptHistory()
    budget = BUDGET if method.takes_budget else None
    settings = {"budget": budget, "interval": INTERVAL, "slots": len(asked), "max_tokens": LONGEST}
    engine = Engine(loaded, method, prefill_chunk=20, log=log, **settings | more)
    done = {g.request.doc_id: g for g in engine.generate([t.request for t in asked])}
    return torch.tensor([done[t.request.doc_id].log_probs for t in asked]), kept(log)


def replayed(loaded, method, asked, **more):
    log = KeptHistory()
    settings = {"budget": BUDGET if method.takes_budget else None, "interval": INTERVAL, "max_tokens": LONGEST}
    reader = TraceReader(loaded, method, chunk=20, log=log, **settings | more)
    found = []
    for group in [asked] if reader.together else [[t] for t in asked]:
        losses = Losses(group)
        reader.read(group, losses)
        found.append(losses.value())
    return torch.cat(found), kept(log)


def kept(log):
    """{(noise key, tokens seen, layer): positions that stay in each head}."""
    return {
        (key, seen, layer): [sorted(head.tolist()) for head in heads]
        for key, events in log.events.items()
        for seen, layer, heads in events
    }


def assert_equal(fast, slow, least_events):
    assert fast[1] == slow[1]
    assert len(slow[1]) >= least_events
    assert (fast[0] - slow[0]).abs().max() < 1e-4


@pytest.mark.parametrize("name", [*EVICTING, *VARIANTS, "full"])
def test_every_method_decides_and_predicts_as_the_engine(name):
    # Qwen3 gives all keys of a random model one norm, so rounding would decide for knorm.
    loaded, asked = with_tables(build("llama" if name == "knorm" else "qwen3")), traces([(45, 30), (45, 30)])
    method = small(name)
    fast, slow = replayed(loaded, method, asked), forced(loaded, method, asked)
    assert_equal(fast, slow, 6 if method.evicts else 0)  # two prompts, three layers


@pytest.mark.parametrize("name", ["h2o", "gkv", "rkv", "morphkv", "tova", "keydiff"])
def test_both_layouts_of_the_engine(name):
    assert name in UNIFORM
    loaded, asked = build("qwen3"), traces([(13, 41)])
    fast = replayed(loaded, small(name), asked)
    for layout in ("dense", "paged"):
        assert_equal(fast, forced(loaded, small(name), asked, layout=layout), 9)


@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss", "qwen2-sliding"])
@pytest.mark.parametrize("name", ["h2o", "ada-kv while decoding", "snapkv-decode"])
def test_windows_caps_and_sinks(name, architecture):
    loaded, asked = build(architecture), traces([(45, 38)])
    assert_equal(replayed(loaded, small(name), asked), forced(loaded, small(name), asked), 2)


@pytest.mark.parametrize("name", ["full", "h2o", "gkv"])
def test_prompts_with_images(name, tmp_path):
    loaded, asked = seen(tmp_path, [("a.png", (48, 32)), ("b.png", (64, 64))], answer=21)
    assert asked.request.images.spans[1][1] < len(asked.prompt)
    fast, slow = replayed(loaded, small(name), [asked]), forced(loaded, small(name), [asked])
    assert_equal(fast, slow, 0 if name == "full" else 4)
    blind = dataclasses.replace(asked, request=dataclasses.replace(asked.request, images=None))
    assert (replayed(loaded, small(name), [blind])[0] - fast[0]).abs().max() > 0.01


def seen(folder, images, answer):
    """A random vision-language model, and a trace whose prompt shows images of these names and sizes."""
    repository(folder)
    reader, turn = model_reader(folder), Turn(question=IMAGE * len(images), images=tuple(picture(*i) for i in images))
    doc = Doc(doc_id="a", turns=(turn,), reference=None)
    ids, shown = reader.with_images(reader.ids(reader.text(doc, thinking=None)), doc)
    request = Request(
        task="t", doc_id="a", prompt_ids=tuple(ids), max_new_tokens=answer, forced=tuple(range(answer)), images=shown
    )
    return load(str(folder), device="cpu", dtype="float32"), ForcedTrace(request=request, cluster="a")


def test_a_budget_that_is_a_share_of_the_prompt():
    loaded, asked = build("qwen3"), traces([(61, 25)])
    method = small("tova")
    assert_equal(replayed(loaded, method, asked, budget=0.5), forced(loaded, method, asked, budget=0.5), 9)


def test_a_method_with_a_clock_of_its_own():
    """rpc's own schedule ticks between the blocks."""
    loaded, asked = build("qwen3"), traces([(20, 70)])
    method = dataclasses.replace(small("rpc"), form="native", P=11, R=5)
    assert_equal(replayed(loaded, method, asked), forced(loaded, method, asked), 9)


def test_chunks_do_not_matter():
    loaded, asked = build("qwen3"), traces([(45, 30)])
    settings = {"budget": BUDGET, "interval": 16, "max_tokens": LONGEST}
    found = []
    for chunk in (5, 512):
        losses, log = Losses(asked), KeptHistory()
        TraceReader(loaded, small("h2o"), chunk=chunk, log=log, **settings).read(asked, losses)
        found.append((losses.value(), kept(log)))
    assert_equal(found[0], found[1], 6)


def test_an_answer_of_one_token_is_predicted_by_the_prompt():
    loaded, asked = build("qwen3"), traces([(45, 1)])
    assert_equal(replayed(loaded, small("gkv"), asked), forced(loaded, small("gkv"), asked), 3)
