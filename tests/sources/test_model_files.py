"""What tells one state of a model's folder from another, file by file, without reading all of large weights."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest
import transformers
from transformers import utils

from kvbench import tiny
from kvbench.errors import SetupError
from kvbench.sources import model_files, models

TENSOR = 24 << 20  # bytes; four of them make a file that is sampled


def large(path: Path, tensors: int = 4) -> None:
    """A sparse safetensors file of tensors of zeros."""
    spans = {f"t{i}": [i * TENSOR, (i + 1) * TENSOR] for i in range(tensors)}
    header = json.dumps(
        {n: {"dtype": "F32", "shape": [TENSOR // 4], "data_offsets": s} for n, s in spans.items()}
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + tensors * TENSOR)


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def data(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny.path() / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny.path() / "model.safetensors").read_bytes())
    return tmp_path


def test_every_file_that_transformers_names_is_known(tmp_path: Path) -> None:
    """The constants of the installed version, and the vocabularies of all its tokenizers."""
    constants = {
        value
        for name in dir(utils)
        if re.search(
            r"(CONFIG|FEATURE_EXTRACTOR|PROCESSOR|TEMPLATE|SAFE_WEIGHTS|INDEX|TOKENIZER)\w*_(NAME|FILE)$", name
        )
        and isinstance(value := getattr(utils, name), str)
    }
    sources = Path(transformers.__file__).parent.glob("models/*/tokenization_*.py")
    tables = [re.search(r"VOCAB_FILES_NAMES\s*=\s*\{(.*?)\}", path.read_text("utf-8"), re.S) for path in sources]
    vocabularies = {name for table in tables if table for name in re.findall(r":\s*[\"']([^\"']+)[\"']", table[1])}
    common = {"special_tokens_map.json", "added_tokens.json", "tokenizer_config.json", "tokenizer.json", "merges.txt"}
    named = {name for name in constants | vocabularies | common if not name.startswith("pytorch_model")}
    assert {
        "chat_template.jinja",
        "adapter_config.json",
        "spiece.model",
        "vocab.txt",
        "preprocessor_config.json",
    } < named
    for name in named:
        (tmp_path / name).write_text("{}")
    assert set(model_files.names(tmp_path)) == named


def test_what_decides_no_token_is_left_out(folder: Path) -> None:
    before = model_files.hashes(folder)
    for name in ("README.md", "pytorch_model.bin", "trainer_state.json", "duo.json", "duo.safetensors", "log.txt"):
        (folder / name).write_text("x")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    assert model_files.hashes(folder) == before
    assert list(before) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    assert [name for name in before if model_files.makes_prompts(name)] == [
        *("config.json", "tokenizer.json", "tokenizer_config.json")
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("additional_chat_templates/tool_use.jinja", "added_tokens.json", "special_tokens_map.json", "merges.txt"),
        *("adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"),
    ],
)
def test_every_file_tells_states_apart(folder: Path, name: str) -> None:
    (folder / "additional_chat_templates").mkdir()
    info = models.ModelInfo(name=str(folder), folder=folder)
    before = models.revision(info)
    (folder / name).write_text("{}")
    added = models.revision(info)
    (folder / name).write_text("{ }")
    changed = models.revision(info)
    (folder / name).unlink()
    removed = models.revision(info)
    assert len({before, added, changed}) == 3
    assert removed not in (added, changed)


def test_one_byte_in_the_middle_of_small_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    before = model_files.hashes(folder)
    with path.open("rb") as file:
        _, spans = model_files.tensors(file) or (0, [])
    for start, end in spans:
        flip(path, (start + end) // 2)
        assert model_files.hashes(folder)["model.safetensors"] != before["model.safetensors"]
        flip(path, (start + end) // 2)
    assert model_files.hashes(folder) == before


def test_every_tensor_of_large_weights_is_looked_at(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    large(path)
    begin = path.stat().st_size - 4 * TENSOR
    hashes = {model_files.hashes(folder)[path.name]}
    for tensor in range(4):
        for place in (0, TENSOR // 2, TENSOR - 1):
            flip(path, begin + tensor * TENSOR + place)
            hashes.add(model_files.hashes(folder)[path.name])
            flip(path, begin + tensor * TENSOR + place)
    assert len(hashes) == 1 + 4 * 3
    with path.open("ab") as file:
        file.write(b"\0")
    assert model_files.hashes(folder)[path.name] not in hashes  # the size counts


def test_large_weights_are_not_read_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    large(path, tensors=400)  # 9.4 GiB
    read = []
    block = model_files.BLOCK
    monkeypatch.setattr(model_files, "_blocks", lambda spans, own=model_files._blocks: read.extend(own(spans)) or read)
    assert model_files.hashes(folder)[path.name]
    assert 400 * model_files.LEAST <= len(read) <= 2 * model_files.BLOCKS
    assert len(read) * block < 8 << 20


def test_large_weights_without_a_readable_header(folder: Path) -> None:
    path = folder / "adapter_model.bin"
    with path.open("wb") as file:
        file.truncate(model_files.WHOLE + 2)
    before = model_files.hashes(folder)
    flip(path, model_files.WHOLE // 2)
    assert model_files.hashes(folder) != before


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "tokenizer.model").symlink_to("/proc/self/mem")
    with pytest.raises(SetupError, match=r"tokenizer\.model' cannot be read \("):
        model_files.hashes(folder)


def test_a_folder_below_one_called_snapshots_is_known_by_its_content(folder: Path, tmp_path: Path) -> None:
    """Only a hub's model, given by its name, is what its commit says."""
    cached = tmp_path / "snapshots" / "abc123"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    given = models.ModelInfo(name=str(cached), folder=cached)
    before = models.state(given)
    assert set(before.files) == {"config.json"}
    (cached / "config.json").write_text("{ }")
    assert models.state(given).revision != before.revision
    assert models.state(models.ModelInfo(name="o/m", folder=cached)) == models.State("abc123")
