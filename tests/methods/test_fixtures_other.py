"""CAKE, KeyDiff and RPC: results of the released code on closed-form inputs (tests/data/methods_fixtures.json)."""

from __future__ import annotations

import sys

import pytest
import torch
from support.fixtures import BUDGET, FIXTURES, WINDOW, K, Q

from kvbench.eviction.select import decide
from kvbench.eviction.terms.shares import split_exactly
from kvbench.eviction.view import make_view
from kvbench.registry import methods


def kept(method, view):
    return [row.nonzero().flatten().tolist() for row in decide(method, [view])[0].keep[0]]


def test_keydiff():
    method, view = methods.get("keydiff")(), make_view(K, budget=BUDGET)
    assert kept(method, view) == FIXTURES["keydiff"]["kept"]
    want = torch.tensor(FIXTURES["keydiff"]["score_head0_first6"])
    torch.testing.assert_close(method.score(view)[0, 0, :6], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rounding", ["exact", "official"])
def test_cake(rounding):
    want = FIXTURES["cake"]
    method = methods.get("cake")(window=WINDOW, gamma=200.0, tau1=1.6, tau2=0.4, rounding=rounding)
    view = make_view(K, Q[:, :, -WINDOW:], budget=BUDGET)
    stats = method.score(view).stats
    assert float(stats["entropy"]) == pytest.approx(want["entropy"], rel=1e-5)
    assert float(stats["variance"]) == pytest.approx(want["variance"], rel=1e-5)
    preference = stats["entropy"] ** (1 / 1.6) * stats["variance"] ** (1 / 0.4)
    assert float(preference) == pytest.approx(want["pref_tau1.6_0.4"], rel=1e-5)
    assert [row[:-WINDOW] for row in kept(method, view)] == want["kept_scored"]
    assert all(row[-WINDOW:] == list(range(88, 96)) for row in kept(method, view))


def test_cake_layer_budgets():
    [case] = FIXTURES["cake_adjust_budgets"]
    ideal, room = torch.tensor([case["in"]], dtype=torch.float64), torch.full((1, 4), case["seq"])
    official = sys.modules[methods.get("cake").__module__]._official
    assert official(ideal, case["total"], room).tolist() == [case["out"]]
    exact = split_exactly(ideal, case["total"], 0, room)
    assert int(exact.sum()) == case["total"]
    assert int((exact - torch.tensor(case["out"])).abs().max()) <= 1


def test_rpc():
    want = FIXTURES["rpc"]["kept"]
    native = methods.get("rpc")(form="native", P=64, R=WINDOW, c=4.0)
    assert native.allowed(None, 16, 96, 0) == BUDGET
    view = make_view(K, Q[:, :, -WINDOW:], budget=BUDGET, prompt_len=16)
    assert kept(native, view) == want
    assert kept(methods.get("rpc")(R=WINDOW), view) == want  # the same score, and the prompt goes last
