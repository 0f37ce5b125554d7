"""Whole replays on a small random model: figures against slow ones, yardsticks, batches, and who is left out."""

from __future__ import annotations

import pytest
import torch
from support.methods import small, with_tables
from support.models import build
from support.traces import traces

from kvbench.config.run_config import MethodChoice
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.errors import UserError
from kvbench.eviction import noise
from kvbench.replay import reference as reference_module
from kvbench.replay.batches import replay
from kvbench.replay.choices import FLOOR, ORACLE, Chosen, Target, plan
from kvbench.replay.reader import TraceReader

BUDGET, INTERVAL = 24, 8
YARDSTICKS = [Chosen(method=m, budget=BUDGET) for m in (ORACLE, FLOOR)]


def rows_of(loaded, asked, *names, budget=BUDGET):
    others = [Chosen(method=MethodChoice(name=n), budget=None if n == "full" else budget) for n in names]
    found = replay(loaded, "t", asked, [*YARDSTICKS, *others], interval=INTERVAL, max_tokens=160)
    return {row["method"]: row for row in found.rows}, found


def test_the_full_cache_differs_from_itself_in_nothing():
    rows, _ = rows_of(build("qwen3"), traces([(45, 30), (45, 30), (30, 12)]), "full")
    full = rows["full"]
    assert (full["loss_ratio"], full["kl"], full["top1"], full["mass_lost"]) == (1, 0, 1, 0)
    assert full["cosine"] == pytest.approx(1, abs=1e-6)
    assert full["tokens"] == 72
    assert (rows["random"]["gap_closed"], rows["golden"]["gap_closed"], rows["golden"]["overlap"]) == (0, 1, 1)


def test_losses_and_divergence_against_dense_passes():
    """One dense forward pass under the masks of what was kept, and one under none."""
    loaded, [trace] = build("qwen3"), traces([(45, 30)])
    log = KeptHistory()

    class Deaf:
        def __getattr__(self, name):
            return lambda *_: None

    TraceReader(loaded, small("gkv"), budget=BUDGET, interval=INTERVAL, max_tokens=160, log=log).read([trace], Deaf())
    ids = [*trace.prompt, *trace.answer[:-1]]
    keys = [noise.signed64(trace.request.noise_key(sample)) for sample in (-1, 0)]
    evicted, full = (
        dense_logits(loaded, ids, history, keys)[len(trace.prompt) - 1 :].double().log_softmax(dim=-1)
        for history in (log, KeptHistory())
    )
    target = torch.tensor(trace.answer)[:, None]
    row = rows_of(loaded, [trace], "gkv")[0]["gkv"]
    assert row["loss"] == pytest.approx(float(-evicted.gather(1, target).mean()), rel=1e-5)
    assert row["loss_full"] == pytest.approx(float(-full.gather(1, target).mean()), rel=1e-5)
    assert row["kl"] == pytest.approx(float((full.exp() * (full - evicted)).sum(1).mean()), rel=1e-4)
    assert row["top1"] == pytest.approx(float((full.argmax(1) == evicted.argmax(1)).double().mean()))


def test_lost_attention_and_overlap_by_hand():
    """Of the newest 24 of 45 and of every block after: streaming without sinks keeps what is known."""
    loaded, [trace] = build("qwen3"), traces([(45, 17)])
    method = Chosen(method=MethodChoice(name="streaming-llm", options=(("sinks", 0),)), budget=BUDGET)
    found = replay(loaded, "t", [trace], [*YARDSTICKS, method], interval=INTERVAL, max_tokens=160)
    row = {r["method"]: r for r in found.rows}["streaming-llm(sinks=0)"]
    reader = TraceReader(loaded, small("full"), budget=None, interval=INTERVAL, max_tokens=160)
    full = reference_module.read_full(reader, [trace])
    lost = 0.0
    for block, seen in enumerate((45, 53)):
        paid = torch.stack([table[0, :, block] for table in full.attention.values()])  # [L, Hk, T]
        lost += float(paid[..., : seen - BUDGET].sum(dim=-1).mean()) * INTERVAL
    assert row["mass_lost"] == pytest.approx(lost / 16, rel=1e-5)
    assert row["entries_mean"] == pytest.approx(sum(BUDGET + 1 + i % INTERVAL for i in range(16)) / 16)
    assert row["entries_peak"] == BUDGET + INTERVAL


@pytest.mark.parametrize("name", ["gkv", "kvzip", "ada-kv"])
def test_batches_do_not_matter(name, monkeypatch):
    loaded, asked = with_tables(build("qwen3")), traces([(45, 30)] * 3 + [(33, 20)] * 2)
    together = rows_of(loaded, asked, name, budget=40)[0][name]
    monkeypatch.setattr(reference_module, "MOST_TRACES", 1)
    alone = rows_of(loaded, asked, name, budget=40)[0][name]
    for figure in ("loss", "kl", "cosine", "mass_lost", "entries_mean"):
        assert together[figure] == pytest.approx(alone[figure], rel=1e-5)


def test_answers_of_one_token_have_a_loss_and_no_more():
    rows, _ = rows_of(build("qwen3"), traces([(45, 1), (45, 1)]), "gkv")
    assert rows["gkv"]["loss_ratio"] == 1  # the prompt's own reading is the full cache's
    assert (rows["gkv"]["cosine"], rows["gkv"]["overlap"], rows["gkv"]["gap_closed"]) == (None, None, None)


def test_traces_and_heads_are_the_rows_parts():
    rows, found = rows_of(build("qwen3"), traces([(45, 30), (45, 30)]), "h2o")
    mine = [t for t in found.traces if t["method"] == "h2o"]
    assert sum(t["loss"] * t["tokens"] for t in mine) / 60 == pytest.approx(rows["h2o"]["loss"])
    heads = [h["cosine"] for h in found.heads if h["method"] == "h2o"]
    assert len(heads) == 3 * 4
    assert sum(heads) / 12 == pytest.approx(rows["h2o"]["cosine"])


def target(loaded):
    return Target(loaded.geometry, loaded.model.config, loaded.folder, 160)


def test_yardsticks_come_first_and_nobody_runs_twice():
    chosen, left_out = plan(
        [MethodChoice(name="random")], [ORACLE, MethodChoice(name="full")], (32, 64), target(build("qwen3"))
    )
    assert [(c.method.name, c.budget) for c in chosen] == [
        ("golden", 32), ("golden", 64), ("random", 32), ("random", 64), ("full", None),
    ]  # fmt: skip
    assert not left_out


def test_who_cannot_run_is_left_out_with_the_reason():
    loaded = build("qwen3")
    everyone = [MethodChoice(name=name) for name in ("snapkv", "speckv", "trimkv", "headkv")]
    chosen, left_out = plan([], everyone, (32, 64), target(loaded))
    assert [(c.method.name, c.budget) for c in chosen[4:]] == [("snapkv", 64)]
    reasons = {(left.method, left.budget): left.reason for left in left_out}
    assert "--budget must be at least 33" in reasons["snapkv", "32"]
    assert "draft model" in reasons["speckv", "64"]
    assert "trained gate weights" in reasons["trimkv", None]
    assert "weights 'headkv' are missing" in reasons["headkv", "64"]
    with pytest.raises(UserError, match="at least 33"):
        plan([MethodChoice(name="snapkv")], [], (32,), target(loaded))
