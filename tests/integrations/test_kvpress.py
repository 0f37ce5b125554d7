"""`kvpress:NAME`: the entries that kvpress itself keeps, and decoding to the end, for every press."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from support.folders import ROOT
from support.models import build, requests
from support.presses import CASES, KINDS, NOISE_KEY, budget_of, model, prompt

from kvbench import EvictionCache
from kvbench.engine.cache.layout import Lengths, check_prefill
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.engine.prefill import PromptReader
from kvbench.engine.setup import set_up
from kvbench.errors import SetupError, UserError
from kvbench.eviction.choose import canonical, from_label, make
from kvbench.integrations.kvpress import load
from kvbench.integrations.kvpress.facts import PRESSES, REFUSED
from kvbench.integrations.kvpress.method import ratio
from kvbench.records import Sampling
from kvbench.registry import methods
from kvbench.runner.method_source import source_of

try:
    load.kvpress()
except SetupError as error:
    pytest.skip(str(error), allow_module_level=True)

STORED = json.loads((ROOT / "tests/data/kvpress/kept.json").read_text())
SMALL = CASES | {"LagKVPress": {"lag_size": 8}, "ExpectedAttentionPress": {"buffer": 24}, "CapPress": {"buffer": 24}}


def press(name: str):
    return make(f"kvpress:{name}", SMALL[name])


@functools.cache
def loaded(kind: str):
    return prepare(model(kind), None)


def read_prompt(kind: str, method, budget: int) -> list[list[list[int]]]:
    """The positions that stay of the prompt, by layer and KV head."""
    setup = set_up(loaded(kind), method, budget=budget, interval=16, lengths=Lengths.of(200))
    reader = PromptReader(setup, chunk=64)
    with torch.no_grad(), reader.model.routed():
        cache, _ = reader.open([prompt()], setup.rules_for_prompt(len(prompt())), [NOISE_KEY])
    packed = [cache.layers[index].pack(0) for index in sorted(cache.layers)]
    return [[head.sort().values.tolist() for head in layer.held()] for layer in packed]


@pytest.mark.parametrize("case", STORED["cases"], ids=lambda c: f"{c['press']}-{c['model']}")
def test_the_prompt_s_entries_are_those_that_kvpress_keeps(case):
    method = make(f"kvpress:{case['press']}", case["options"])
    assert read_prompt(case["model"], method, case["budget"]) == case["kept"]


def test_every_press_is_compared_on_both_models():
    assert {(c["press"], c["model"]) for c in STORED["cases"]} == {(p, k) for p in PRESSES for k in KINDS}
    assert STORED["versions"]["kvpress"] == load.VERSION
    assert all(c["options"] == CASES[c["press"]] and c["budget"] == budget_of(c["press"]) for c in STORED["cases"])


@pytest.mark.parametrize("name", PRESSES)
def test_decoding_runs_to_the_end(name):
    """Within the budget, and with the same tokens beside other sequences and in `generate`."""
    method, todo = press(name), requests((40, 61, 40), (40, 30, 20), 1, Sampling())
    alone = build("qwen3")
    attributes = set(vars(alone.model.model.layers[0].self_attn))
    engine = Engine(alone, method, budget=32, interval=8, slots=3, max_tokens=120)
    done = {g.request.doc_id: g for g in engine.generate(todo)}
    assert [len(done[r.doc_id].token_ids) for r in todo] == [40, 30, 20]
    for g in done.values():
        assert g.usage.entries_after_evict == 32
        assert g.usage.evictions > 1 or not method.decode_bounded
        assert g.usage.entries_peak <= 32 + (8 if method.decode_bounded else len(g.token_ids))
    [single] = engine.generate(todo[:1])
    assert single.token_ids == done["0"].token_ids
    assert set(vars(alone.model.model.layers[0].self_attn)) == attributes
    if PRESSES[name].hidden in ("window", "many"):
        with EvictionCache(alone.model, method, budget=32, interval=8, max_tokens=120) as cache:
            ids = torch.tensor([todo[0].prompt_ids])
            out = alone.model.generate(ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
        assert out[0, ids.shape[1] :].tolist() == list(done["0"].token_ids)


@pytest.mark.parametrize("name", REFUSED)
def test_a_press_that_cannot_run_is_refused_with_the_reason(name):
    with pytest.raises(UserError, match=rf"^method 'kvpress:{name}' cannot run: it [^.]*.$"):
        make(f"kvpress:{name}", {})


def test_names():
    assert canonical("KVPress:snapkvpress") == "kvpress:SnapKVPress"
    assert canonical("snapkv+kvpress:KnormPress") == "snapkv+kvpress:KnormPress"
    with pytest.raises(UserError, match=r"kvpress has no scorer press 'SnapPress'\. Did you mean kvpress:SnapKVPress"):
        canonical("kvpress:SnapPress")
    assert not any(":" in name for name in methods.names())


def test_a_press_is_identified_by_its_version_options_and_source():
    method = from_label("kvpress:CriticalKVPress(press=SnapKVPress(window_size=8))")
    assert method.version == "1 (kvpress 0.5.5)"
    assert method.options() == {
        "press": "SnapKVPress(window_size=8)",
        "epsilon": 1e-4,
        "first_stage_ratio": 0.5,
        "buffer": 256,
    }
    files = source_of(method).files
    assert {"kvbench/integrations/kvpress/method.py", "kvpress/presses/criticalkv_press.py"} <= files.keys()
    assert "kvpress/presses/snapkv_press.py" in files


def test_invalid_options():
    with pytest.raises(UserError, match="must be an odd number, 1 or more; got 4"):
        make("kvpress:SnapKVPress", {"kernel_size": 4})
    with pytest.raises(UserError, match="'buffer' must be more than 4: the press leaves out the first 4 of the tokens"):
        make("kvpress:CapPress", {"buffer": 4})
    with pytest.raises(UserError, match="'buffer' must be more than 4: the press leaves out the first 4 of the tokens"):
        make("kvpress:CriticalKVPress", {"press": "ExpectedAttentionPress", "buffer": 4})
    with pytest.raises(UserError, match="kvpress has no scorer press 'Other'"):
        make("kvpress:CriticalKVPress", {"press": "Other"})
    assert make("kvpress:SnapKVPress", {}).min_budget() == 65
    assert make("kvpress:CriticalKVPress", {}).min_budget() == 65


def test_where_a_press_does_not_fit():
    with pytest.raises(UserError, match="every KV head, but 'ada-kv' keeps different numbers"):
        make("ada-kv+kvpress:KnormPress", {})
    with pytest.raises(UserError, match="every KV head, but 'ada-kv' keeps different numbers"):
        make("ada-kv+chunkkv", {"chunkkv.base": "kvpress:KnormPress"})
    with pytest.raises(UserError, match="must name a method that can score heads of uneven lengths"):
        make("ada-kv", {"base": "kvpress:KnormPress"})
    with pytest.raises(UserError, match=r"only attention of class LlamaAttention, .* model type 'phi' has a layer "):
        Engine(build("phi"), press("TOVAPress"), budget=32, interval=8, slots=1, max_tokens=120)
    with pytest.raises(UserError, match="reads the hidden states of the whole prompt, but --prefill chunked"):
        check_prefill(press("LeverageScorePress"), "chunked")
    check_prefill(press("SnapKVPress"), "chunked")


def test_a_press_that_reads_entries_only_serves_other_architectures():
    engine = Engine(build("phi"), press("KeyDiffPress"), budget=32, interval=8, slots=1, max_tokens=120)
    [done] = engine.generate(requests((40,), (20,), 1))
    assert len(done.token_ids) == 20


def test_what_kvpress_gets_wrong_while_decoding_is_said():
    [note] = press("ExpectedAttentionPress").notes()
    assert "derives their positions from the number of hidden states" in note
    assert "at most 24" in note
    assert press("SnapKVPress").notes() == press("CompactorPress").notes() == ()
    assert make("snapkv+kvpress:CapPress", {}).notes() == make("kvpress:CapPress", {}).notes()


def test_an_error_of_a_press_is_one_line():
    method = from_label("kvpress:NonCausalAttnPress")
    setup = set_up(loaded("llama"), method, budget=40, interval=16, lengths=Lengths.of(200))
    reader = PromptReader(setup, chunk=64, prefill="chunked")
    failed = pytest.raises(UserError, match=r"^kvpress 0\.5\.5 failed in NonCausalAttnPress")
    with torch.no_grad(), reader.model.routed(), failed:
        reader.open([prompt()], setup.rules_for_prompt(128), [NOISE_KEY])


def test_kvpress_keeps_exactly_the_budget_at_the_ratio():
    for entries in range(2, 300):
        for budget in range(1, entries):
            removed = ratio(entries, budget)
            assert int(entries * (1 - removed)) == budget
            assert abs(removed - (1 - budget / entries)) < 1e-12


def test_transformers_keeps_its_attention_functions():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
