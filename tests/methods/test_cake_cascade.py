"""cake under compat=reference evicts lower layers before the upper ones are read, as the released code does.

The kept positions were recorded from that code (antgroup/cakekv c4675ce, --cascading) on the same tensors.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.audit.parity.compare import ReferenceCache
from kvbench.audit.parity.variants import CasePlan
from kvbench.eviction.choose import make

PROMPT, TOTAL, BUDGET = 160, 190, 60
OPTIONS = {"window": 12, "tau1": 1.6, "tau2": 0.6, "gamma": 100.0, "rounding": "official", "decode": True}
AFTER_PROMPT = [10, *range(18, 19), *range(35, 40), 70, *range(148, 160)]  # layer 0
AT_END = [10, 18, 38, 148, 159, 161, 165, 166, 169, *range(174, 190)]


def run(**options):
    """Kept positions of each layer after the prompt and after every token."""
    generator = torch.Generator().manual_seed(1799)
    q, k = (torch.randn(4, 1, PROMPT + 1, 16, generator=generator) for _ in range(2))
    q, k = (torch.cat([x, torch.randn(4, 1, 29, 16, generator=generator)], dim=2) for x in (q, k))
    q[:, :, : PROMPT + 1] *= torch.tensor([0.5, 1.5, 1.0, 3.0]).view(4, 1, 1, 1)  # the uppermost layer gets most
    options = OPTIONS | options
    case = SimpleNamespace(tensors={"q": q, "k": k}, heads=1, layers=4, seen=[PROMPT])
    cache = ReferenceCache(case, CasePlan(method="cake", options=options, budget=BUDGET), make("cake", options))
    kept = []
    for seen in range(PROMPT, TOTAL + 1):
        cache.append(seen)
        cache.evict()
        kept.append([sorted(layer) for layer in cache.kept()])
    return kept


def sizes(layers):
    return [len(layer) for layer in layers]


def test_a_lower_layer_grows_to_its_budget_while_decoding():
    kept = run(compat="reference")
    assert [sizes(layers) for layers in kept[:6]] == [[n, 31, 24, 160] for n in (20, 21, 22, 23, 24, 25)]
    assert {tuple(sizes(layers)) for layers in kept[5:]} == {(25, 31, 24, 160)}
    assert kept[0][0] == AFTER_PROMPT
    assert kept[-1][0] == AT_END


@pytest.mark.parametrize("options", [{"compat": "none"}, {"compat": "reference", "cascade": False}])
def test_without_a_cascade_every_layer_gets_its_budget_at_once(options):
    assert {tuple(sizes(layers)) for layers in run(**options)} == {(25, 31, 24, 160)}


def test_the_cascade_needs_no_decoding():
    assert sizes(run(compat="reference", decode=False)[0]) == [20, 31, 24, 160]


def test_nothing_begins_while_the_whole_sequence_fits():
    """A prompt within the budget sets no budgets of layers, although the method looks at every tick."""
    method = make("cake", OPTIONS | {"compat": "reference"})
    q = k = torch.randn(2, 1, 70, 16, generator=torch.Generator().manual_seed(0))
    case = SimpleNamespace(tensors={"q": q, "k": k}, heads=1, layers=2, seen=[50])
    cache = ReferenceCache(case, CasePlan(method="cake", options={}, budget=BUDGET), method)
    cache.append(50)
    for seen in range(51, 61):
        cache.evict()
        cache.append(seen)
    cache.evict()
    assert sizes(cache.kept()) == [60, 60]
    assert not any(state.any() for layer in cache.layers for state in layer.states.values())
    cache.append(61)
    cache.evict()
    assert sum(sizes(cache.kept())) == 2 * BUDGET
