"""Results of the released code on closed-form inputs (tests/data/methods_fixtures.json)."""

from __future__ import annotations

import pytest
import torch
from support.fixtures import BUDGET, FIXTURES, TOTAL, WINDOW, K, Q

from kvbench.eviction.select import decide
from kvbench.eviction.terms.redundancy import redundancy
from kvbench.eviction.view import make_view
from kvbench.registry import methods


def assert_same_but_for_ties(method, view, want):
    """The kept sets, allowing exchanges among exactly tied scores at the cut."""
    keep = decide(method, [view])[0].keep
    out = method.score(view)
    score = out if isinstance(out, torch.Tensor) else out.score
    for head, expected in enumerate(want):
        got = set(view.positions[0, head][keep[0, head]].tolist())
        assert len(got) == len(expected)
        swapped = sorted(got ^ set(expected))
        assert score[0, head, swapped].unique().numel() <= 1


@pytest.mark.parametrize(
    ("fixture", "name", "options"),
    [
        ("knorm", "knorm", {}),
        ("snapkv_decode_rkv", "snapkv-decode", {"variant": "rkv", "window": 8, "kernel": 7}),
        ("gkv_local_pool(snapkv_decode_gkv)", "snapkv-decode", {"variant": "gkv", "window": 8, "kernel": 5}),
        ("rkv_lambda0.1", "rkv", {"lam": 0.1}),
        ("rkv_lambda0.07", "rkv", {"lam": 0.07}),
    ],
)
def test_one_eviction(fixture, name, options):
    view = make_view(K, Q[:, :, -WINDOW:], budget=BUDGET)
    assert_same_but_for_ties(methods.get(name)(**options), view, FIXTURES[fixture]["kept"])


def test_reference_form_is_the_same_before_anything_was_evicted():
    for name in ("snapkv-decode", "rkv"):
        method = methods.get(name)(compat="reference")
        columns = {"rank": torch.full(K.shape[:3], torch.nan)}
        keep = decide(method, [make_view(K, Q[:, :, -WINDOW:], budget=BUDGET, columns=columns)])[0].keep
        want = FIXTURES["snapkv_decode_rkv" if name == "snapkv-decode" else "rkv_lambda0.1"]["kept"]
        assert [row.nonzero().flatten().tolist() for row in keep[0]] == want


@pytest.mark.parametrize(
    ("fixture", "column_zero"), [("rkv_redundancy_head0_first8", True), ("redundancy_clean_head0_first8", False)]
)
def test_redundancy(fixture, column_zero):
    view = make_view(K, budget=BUDGET)
    got = redundancy(view, 0.5, view.text_order(), column_zero=column_zero)[0, 0, :8]
    torch.testing.assert_close(got, torch.tensor(FIXTURES[fixture]), rtol=1e-4, atol=1e-7)


def test_every_key_has_a_similar_one_here():
    """So the code's defect, which spares entry 0 in rows without one, does not show in these numbers."""
    unit = torch.nn.functional.normalize(K[0], dim=-1)
    cosine = unit @ unit.transpose(-1, -2) - 2 * torch.eye(TOTAL)
    assert (cosine.amax(dim=-1) <= 0.5).sum(dim=-1).tolist() == FIXTURES["rkv_rows_without_similar_key_per_head"]


@pytest.mark.parametrize(
    ("fixture", "options"),
    [(f"gkv_global_{form}", {"form": form, "redundancy": False}) for form in ("max", "mean", "sum")]
    + [("gkv_max_redundancy", {"form": "max", "lam": 0.5})],
)
def test_gkv_over_two_evictions(fixture, options, evictions):
    method = methods.get("gkv")(window=WINDOW, alpha=0.8, **options)
    first, second = evictions(method, Q, K, budget=BUDGET, interval=24, prompt=72)
    assert first[0].tolist() == FIXTURES[fixture]["first_kept"]
    assert second[0].tolist() == FIXTURES[fixture]["second_kept"]


def test_gkv_memory():
    """Stored is the merged score before redundancy, in text order; the window stores nothing."""
    method = methods.get("gkv")(window=WINDOW)
    columns = {"memory": torch.full(K[:, :, :72].shape[:3], torch.nan)}
    [verdict] = decide(method, [make_view(K[:, :, :72], Q[:, :, 64:72], columns=columns, budget=BUDGET)])
    keep, new = verdict.keep, verdict.columns
    stored = new["memory"][0, 0][keep[0, 0]]
    want = torch.tensor(FIXTURES["gkv_max_redundancy"]["first_stored_score_head0_first6"])
    torch.testing.assert_close(stored[:6], want, rtol=1e-4, atol=1e-6)
    assert stored[-WINDOW:].isnan().all()


def test_h2o_over_the_whole_prompt(evictions):
    (kept,) = evictions(methods.get("h2o")(recent=8), Q, K, budget=BUDGET, interval=TOTAL, prompt=TOTAL)
    assert kept[0].tolist() == FIXTURES["h2o_prefill_oneshot"]["kept"]


def test_h2o_with_a_cache_for_every_query_head(evictions):
    repeated = K.repeat_interleave(4, dim=1)[:, :, :48]
    (kept,) = evictions(methods.get("h2o")(recent=16), Q[:, :, :48], repeated, budget=32, interval=48, prompt=48)
    assert kept[0].tolist() == FIXTURES["h2o_official_after_prefill_48"]["kept_per_query_head"]
