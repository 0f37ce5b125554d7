"""Results of released code for the methods that run probes: SpecKV on closed-form inputs, KVzip on a parity case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.fixtures import BUDGET, FIXTURES, TOTAL, WINDOW, K, Q
from support.folders import DATA

from kvbench.audit.parity.cases import load_cases
from kvbench.audit.parity.compare import run_case
from kvbench.audit.parity.variants import plans
from kvbench.eviction.api import Probe
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods

WANT = [set(row) for row in FIXTURES["speckv_joint_max"]["kept"]]


def kept(method, view):
    """Kept sets, and the scores of what was swapped against the fixture must tie (max pooling makes ties)."""
    keep = decide(method, [view])[0].keep
    return [set(view.positions[0, head][keep[0, head]].tolist()) for head in range(2)], method.score(view)


def assert_same_but_for_ties(got, score, want):
    for head in range(2):
        assert len(got[head]) == len(want[head])
        swapped = sorted(got[head] ^ want[head])
        assert score[0, head, swapped].unique().numel() <= 1


def test_speckv_without_a_draft_is_its_window():
    view = make_view(K, Q[:, :, -WINDOW:], budget=BUDGET, columns={"draft": torch.zeros(1, 2, TOTAL)})
    assert_same_but_for_ties(*kept(methods.get("speckv")(window=WINDOW), view), WANT)


@pytest.mark.parametrize("drafted", [1, 4, 7])
def test_speckv_with_the_end_of_its_window_drafted(drafted):
    """The file's eight queries are window and lookahead together; here some of them come as a probe."""
    method = methods.get("speckv")(window=WINDOW - drafted)
    prompt = TOTAL - drafted
    probe = Probe(tokens=tuple(range(drafted)))
    view = make_view(
        K[:, :, :prompt],
        Q[:, :, prompt:],
        budget=BUDGET - drafted,
        columns={"draft": torch.zeros(1, 2, prompt)},
        query_positions=torch.arange(prompt, TOTAL)[None],
        probe=probe,
        probe_keys=K[:, :, prompt:],
        probe_positions=torch.arange(prompt, TOTAL)[None],
    )
    columns = method.observe(view)
    after = make_view(
        K[:, :, :prompt], Q[:, :, prompt - method.window : prompt], budget=BUDGET - drafted, columns=columns
    )
    want = [{token for token in head if token < prompt} for head in WANT]
    assert_same_but_for_ties(*kept(method, after), want)


[CASE] = load_cases(DATA / "parity" / "kvzip")


@pytest.mark.parametrize("layer", range(CASE.layers))
def test_kvzip_scores_are_the_reference_code_s(layer):
    plan = plans(CASE)[0]
    method = methods.get("kvzip")(**plan.options)
    keys = CASE.tensors["k"][layer : layer + 1]
    view = make_view(keys, budget=plan.budget, columns={"zip": torch.zeros(keys.shape[:3])})
    for fields in plan.probes(CASE, layer):
        probed = replace(view, **fields)
        view.columns = method.observe(probed)
    want = CASE.tensors["aux.score.0"].view(CASE.layers, CASE.heads, -1)[layer]
    torch.testing.assert_close(method.score(view)[0, :, CASE.hyper["prefix_len"] :], want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("change", [{"span": 0}, {"own keys": 0}, {"sinks": 5}])
def test_kvzip_with_a_mistake_is_noticed(change):
    """All of the prompt in the softmax, no keys of the probe in it, or another number of sinks."""
    first = plans(CASE)[2]
    assert run_case(CASE, first)[0].equal == 1

    def probes(case, layer):
        for fields in first.probes(case, layer):
            if "span" in change:
                fields["probe"] = Probe(tokens=(), span=(0, case.seen[0]))
            if "own keys" in change:
                fields["probe_keys"] = fields["probe_positions"] = None
            yield fields

    wrong = replace(first, probes=probes, options=first.options | {k: v for k, v in change.items() if k == "sinks"})
    assert run_case(CASE, wrong)[0].equal < 1


def test_kvzip_at_the_wrong_level_is_noticed():
    pair, _, head, _ = plans(CASE)
    assert run_case(CASE, replace(pair, options=head.options))[0].equal < 1
    assert run_case(CASE, replace(head, options=pair.options))[0].equal < 1
