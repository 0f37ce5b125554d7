"""random with Random Attention's protection of the prompt."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods


def kept(budget, prompt_len, seen=40, **options):
    keys = torch.zeros(2, 3, seen, 4)
    method = methods.get("random")(recent=4, **options)
    [decision] = decide(method, [make_view(keys, budget=budget, prompt_len=prompt_len)])
    return [set(row.nonzero()[:, 0].tolist()) for row in decision.keep.flatten(0, 1)]


def test_the_prompt_stays_as_far_as_the_budget_goes():
    for own in kept(20, 12, prompt="all"):
        assert own >= {*range(12), 36, 37, 38, 39}
        assert len(own) == 20
    for own in kept(20, 30, prompt="all"):
        assert own >= {*range(15), 36, 37, 38, 39}  # 20 - 4 - 1
        assert len(own) == 20
    assert not all(own >= {*range(12)} for own in kept(20, 12))


@pytest.mark.parametrize(
    ("cap", "stays"), [(4, {*range(4), 4, 6, 8, 10}), (0, {0, 2, 4, 6, 8, 10}), (512, {*range(12)})]
)
def test_beyond_the_cap_every_second_token_stays(cap, stays):
    sets = kept(24, 12, prompt="cap", cap=cap)
    assert all(own >= stays and len(own) == 24 for own in sets)
    assert set.intersection(*sets) & {*range(12)} == stays  # the others are drawn in every head


def test_every_eviction_draws_anew():
    method, keys = methods.get("random")(recent=4, prompt="all"), torch.zeros(1, 1, 40, 4)
    first, second = (
        decide(method, [make_view(keys, budget=20, prompt_len=8, eviction_index=torch.tensor([i]))])[0].keep
        for i in (0, 1)
    )
    assert not torch.equal(first, second)
    assert bool((first & second)[..., :8].all())
