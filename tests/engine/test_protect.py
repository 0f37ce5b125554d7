"""Protection that follows the interval: the newest tokens that came since the eviction before, in prompt and answer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.models import build, requests

from kvbench.engine.loop import Engine
from kvbench.eviction.api import Method, Protect
from kvbench.integrations.transformers_cache import EvictionCache
from kvbench.replay.reader import TraceReader
from kvbench.replay.traces import ForcedTrace

BUDGET, PROMPT, OUTPUT = 24, 40, 30


@dataclasses.dataclass(frozen=True)
class Oldest(Method):
    """Keeps the oldest entries and, at most, the newest 10."""

    def protect(self, budget):
        return Protect(recent=10, by_interval=True)

    def score(self, view):
        return -view.positions.float()


def wanted(interval):
    """What is held after every eviction, by hand: {tokens seen: positions}."""
    recent = min(10, interval)
    held, found = list(range(PROMPT)), {}
    for seen in range(PROMPT, PROMPT + OUTPUT + 1):
        if seen > PROMPT:
            held.append(seen - 1)
        if (seen - PROMPT) % interval == 0 and len(held) > BUDGET:
            newest = [at for at in held if at >= seen - recent]
            held = [at for at in held if at not in newest][: BUDGET - len(newest)] + newest
            found[seen] = list(held)
    return found


@pytest.mark.parametrize("interval", [3, 8, 16])
@pytest.mark.parametrize("way", ["dense", "paged", "replay"])
def test_the_newest_since_the_eviction_before_stay(interval, way):
    loaded, events = build("llama"), []

    def log(key, seen, layer, heads):
        events.append((seen, [sorted(positions.tolist()) for positions in heads]))

    [request] = requests(lengths=(PROMPT,), new_tokens=(OUTPUT,), samples=1)
    options = dict(budget=BUDGET, interval=interval, max_tokens=PROMPT + OUTPUT, log=log)
    if way == "replay":
        forced = dataclasses.replace(request, forced=tuple(range(OUTPUT)))
        TraceReader(loaded, Oldest(), **options).read([ForcedTrace(request=forced, cluster="0")], Ignore())
    else:
        list(Engine(loaded, Oldest(), slots=1, layout=way, **options).generate([request]))
    expected = wanted(interval)
    assert {seen for seen, _ in events} >= {PROMPT, PROMPT + interval}
    for seen, heads in events:
        assert heads == [expected[seen]] * 2


class Ignore:
    def opened(self, cache):
        pass

    def block(self, index):
        pass

    def attended(self, call, first, out):
        pass

    def predicted(self, first, logits):
        pass


def test_generate_of_transformers_has_it_too():
    loaded = build("llama")
    ids = torch.arange(PROMPT)[None]
    with EvictionCache(loaded.model, Oldest(), budget=BUDGET, interval=4, max_tokens=80) as cache:
        loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=9, do_sample=False
        )
        held = cache.slots.evicting[0].positions[0, 0, :BUDGET].sort().values.tolist()
    assert held[:BUDGET] == wanted(4)[PROMPT + 8]
