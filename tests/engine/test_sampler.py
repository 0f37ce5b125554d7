"""Drawing tokens: the right distribution, filters as transformers applies them, no dependence on the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvbench.engine import sampler
from kvbench.engine.sampler import draw
from kvbench.records import Sampling


def many(logits: torch.Tensor, sampling: Sampling, draws: int = 20_000) -> torch.Tensor:
    """Frequencies [V] over many keys."""
    keys = torch.randint(-(2**62), 2**62, (draws,), generator=torch.Generator().manual_seed(0))
    tokens = draw(logits.expand(draws, -1), keys, torch.zeros_like(keys), sampling)
    return torch.bincount(tokens, minlength=logits.numel()) / draws


def expected(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities [V] by transformers' own processors."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].clone())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("candidates", [8, 256])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, top_p=0.95),
        Sampling(temperature=0.6, top_p=0.95, top_k=20),
        Sampling(temperature=1.3, min_p=0.1),
        Sampling(temperature=2.0, top_p=0.5),
        Sampling(temperature=1.0, top_k=1),
    ],
    ids=str,
)
def test_frequencies_match_transformers(sampling, candidates, monkeypatch):
    monkeypatch.setattr(sampler, "CANDIDATES", candidates)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    want, got = expected(logits, sampling), many(logits, sampling)
    assert bool((got[want == 0] == 0).all())
    assert float((got - want).abs().max()) < 4 * (0.25 / 20_000) ** 0.5 + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_the_first_of_the_largest_or_the_first_nan(dtype):
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0] = logits[0].clamp(max=1)  # many equal ones
    logits[1], logits[2, 33::7], logits[3, 20::3] = 0, float("inf"), float("nan")
    logits[4] = float("-inf")
    drawn = draw(logits, torch.arange(6), torch.zeros(6, dtype=torch.long), Sampling())
    assert drawn.equal(logits.argmax(-1))
    first = [next(i for i, x in enumerate(row) if x == max(row)) for row in logits[[0, 1, 2, 4, 5]].tolist()]
    assert drawn[[0, 1, 2, 4, 5]].tolist() == first
    assert drawn[3] == 20


def test_a_draw_does_not_depend_on_the_batch():
    logits = torch.randn(64, 500)
    keys, steps = torch.arange(64) * 7919, torch.arange(64)
    sampling = Sampling(temperature=0.8, top_p=0.9)
    together = draw(logits, keys, steps, sampling)
    for i in range(64):
        assert draw(logits[i : i + 1], keys[i : i + 1], steps[i : i + 1], sampling).item() == together[i].item()


def test_nan_rows_yield_a_nan_token():
    logits = torch.randn(3, 50)
    logits[1, 7] = float("nan")
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.9),
    ):
        tokens = draw(logits, torch.arange(3), torch.zeros(3, dtype=torch.long), sampling)
        assert torch.isnan(logits.gather(-1, tokens[:, None])).squeeze(-1).tolist() == [False, True, False]


def test_equal_logits_are_kept_or_dropped_together():
    """As transformers' top-k does; so a draw does not depend on the order in which a sort leaves equal logits."""
    logits = torch.full((1, 400), -3.0)
    logits[0, 100:140] = 2.0  # forty tokens share the second place
    logits[0, 7] = 2.5
    keys = torch.arange(3000)
    for sampling in (Sampling(temperature=1.0, top_k=3), Sampling(temperature=1.0, top_p=0.1)):
        tokens = draw(logits.expand(len(keys), -1), keys, torch.zeros_like(keys), sampling)
        assert set(tokens.tolist()) == {7, *range(100, 140)}
