"""triattention: the series against its definition, scores that layers share, and what happens to the prompt."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.eviction.api import ScoreOut
from kvbench.eviction.rope import Rope
from kvbench.eviction.select import decide
from kvbench.eviction.terms.series import series
from kvbench.eviction.view import make_view
from kvbench.registry import methods

LAYERS, HK, G, N, D = 3, 2, 2, 30, 8
FREQUENCIES = 100.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {"mean": draw(LAYERS, HK * G, D), "modulus": 1 + draw(LAYERS, HK * G, D // 2, seed=1).abs()}


def views(budget, prompt_len=0, seen=37, interleaved=False, rotated=D, positions=None, b=1):
    if positions is None:
        positions = torch.arange(N).expand(b, HK, N)
    shared = {"weights": WEIGHTS, "rope": Rope(FREQUENCIES[: rotated // 2], interleaved), "layer_count": LAYERS}
    shared |= {"budget": budget, "seen": seen, "prompt_len": prompt_len, "positions": positions}
    return [make_view(draw(b, HK, N, D, seed=9 + i), layer=i, ordinal=i, **shared) for i in range(LAYERS)]


@pytest.mark.parametrize("over", ["mean", "max"])
@pytest.mark.parametrize(("interleaved", "rotated"), [(False, D), (True, D), (False, 4)])
def test_the_series_is_its_definition(interleaved, rotated, over):
    """Amplitudes and phases of keys that are rotated back, term by term, as the paper writes it."""
    view, half = views(9, interleaved=interleaved, rotated=rotated)[1], rotated // 2
    got = series(view, 64, over=over, trig=True, spread=True)
    for head, token in ((0, 0), (1, 7), (3, 29)):
        key = view.rotate(view.keys[:, head // G, token][:, None, None], -torch.tensor([token]))[0, 0, 0]
        query = WEIGHTS["mean"][1, head]

        def complex_(x):
            pairs = [(2 * f, 2 * f + 1) if interleaved else (f, f + half) for f in range(half)]
            return [complex(x[i], x[j]) for i, j in pairs]

        totals = []
        for offset in (1, 2, 4, 8, 16, 32, 64):
            total = 0.0
            for f, (q, k) in enumerate(zip(complex_(query), complex_(key))):
                turn = q * k.conjugate()
                angle = math.atan2(turn.imag, turn.real) + float(FREQUENCIES[f]) * (37 - token + offset)
                total += abs(q) * abs(k) * math.cos(angle)
                total += (float(WEIGHTS["modulus"][1, head, f]) - abs(q)) * abs(k)
            totals.append(total)
        wanted = max(totals) if over == "max" else sum(totals) / len(totals)
        assert float(got[0, head // G, head % G, token]) == pytest.approx(wanted, abs=1e-4)


def kept(level, seen=37, **more):
    shown = views(12, seen=seen, **more)
    return torch.stack([d.keep[0] for d in decide(methods.get("triattention")(level=level), shown)])  # [L, Hk, N]


def test_levels_share_their_tokens():
    by_head, alone, all_ = kept("head"), kept("layer_head"), kept("all")
    assert torch.equal(by_head, by_head[:1].expand_as(by_head))
    assert not torch.equal(by_head[:, 0], by_head[:, 1])
    assert torch.equal(all_, all_[:1, :1].expand_as(all_))
    assert not torch.equal(alone[0], alone[1])
    assert all(bool((keep.sum(dim=-1) == 12).all()) for keep in (by_head, alone, all_))


def test_layers_that_hold_other_tokens_share_the_scores_of_those_they_have_in_common():
    """Positions 0 ... 29 in two layers; the third lacks every second one and has later ones instead."""
    shown = views(12, seen=70)
    odd = torch.arange(N) + N * (torch.arange(N) % 2)
    shown[2].positions, shown[2].longest = odd.expand(1, HK, N), 70
    method = methods.get("triattention")()
    scores = [method.score(view) for view in shown]
    shared = [out.score for out in method.settled(shown, [ScoreOut(score) for score in scores])]
    torch.testing.assert_close(shared[0][..., ::2], sum(s[..., ::2] for s in scores) / 3)
    torch.testing.assert_close(shared[0][..., 1::2], (scores[0] + scores[1])[..., 1::2] / 2)
    torch.testing.assert_close(shared[2][..., 1::2], scores[2][..., 1::2])


@pytest.mark.parametrize("level", ["head", "layer_head", "all"])
def test_the_prompt_stays_while_there_is_room(level):
    assert bool(kept(level, prompt_len=11)[..., :11].all())
    crowded = kept(level, prompt_len=12)  # no room for another entry: all compete
    assert not bool(crowded[..., :12].all())
    assert bool((crowded.sum(dim=-1) == 12).all())


def test_the_prompt_does_not_count_in_the_mean():
    """With other keys of the prompt, the scores of the other entries stay."""
    method, shown = methods.get("triattention")(level="layer_head"), views(20, prompt_len=6)
    before = method.score(shown[0])
    shown[0].keys = torch.cat([5 * shown[0].keys[:, :, :6], shown[0].keys[:, :, 6:]], dim=2)
    assert torch.equal(method.score(shown[0])[..., 6:], before[..., 6:])
    competing = methods.get("triattention")(level="layer_head", prompt="score")
    assert not torch.equal(competing.score(shown[0])[..., 6:], before[..., 6:])
