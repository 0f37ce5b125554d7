"""Weights stored quantised: read as transformers reads them, planned with their bytes, or refused in one line."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tomllib
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support import adapters as made
from support import zoo
from support.folders import ROOT

from kvbench.cli.app import main
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.engine.model.load import load
from kvbench.engine.model.shape import read_shape, shape_of_model
from kvbench.errors import SetupError
from kvbench.runner.run_plan import RunPlan
from kvbench.sources.quantised import FORMS, StoredBytes, form_of, stored_bytes
from kvbench.store import read_rows
from kvbench.train.trained_model import write_model

LINE = (
    "run --task walk/orbit-100 --limit 1 --samples 1 --temperature 0 --method full,gkv --budget 32 --interval 8 "
    "--max-new-tokens 16 --dtype bfloat16 -q"
)
RUN = LINE.split()
WIDE = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": False}
MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # the numbers of FP4 (e2m1); the fourth bit is the sign


def needs(name: str):
    lacking = FORMS[name].missing()
    return pytest.mark.skipif(bool(lacking), reason=lacking or "nothing is missing")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs one command line in a folder of its own; its code and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1")

    def run(*arguments: str):
        capsys.readouterr()
        code = main(arguments)
        return code, capsys.readouterr().err

    return run


def plain(folder, model_type="qwen3", changes=WIDE):
    """A repository in bfloat16 without quantisation; returns its tensors."""
    zoo.repository(folder, zoo.configuration(model_type, changes))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def store(folder, tensors, **told):
    """Put quantised tensors into a repository, and the form into its configuration."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def fp8(folder, model_type="qwen3", changes=WIDE):
    """A repository in FP8 with blocks of 32 x 32, as DeepSeek and Qwen release them; returns its weights as numbers."""
    tensors, expected = {}, {}
    for name, weight in plain(folder, model_type, changes).items():
        tensors[name] = expected[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = weight.shape
            padded = torch.nn.functional.pad(weight.float(), (0, -columns % 32, 0, -rows % 32))
            blocks = padded.unflatten(1, (-1, 32)).unflatten(0, (-1, 32))
            scale = blocks.abs().amax((1, 3)) / 448
            each = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :columns]
            small = (weight.float() / each).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = small, scale
            expected[name] = small.float() * each
    told = {"weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"}
    store(folder, tensors, quant_method="fp8", **told)
    return expected


def fp8_in_text_part(folder):
    """A vision-language repository whose configuration names the form only in the part for the text model."""
    expected = fp8(folder, "mistral3", {"text_config": WIDE})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def mxfp4(folder):
    """A repository in MXFP4 as GPT-OSS is released, with random experts; returns the experts as numbers."""
    tensors, expected = {}, {}
    random = torch.Generator().manual_seed(0)
    for name, weight in plain(folder, "gpt_oss", {"hidden_size": 64, "intermediate_size": 64}).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight
            continue
        experts, columns, rows = weight.shape
        codes = torch.randint(0, 16, (experts, rows, columns), generator=random, dtype=torch.uint8)
        power = torch.randint(122, 126, (experts, rows, columns // 32), generator=random, dtype=torch.uint8)
        pairs = codes.reshape(experts, rows, columns // 32, 16, 2)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pairs[..., 0] + 16 * pairs[..., 1], power
        values = torch.tensor(MXFP4)[(codes % 8).long()] * torch.where(codes < 8, 1.0, -1.0)
        scaled = values.reshape(experts, rows, columns // 32, 32) * torch.exp2(power.float() - 127)[..., None]
        expected[name] = scaled.reshape(experts, rows, columns).transpose(1, 2)
    store(folder, tensors, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    return expected


def bitsandbytes(folder, **told):
    """A repository that transformers has quantised with bitsandbytes."""
    source = folder.with_name("source")
    plain(source)
    told = transformers.BitsAndBytesConfig(**told)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=told)
    model.save_pretrained(folder)
    for name in zoo.TOKENIZER:
        shutil.copy(source / name, folder / name)


def scales(parameter):
    """Bytes of what bitsandbytes keeps beside the numbers of 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return state.absmax.nbytes + state.code.nbytes if state is not None else 0


def planned(folder):
    """The plan of a run of this repository, and what the plan says."""
    grid = Grid(methods=(MethodChoice(name="full"),), tasks=("walk/orbit-100",))
    config = RunConfig(grids=(grid,), model=str(folder), limit=1, device="cpu", dtype="bfloat16", max_new_tokens=8)
    said: list[str] = []
    return RunPlan.make(config, {}, "r", dry_run=True, say=said.append), said


@pytest.mark.parametrize("make", [fp8, mxfp4])
def test_a_form_that_is_read_as_numbers(make, tmp_path, command):
    if text := FORMS[make.__name__].missing():
        pytest.skip(text)
    expected = make(tmp_path / "m")
    loaded = load(str(tmp_path / "m"), device="cpu", dtype="float32")
    parameters = dict(loaded.model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}
    for name, weight in expected.items():
        torch.testing.assert_close(parameters[name], weight.float(), rtol=1e-2, atol=1e-6)
    assert loaded.fingerprint is not None

    code, err = command(*RUN, "--model", "./m", "--run-name", "r")
    assert code == 0, err
    assert f"warning: model './m' stores its weights as {make.__name__}; in memory they are bfloat16." in err
    rows = read_rows(tmp_path / "results" / "r")
    assert set(rows["status"]) == {"ok"}
    assert rows["evictions"].max() > 0
    plan, _ = planned(tmp_path / "m")
    assert plan.shape.weight_bytes(2) == 2 * sum(p.numel() for p in parameters.values())


@pytest.mark.parametrize("make", [fp8, partial(fp8, model_type="qwen3_moe"), fp8_in_text_part, mxfp4])
def test_a_form_that_is_read_as_numbers_is_written_as_numbers(make, tmp_path):
    """Training changes the numbers, so the stored form is not written again."""
    if text := FORMS["mxfp4"].missing():
        pytest.skip(text)
    names = make(tmp_path / "m").keys()
    loaded = load(str(tmp_path / "m"), device="cpu", dtype="bfloat16")
    write_model(loaded, tmp_path / "trained")
    assert "quantization_config" not in (tmp_path / "trained/config.json").read_text()
    written = load_file(tmp_path / "trained/model.safetensors")
    assert names <= written.keys()
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    again = dict(load(str(tmp_path / "trained"), device="cpu", dtype="bfloat16").model.named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in loaded.model.named_parameters())


@needs("fp8")
@pytest.mark.parametrize(("model_type", "changes"), [("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 72})])
def test_the_last_blocks_of_fp8_may_be_smaller(model_type, changes, tmp_path):
    """DeepSeek's matrices of 576 rows have 5 scales for blocks of 128. With these changes, transformers alone reads 48
    rows with 2 scales as blocks of 24, and refuses 72 or 528 rows."""
    changes = WIDE | {"intermediate_size": 528, "head_dim": 24, "num_key_value_heads": 2} | changes
    expected = fp8(tmp_path / "m", model_type, changes)
    write_model(load(str(tmp_path / "m"), device="cpu", dtype="float32"), tmp_path / "numbers")
    written = load_file(tmp_path / "numbers/model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(written[name], weight.float(), rtol=1e-2, atol=1e-6)


def test_codes_without_their_form_are_refused(tmp_path):
    fp8(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"quantization_config": None}))
    first = re.escape("model.layers.0.mlp.down_proj.weight_scale_inv and 13 more")
    with pytest.raises(SetupError, match=f"which config.json does not mention, with scales: {first}"):
        load(str(tmp_path / "m"), device="cpu")


@needs("bitsandbytes")
@pytest.mark.parametrize("told", [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}])
def test_a_form_that_stays_in_memory_is_planned_with_its_bytes(told, tmp_path, command):
    folder = tmp_path / "m"
    bitsandbytes(folder, **told)
    plan, said = planned(folder)
    on_disk = (folder / "model.safetensors").stat().st_size
    assert plan.shape.weight_bytes(2) == pytest.approx(on_disk, rel=0.05)
    assert said == []
    dense = read_shape(plan.inputs.config)
    assert plan.shape.weight_bytes(2) < 0.75 * dense.weight_bytes(2)
    assert plan.shape.bytes_read(2, 8) < 0.7 * dense.bytes_read(2, 8)

    loaded = load(str(folder), device="cpu", dtype="bfloat16")
    held = sum(p.numel() * p.element_size() + scales(p) for p in loaded.model.parameters())
    assert plan.shape.weight_bytes(2) == pytest.approx(held, rel=0.05)
    assert loaded.fingerprint is None

    code, err = command(*RUN, "--model", "./m", "--run-name", "r")
    assert code == 0, err
    rows = read_rows(tmp_path / "results" / "r")
    assert set(rows["status"]) == {"ok"}
    assert rows["evictions"].max() > 0
    code, err = command("run", "--resume", "r", "-q")
    assert code == 0, err

    if importlib.util.find_spec("peft") is not None:
        model = zoo.build(zoo.configuration("qwen3", WIDE))
        made.write(tmp_path / "a", made.low_rank(model))
        code, err = command(*RUN, "--model", "./m", "--adapter", "a")
        assert code == 2
        assert "cannot be merged into weights that stay quantised (bitsandbytes)" in err


@needs("bitsandbytes")
@pytest.mark.parametrize(
    ("bits", "scales", "beside"),
    [(4, ".weight.absmax", ".weight.quant_state.bitsandbytes__nf4"), (8, ".SCB", ".weight_format")],
)
def test_experts_quantised_with_bitsandbytes_are_refused(bits, scales, beside, tmp_path, command):
    """transformers stacks the experts of Qwen3-MoE in one tensor, and ignores what bitsandbytes keeps beside each."""
    tensors = plain(tmp_path / "m", "qwen3_moe", {})
    for name in [name for name in tensors if ".experts." in name]:
        part = name.removesuffix(".weight")
        tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.int8 if bits == 8 else torch.uint8)
        tensors[part + scales], tensors[part + beside] = torch.ones(4), torch.zeros(4, dtype=torch.uint8)
    store(tmp_path / "m", tensors, quant_method="bitsandbytes", load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    for more in (["--dry-run"], []):
        code, err = command(*RUN, "--model", "./m", *more)
        assert code == 3
        assert "transformers cannot stack experts that bitsandbytes quantised, and the files hold model.layers.0" in err
        assert len(err.splitlines()) == 1
    with pytest.raises(SetupError, match="transformers cannot stack experts that bitsandbytes quantised"):
        load(str(tmp_path / "m"), device="cpu", dtype="bfloat16")


def test_bytes_of_stored_tensors(tmp_path):
    """Matrices of ordinary numbers are converted to the run's dtype; all else stays as it is stored."""
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 4, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(4, dtype=torch.bfloat16),
        "model.layers.0.mlp.experts.0.w.qweight": torch.zeros(4, 2, dtype=torch.int32),
        "model.layers.0.mlp.experts.0.w.scale": torch.zeros(4, 1, dtype=torch.float16),
        "model.layers.0.q_proj.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_bytes(tmp_path, 2) == StoredBytes(total=64 + 8 + 32 + 8 + 16, routed=40)
    assert stored_bytes(tmp_path, 4) == StoredBytes(total=128 + 8 + 32 + 16 + 16, routed=48)
    (tmp_path / "model.safetensors").unlink()
    assert stored_bytes(tmp_path, 2) is None


def test_a_step_reads_the_stored_bytes():
    shape = shape_of_model(zoo.build(zoo.configuration("qwen3_moe", {})))
    assert shape.routed > 0
    assert shape.active == 0.5
    element = 2
    same = StoredBytes(total=shape.parameters * element, routed=shape.routed * element)
    assert replace(shape, stored=same).bytes_read(element, 3) == shape.bytes_read(element, 3)
    quarter = StoredBytes(total=same.total - same.routed * 3 // 4, routed=same.routed // 4)
    saved = 0.75 * same.routed * (1 - 0.5**3)
    assert shape.bytes_read(element, 3) - replace(shape, stored=quarter).bytes_read(element, 3) == saved


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_missing_package_is_named_and_a_dry_run_still_plans(name, tmp_path, command):
    if not (text := FORMS[name].missing()):
        pytest.skip(f"the packages for {name} are installed")
    assert "gptqmodel" in text
    assert f"pip install 'kvbench[{name}]'" in text
    tensors = plain(tmp_path / "m")
    store(tmp_path / "m", tensors, quant_method=name, bits=4, group_size=32)
    code, err = command(*RUN, "--model", "./m", "--run-name", "r")
    assert (code, err) == (3, f"error: {text}\n")
    assert not (tmp_path / "results" / "r").exists()
    code, err = command(*RUN, "--model", "./m", "--dry-run")
    assert code == 0
    assert f"warning: {text}" in err


@pytest.mark.parametrize("told", [{"quant_method": "mine"}, {"bits": 4}, {"quant_method": "aqlm"}])
def test_another_form_is_refused_by_name(told, tmp_path, command):
    tensors = plain(tmp_path / "m")
    store(tmp_path / "m", tensors, **told)
    for more in (["--dry-run"], []):
        code, err = command(*RUN, "--model", "./m", *more)
        assert code == 2
        named = (
            f"stored as '{told['quant_method']}'" if "quant_method" in told else "quantised in a form that config.json"
        )
        assert f"error: the model's weights are {named}" in err
        assert ", which kvbench does not load. It loads " in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_extras_of_the_package_have_the_forms_names():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for form in FORMS.values():
        listed = {line.partition(">")[0].replace("-", "_") for line in extras[form.name]}
        assert listed == set(form.packages)


def test_where_a_configuration_tells_its_form():
    assert form_of({}) is None
    assert form_of({"quantization_config": None}) is None
    assert form_of({"text_config": {"quantization_config": {"quant_method": "fp8"}}}) is FORMS["fp8"]
