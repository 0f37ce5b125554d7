"""trimkv and retention: scores by hand, who competes with whom, and floors."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench import tiny
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.options import OptionError
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.records import Request
from kvbench.registry import methods
from kvbench.taskkit.synthetic.variants import VARIANTS

TRIMKV, RETENTION = methods.get("trimkv"), methods.get("retention")


def view(log_beta, budget, keys=None, **more):
    """Entries of one sequence in text order, log beta [Hk, N]."""
    log_beta = torch.as_tensor(log_beta, dtype=torch.float32)[None]
    keys = torch.ones(*log_beta.shape, 1) if keys is None else keys
    return make_view(keys, budget=budget, columns={"log_beta": log_beta}, **more)


def kept(method, *views):
    return [
        sorted(p[k].tolist())
        for v, verdict in zip(views, decide(method, views))
        for p, k in zip(v.positions[0], verdict.keep[0])
    ]


def test_the_score_is_age_times_log_beta():
    """Four entries: the next query sees them at ages 4, 3, 2 and 1."""
    log_beta = [[-0.1, -1.0, -0.2, -5.0]]
    torch.testing.assert_close(TRIMKV().score(view(log_beta, 2))[0], torch.tensor([[-0.4, -3.0, -0.4, -5.0]]))
    torch.testing.assert_close(
        TRIMKV(age_offset=1).score(view(log_beta, 2))[0], torch.tensor([[-0.5, -4.0, -0.6, -10.0]])
    )
    assert kept(TRIMKV(), view(log_beta, 2)) == [[0, 2]]
    assert kept(TRIMKV(recent=1), view(log_beta, 2)) == [[2, 3]]  # of the equal ones the newer


def test_constant_retention_is_a_sliding_window():
    assert kept(TRIMKV(), view([[-0.3] * 9] * 2, 4)) == [[5, 6, 7, 8]] * 2
    assert kept(TRIMKV(horizon=50), view([[-0.3] * 9], 4)) == [[5, 6, 7, 8]]


def test_a_horizon_weakens_recency():
    """An entry that fades fast but is young, and one that lasts: the longer one looks, the more the second is worth."""
    log_beta = [[math.log(0.9), math.log(0.99), math.log(0.5)]]
    assert kept(TRIMKV(), view([[math.log(0.9), math.log(0.7)]], 1)) == [[0]]
    near, far = (TRIMKV(horizon=n).score(view(log_beta, 1))[0, 0] for n in (1, 100))
    assert far[1] - far[2] > near[1] - near[2] > 0


def test_the_norm_of_the_key_multiplies_retention():
    keys = torch.tensor([[3.0, 4.0], [0.0, 0.5]]).view(1, 1, 2, 2)
    score = TRIMKV(knorm=True).score(view([[-1.0, -1.0]], 1, keys))[0, 0]
    torch.testing.assert_close(score, torch.tensor([-2 + math.log(5), -1 + math.log(0.5)]))
    assert torch.isfinite(TRIMKV(knorm=True).score(view([[-1.0]], 1, torch.zeros(1, 1, 1, 2)))).all()


def test_heads_of_all_layers_compete():
    strong, weak = [-0.1] * 6, [-1.0] * 6
    views = [view([strong, weak], 3), view([weak, weak], 3, layer=1)]
    for v in views:
        v.layer_count = 2
    sizes = [len(head) for head in kept(RETENTION(), *views)]
    assert sizes == [6, 2, 2, 2]  # 12 entries in all; equal ages of equal betas go alike
    assert [len(head) for head in kept(RETENTION(level="layer"), *views)] == [5, 1, 3, 3]
    assert [len(head) for head in kept(TRIMKV(), *views)] == [3] * 4


def test_no_head_is_left_empty():
    views = [view([[-0.001] * 8, [-9.0] * 8], 3)]
    assert [len(head) for head in kept(RETENTION(), *views)] == [5, 1]


def counted(scores, total, floor):
    """The released rule: how many of the best are a head's, plus the floor; each keeps its own best."""
    flat = torch.cat(scores)
    heads = torch.repeat_interleave(torch.arange(len(scores)), torch.tensor([len(s) for s in scores]))
    best = flat.topk(total - floor * len(scores)).indices
    sizes = torch.bincount(heads[best], minlength=len(scores)) + floor
    return [sorted(s.topk(int(n)).indices.tolist()) for s, n in zip(scores, sizes)]


@pytest.mark.parametrize("floor", [0.25, 0.5, 3.0])
def test_a_floor_counts_as_the_released_code_does(floor):
    generator = torch.Generator().manual_seed(int(4 * floor))
    for _ in range(5):
        log_beta = -torch.rand(4, 60, generator=generator) * torch.tensor([0.3, 0.5, 0.7, 0.9])[:, None]
        one = view(log_beta, 12)
        scores = list(RETENTION().score(one)[0])
        sure = int(floor * 12) if floor < 1 else int(floor)
        assert kept(RETENTION(floor=floor), one) == counted(scores, 48, sure)


@pytest.mark.parametrize(("horizon", "offset"), [(1, 0), (1, 1), (2, 2)])
def test_a_threshold_keeps_what_is_worth_enough(horizon, offset):
    """The released rule, entry by entry: its worth at its age, summed over the horizon, against the threshold."""
    g = torch.Generator().manual_seed(3)
    log_beta = -(10 ** (3 * torch.rand(2, 2, 30, generator=g) - 3)) / 3
    method = RETENTION(strategy="threshold", threshold=0.6, horizon=horizon, age_offset=offset)
    views = [view(layer, method.allowed(None, 20, 30, 0), layer=i) for i, layer in enumerate(log_beta)]
    for v in views:
        v.layer_count = 2
    wanted = []
    for head in log_beta.flatten(0, 1).tolist():
        worth = [sum(math.exp((30 - p + offset + k) * x) for k in range(horizon)) for p, x in enumerate(head)]
        best = max(range(30), key=lambda p: (worth[p], p))
        wanted.append(sorted({p for p in range(30) if worth[p] >= 0.6} | {best}))
    assert kept(method, *views) == wanted
    assert len({len(head) for head in wanted}) > 2


def test_a_threshold_takes_no_budget_and_no_floor():
    method = RETENTION(strategy="threshold")
    assert (method.takes_budget, method.decode_bounded, RETENTION().takes_budget) == (False, False, True)
    assert method.trigger(32).full(1.0, 100)  # entries fade whatever their number
    with pytest.raises(OptionError, match=r"option .floor. must be 0 with strategy=threshold; got 0\.5\."):
        RETENTION(strategy="threshold", floor=0.5)
    with pytest.raises(OptionError, match="option 'threshold' must be above 0"):
        RETENTION(strategy="threshold", threshold=0.0)


def test_the_engine_evicts_to_a_threshold():
    """With the built-in model's gates: the full cache's answer at a tiny threshold, fewer entries at a larger one."""
    loaded = load(str(tiny.path()), device="cpu")
    ids = tuple(loaded.tokenizer(VARIANTS["chain-4"].generate(7).prompt)["input_ids"])
    request = Request(task="t", doc_id="d", prompt_ids=ids, max_new_tokens=70)

    def answer(method, layout):
        engine = Engine(loaded, method, budget=None, interval=16, slots=1, max_tokens=len(ids) + 70, layout=layout)
        [answer] = engine.generate([request])
        assert answer.status == "ok"
        return answer

    full = answer(methods.get("full")(), "dense")
    sizes = []
    for threshold in (1e-30, 0.5, 0.99):
        found = [answer(RETENTION(strategy="threshold", threshold=threshold), "paged")]
        assert found[0].token_ids == full.token_ids or threshold > 0.1
        sizes.append(found[0].usage.entries_mean)
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_floor_does_not_mind_what_is_not_valid():
    generator = torch.Generator().manual_seed(0)
    log_beta = -torch.rand(2, 12, generator=generator)
    plain = view(log_beta, 5)
    padded = torch.cat([log_beta, torch.full((2, 3), 9.0)], dim=-1)
    valid = torch.arange(15).expand(1, 2, 15) < 12
    positions = torch.where(valid, torch.arange(15), -1)
    junk = view(padded, 5, valid=valid, positions=positions, seen=12)
    assert kept(RETENTION(floor=0.4), junk) == kept(RETENTION(floor=0.4), plain)


def test_budgets_cover_what_is_sure():
    assert RETENTION(floor=7.0).min_budget() == 7
    assert RETENTION(floor=0.5, recent=3).min_budget() == 4
    assert TRIMKV().min_budget() == 1


@pytest.mark.parametrize(
    ("method", "scope"), [(TRIMKV(), "head"), (RETENTION(level="layer"), "layer"), (RETENTION(), "model")]
)
def test_entries_compete_within_the_declared_scope(method, scope):
    """What another head, or another layer, is worth changes a head's choice only where both compete."""
    assert method.scope == scope

    def first_head(other_head, other_layer):
        views = [view([[-0.1] * 6, [other_head] * 6], 3), view([[other_layer] * 6] * 2, 3, layer=1)]
        for one in views:
            one.layer_count = 2
        return kept(method, *views)[0]

    assert (first_head(-0.01, -0.1) != first_head(-1.0, -0.1)) == (scope != "head")
    assert (first_head(-0.1, -0.01) != first_head(-0.1, -1.0)) == (scope == "model")


def test_a_new_token_gets_what_the_gate_of_its_layer_says():
    """By hand: log beta = logsigmoid(w silu(x) + b), one input per head, in the second of two layers."""
    weights = {
        "in.weight": torch.stack([torch.full((2, 2), 9.0), torch.eye(2)]),
        "in.bias": torch.tensor([[9.0, 9.0], [0.0, 0.0]]),
        "out.weight": torch.tensor([[[9.0, 9.0]] * 2, [[1.0, 0.0], [0.0, 2.0]]]),
        "out.bias": torch.tensor([[9.0, 9.0], [0.0, -1.0]]),
    }
    hidden = [[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]]
    nothing = torch.zeros(1, 2, 3, 4)
    new = NewTokens(layer=1, hidden=torch.tensor([hidden]), keys=nothing, values=nothing, weights=weights)

    def silu(x):
        return x / (1 + math.exp(-x))

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x))

    expected = [[log_sigmoid(silu(x)) for x, _ in hidden], [log_sigmoid(2 * silu(y) - 1) for _, y in hidden]]
    torch.testing.assert_close(TRIMKV().on_tokens(new)["log_beta"], torch.tensor([expected]))


def test_weights_are_of_the_method_s_own_kind():
    for cls, kind, gate in ((TRIMKV, "trimkv", "in.weight"), (RETENTION, "retention", "mid.weight")):
        weights = cls().weights()
        assert (weights.kind, weights.option) == (kind, "gates")
        model = {"num_hidden_layers": 2, "num_key_value_heads": 2, "hidden_size": 6, "head_dim": 4}
        assert gate in weights.shapes(model)
    assert "kv_up.weight" in TRIMKV(gate="rg3").weights().shapes(model)
    assert TRIMKV(tie="layers_and_heads").weights().shapes(model)["out.weight"] == (6,)
