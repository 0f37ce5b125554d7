"""Models are found and checked by their folders alone; what a run ran on is read without torch."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from support import zoo

from kvbench import __version__, tiny
from kvbench.cli.commands import list as list_command
from kvbench.engine.model import load
from kvbench.errors import SetupError, UserError
from kvbench.runner import env
from kvbench.sources import hub, models, refusals, vocabulary


def weights(path: Path, values: int = 10, cut: int = 0, fill: bytes = b"\0") -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + fill * (4 * values - cut))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    weights(tmp_path / "model.safetensors")
    return tmp_path


def test_the_built_in_model() -> None:
    info = models.describe("tiny")
    assert (info.folder, info.model_type) == (tiny.path(), "qwen3")
    assert info.context == 32768
    assert re.fullmatch("[0-9a-f]{16}", models.revision(info) or "")


def test_a_folder(folder: Path) -> None:
    info = models.describe(str(folder))
    assert (info.model_type, info.context, info.has_chat_template) == ("llama", 4096, None)
    (folder / "tokenizer_config.json").write_text("{}")
    assert info.has_chat_template is False
    (folder / "chat_template.jinja").write_text("x")
    assert info.has_chat_template is True


def test_a_model_with_several_parts(folder: Path) -> None:
    part = {"max_position_embeddings": 8192, "num_hidden_layers": 3, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": part}))
    assert models.describe(str(folder)).context == 8192
    shown = list_command._model(str(folder))
    assert (shown["context"], shown["num_hidden_layers"], shown["vocab_size"]) == (8192, 3, 512)


def rope(kind: str, factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **more}


@pytest.mark.parametrize(
    ("model_type", "stated", "changes", "context"),
    [
        ("qwen3", 40960, {"rope_scaling": rope("yarn", 4.0, 32768)}, 131072),
        ("qwen2", 32768, {"rope_scaling": {"type": "yarn", "factor": 4}}, 131072),
        ("qwen3", 40960, {"rope_parameters": rope("yarn", 4.0, 32768, rope_theta=1e6)}, 131072),
        (
            "gemma3_text",
            4096,
            {
                "rope_parameters": {
                    "full_attention": rope("yarn", 2.0, 4096, rope_theta=1e6),
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            8192,
        ),
        ("deepseek_v3", 163840, {"rope_scaling": rope("yarn", 40, 4096, type="yarn")}, 163840),
        ("llama", 65536, {"rope_scaling": rope("llama3", 32.0, 8192, low_freq_factor=1, high_freq_factor=4)}, 65536),
        ("qwen3", 40960, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 40960),
        ("qwen3", 40960, {}, 40960),
    ],
)
def test_yarn_stretches_a_context_that_is_stated_without_it(
    folder: Path, model_type: str, stated: int, changes: dict[str, Any], context: int
) -> None:
    """The cards of Qwen2.5 and Qwen3 leave max_position_embeddings as it is; DeepSeek states the stretched context."""
    flat = {"model_type": model_type, "max_position_embeddings": stated} | changes
    (folder / "config.json").write_text(json.dumps(flat))
    assert models.describe(str(folder)).context == context
    assert models.context_of(transformers.AutoConfig.from_pretrained(folder)) == context
    (folder / "config.json").write_text(json.dumps({"text_config": flat}))
    assert models.describe(str(folder)).context == context


@pytest.mark.parametrize("broken", ["yarn", {"type": "yarn", "factor": [4]}, {"type": "yarn", "factor": math.inf}])
def test_a_context_is_read_beside_broken_parameters_of_rope(folder: Path, broken: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "rope_scaling": broken}))
    assert models.describe(str(folder)).context == 64


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, 256, {256}),  # the 2 of LlamaConfig is another token here
        ({"eos_token_id": 300}, 256, {256, 300}),
        ({"eos_token_id": None}, [256, 301], {256, 301}),
        ({}, None, {2}),
        ({"text_config": {"eos_token_id": 300}, "eos_token_id": 301}, 256, {256, 300}),
    ],
)
def test_the_default_of_a_configuration_s_class_is_no_end_token_beside_others(
    config: dict[str, Any], generation: int | list[int] | None, ends: set[int]
) -> None:
    parsed = transformers.LlamaConfig(**config.get("text_config", config))
    assert vocabulary.end_ids(None, SimpleNamespace(eos_token_id=generation), parsed, config) == ends


def test_a_loaded_model_ends_answers_as_its_files_say(tmp_path: Path) -> None:
    where = zoo.repository(tmp_path, zoo.configuration("llama", {}))
    config = json.loads((where / "config.json").read_text())
    del config["eos_token_id"]
    (where / "config.json").write_text(json.dumps(config))
    assert load.load(str(where), device="cpu").stop_ids == {256}


def test_damage_is_found_before_loading(folder: Path) -> None:
    weights(folder / "model.safetensors", cut=1)
    with pytest.raises(SetupError, match=r"model\.safetensors is damaged \(header says"):
        models.describe(str(folder))
    (folder / "model.safetensors").write_bytes(b"<html>not weights</html>")
    with pytest.raises(SetupError, match="its header cannot be read"):
        models.describe(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(SetupError, match="has no weights"):
        models.describe(str(folder))
    (folder / "config.json").write_text("[]")
    weights(folder / "model.safetensors")
    with pytest.raises(SetupError, match="holds no JSON object"):
        models.describe(str(folder))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (DEEP, r"config\.json' cannot be read as JSON \(nested too deeply\)"),
        ('{"text_config": [1]}', r"text_config is '\[1\]', not an object"),
        ('{"max_position_embeddings": [1]}', r"max_position_embeddings is '\[1\]', not a whole number"),
        ('{"max_position_embeddings": "abc"}', "max_position_embeddings is '\"abc\"', not a whole number"),
        ('{"max_position_embeddings": Infinity}', "max_position_embeddings is 'Infinity', not a whole number"),
        ('{"text_config": {"vocab_size": true}}', "vocab_size is 'true', not a whole number"),
    ],
)
def test_a_configuration_of_other_types_is_told(folder: Path, config: str, why: str) -> None:
    (folder / "config.json").write_text(config)
    with pytest.raises(SetupError, match=why):
        models.describe(str(folder))


def test_infinities_that_transformers_writes_are_read(folder: Path) -> None:
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "max_position_embeddings": 64}')
    assert models.describe(str(folder)).context == 64


@pytest.mark.parametrize("span", ["[0, Infinity]", "[0, -9e21]", "[0, 9e21]", "[-1, 4]", "[4, 0]", "[0, true]", "[0]"])
def test_offsets_that_no_file_has_are_damage(folder: Path, span: str) -> None:
    header = f'{{"w": {{"dtype": "F32", "shape": [1], "data_offsets": {span}}}}}'.encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(SetupError, match="its header cannot be read"):
        models.describe(str(folder))


def test_a_deep_header_is_damage_and_a_deep_tokenizer_says_nothing(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode())
    with pytest.raises(SetupError, match="its header cannot be read"):
        models.describe(str(folder))
    (folder / "tokenizer.json").write_text(DEEP)
    assert vocabulary.tokens(folder, 8) is None


def test_what_looks_like_a_path_is_never_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("./org/x", "/org/x", "~/x", "..\\x"):
        assert models.is_path(name)
    assert not models.is_path("org/x")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/x").mkdir(parents=True)
    assert models.is_path("org/x")
    with pytest.raises(SetupError, match=r"'org/x' has no config\.json"):
        models.describe("org/x")
    with pytest.raises(UserError, match="is neither a folder nor a hub name"):
        models.describe("https://example.com/x")


def test_a_hub_model_that_is_not_here_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    info = models.describe("some-org/some-model-that-is-not-cached")
    assert (info.folder, info.context, info.has_chat_template, models.revision(info)) == (None, None, None, None)


def test_revision_follows_the_weights_and_the_configuration(folder: Path) -> None:
    info = models.describe(str(folder))
    seen = {models.revision(info)}
    assert {models.revision(info)} == seen
    weights(folder / "model.safetensors", fill=b"\1")
    seen.add(models.revision(info))
    (folder / "config.json").write_text("{}")
    seen.add(models.revision(info))
    assert len(seen) == 3


def test_revision_of_a_cached_hub_model_is_its_commit(tmp_path: Path) -> None:
    commit = tmp_path / "snapshots" / "abc123"
    commit.mkdir(parents=True)
    assert models.revision(models.ModelInfo(name="o/m", folder=commit)) == "abc123"


def test_what_transformers_could_not_read_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LocalEntryNotFoundError(Exception):
        pass

    class GatedRepoError(Exception):
        pass

    def told(where: str, error: Exception, cause: Exception | None = None) -> str:
        error.__cause__ = cause
        return str(refusals.unreadable("org/x", where, error))

    no_tokenizer = "model 'org/x' has no tokenizer files (tokenizer.json). Copy them beside its weights."
    with pytest.raises(SetupError, match=re.escape(no_tokenizer)):
        models.check_tokenizer("org/x", tmp_path)
    for name in ("tokenizer.json", "tiktoken.model"):
        (tmp_path / name).write_text("{")
        models.check_tokenizer("org/x", tmp_path)
        (tmp_path / name).unlink()
    assert told(str(tmp_path), ValueError("expected value at line 1\nmore")) == (
        "model 'org/x' cannot be read: expected value at line 1"
    )
    assert "HF_HUB_OFFLINE is set, so the hub is not asked" in told("org/x", OSError("?"), LocalEntryNotFoundError("?"))
    monkeypatch.setattr(hub, "is_offline", lambda: False)
    unreachable = told("org/x", OSError("We could not"), LocalEntryNotFoundError("?"))
    assert unreachable == (
        "cannot reach the hub and 'org/x' is not in the local cache. Try again, or give a local folder (--model PATH) "
        "or a cached model; HF_HUB_OFFLINE=1 then avoids the hub."
    )
    assert "'org/x' is gated. Accept its terms on its page" in told("org/x", OSError("?"), GatedRepoError("?"))
    asks_for_code = ValueError("The repository contains custom code. Please pass trust_remote_code=True.")
    assert "needs code from its repository, which kvbench never runs" in told(str(tmp_path), asks_for_code)


def test_a_plain_404_speaks_of_gated_models_and_is_none() -> None:
    class RepositoryNotFoundError(Exception):
        pass

    error = RepositoryNotFoundError("404. If you are trying to access a private or gated repo, make sure ...")
    assert hub.why(error) == "missing"
    assert "the hub has no model 'org/x'" in str(refusals.unreadable("org/x", "org/x", error))


def test_weights_that_the_index_names_must_all_be_there(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SetupError, match=r"lacks weights that its index names: b\.safetensors and 1 more\. Download"):
        models.describe(str(folder))
    weights(folder / "b.safetensors")
    weights(folder / "c.safetensors")
    assert models.describe(str(folder)).where == str(folder)


def test_a_part_of_a_hub_model_in_the_cache_is_no_model(folder: Path) -> None:
    cached = models.ModelInfo(name="org/part", folder=folder)
    assert cached.where == "org/part"  # it has no tokenizer
    (folder / "tokenizer.json").write_text("{}")
    assert cached.where == str(folder)
    (folder / "model.safetensors").unlink()
    assert cached.where == "org/part"
    assert models.describe("tiny").where == str(tiny.path())


def test_a_draft_with_a_part_in_the_cache_is_loaded_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(load, "describe", lambda name: models.ModelInfo(name=name, folder=folder))
    monkeypatch.setattr(load, "load", lambda where, **more: asked.append(where))
    target: Any = SimpleNamespace(dtype="torch.float32", device="cpu")
    load.load_draft(target, "org/part")
    assert asked == ["org/part"]


def test_versions_and_machine() -> None:
    versions = env.versions()
    assert versions["kvbench"] == __version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "transformers", "numpy"} <= set(versions)
    assert env.version("no-such-package-here") is None
    assert env.machine()["cores"] >= 1
    assert (env.memory_bytes() or 0) > 2**28
    assert re.fullmatch(r"[0-9a-f]{12}(\+changes)?", env.git_commit() or "0" * 12)
