"""A LoRA adapter that `load` merges: W + alpha / r B A, and what cannot be merged is refused in one line."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from support import adapters as made
from support import zoo

from kvbench.engine.model.adapter import check
from kvbench.engine.model.load import load
from kvbench.engine.model.shape import on_meta
from kvbench.errors import UserError
from kvbench.sources import adapters

pytest.importorskip("peft", reason="peft merges adapters; it is in the extra 'adapters'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.repository(tmp_path_factory.mktemp("base") / "m", zoo.configuration("qwen3", {}))


@pytest.fixture(scope="module")
def base(folder):
    return load(str(folder), device="cpu", dtype="float32")


def adapter_of(path):
    found = adapters.find(str(path))
    assert found is not None
    return found


def layers(count):
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


def refusal(adapter, model_type="qwen3", changes=None):
    with pytest.raises(UserError) as caught:
        check(adapter, on_meta(zoo.configuration(model_type, changes or {})))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_merged_weights_are_those_of_the_equation(folder, base, tmp_path):
    factors = made.low_rank(base.model)
    adapter = adapter_of(made.write(tmp_path / "a", factors))
    merged = load(str(folder), device="cpu", dtype="float32", adapter=adapter)
    assert type(merged.model) is type(base.model)
    assert {name: type(m) for name, m in merged.model.named_modules()} == {
        name: type(m) for name, m in base.model.named_modules()
    }
    for name, weight in base.model.named_parameters():
        layer = name.removesuffix(".weight")
        change = 4.0 * factors[f"{layer}.lora_B"] @ factors[f"{layer}.lora_A"] if f"{layer}.lora_A" in factors else 0
        now = merged.model.get_parameter(name)
        torch.testing.assert_close(now, weight + change, rtol=1e-6, atol=1e-6)
        assert torch.equal(now, weight) == (f"{layer}.lora_A" not in factors)
    assert merged.fingerprint != base.fingerprint


def test_merged_logits_are_those_of_peft(folder, base, tmp_path):
    import peft

    path = made.train(transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "trained")
    merged = load(str(folder), device="cpu", dtype="float32", adapter=adapter_of(path)).model
    beside = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), path).eval()
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected, plain = beside(input_ids=ids).logits, base.model(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, plain, atol=1e-2)


def test_an_adapter_of_another_model_is_refused_from_shapes(base, tmp_path):
    adapter = adapter_of(made.write(tmp_path / "a", made.low_rank(base.model), base_model_name_or_path="org/m"))
    check(adapter, on_meta(zoo.configuration("qwen3", {})))
    wide = refusal(adapter, changes={"hidden_size": 128})
    assert "does not fit the model: size mismatch for model.layers.0.self_attn.q_proj" in wide
    assert wide.endswith("it was made for 'org/m'.")
    assert "the model lacks the modules of 'model.layers.1" in refusal(adapter, changes=layers(1))
    assert "adapter_model.safetensors lacks 'model.layers.2" in refusal(adapter, changes=layers(3))
    assert "Target modules {'q_proj'} not found" in refusal(adapter, "gpt2")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_replication", [[0, 1], [0, 2]]),
        ("alora_invocation_tokens", [1]),
        ("megatron_config", {"tensor_model_parallel_size": 1}),
        ("corda_config", {"covariance_file": "/etc/passwd"}),
        ("init_lora_weights", "pissa_niter_4"),
        ("use_qalora", True),
        ("field_of_a_later_peft", 3),
    ],
)
def test_options_that_change_more_than_weights_are_refused_by_name(base, tmp_path, field, value):
    adapter = adapter_of(made.write(tmp_path / "a", made.low_rank(base.model), **{field: value}))
    assert f"has the option {field} '" in refusal(adapter)


def test_what_peft_saves_by_default_is_accepted(tmp_path):
    import peft

    config = json.loads(json.dumps(peft.LoraConfig(r=2, target_modules=["q_proj"]).to_dict(), default=list))
    model = zoo.build(zoo.configuration("qwen3", {}))
    check(adapter_of(made.write(tmp_path / "a", made.low_rank(model), **config)), on_meta(model.config))


def test_tied_weights_are_not_merged_for_one_of_two_layers(tmp_path):
    config = zoo.configuration("qwen3", {"tie_word_embeddings": True})
    factors = made.low_rank(zoo.build(config), "lm_head")
    adapter = adapter_of(made.write(tmp_path / "a", factors, target_modules=["lm_head"]))
    assert "changes 'lm_head', whose weights the model shares" in refusal(
        adapter, changes={"tie_word_embeddings": True}
    )


def test_weights_that_are_no_numbers_are_refused(folder, base, tmp_path):
    factors = made.low_rank(base.model)
    next(iter(factors.values()))[0, 0] = float("nan")
    adapter = adapter_of(made.write(tmp_path / "a", factors))
    with pytest.raises(UserError, match="does not fit the model: NaNs detected in the merged weights"):
        load(str(folder), device="cpu", dtype="float32", adapter=adapter)


def test_advice_of_bitsandbytes_is_silent_where_kvbench_imports_it(folder, tmp_path):
    """peft and transformers import it; it then logs how to install a package with code from the hub."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    adapter = adapter_of(made.write(tmp_path / "a", made.low_rank(load(str(folder), device="cpu").model)))
    for touch in (
        lambda: load(str(folder), device="cpu"),
        lambda: check(adapter, on_meta(zoo.configuration("qwen3", {}))),
    ):
        logger.setLevel(logging.NOTSET)
        touch()
        assert not logger.isEnabledFor(logging.WARNING)
