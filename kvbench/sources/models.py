"""Finds a model and reads its configuration, without torch and without weights.

A name that looks like a path is never sent to the hub. For a hub name, `describe` reads only the local cache; facts
that the cache lacks are unknown until `located` or `fetched` asks the hub. Weights that are missing or only pickled,
and damaged weights in a local folder, raise an error here, before any weights are loaded.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.console import faults
from kvbench.errors import KVBenchError, SetupError, UserError, quote
from kvbench.sources import adapters, hub, model_files, model_weights
from kvbench.sources.model_weights import read_json
from kvbench.sources.refusals import own_code, refusal, unreadable

TINY = "tiny"
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"),
    "tiktoken.model",  # of Kimi; transformers reads it with the package tiktoken
)
NO_LIMIT = 1 << 20  # length of the longest sequence, in tokens, of a model that states none
_SIZES = ("max_position_embeddings", "vocab_size")  # fields of config.json that kvbench reads


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts from a model's folder. `folder` is None for a hub model that is not in the local cache."""

    name: str
    folder: Path | None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The name under which transformers finds the model: the folder, or the hub name if the cache lacks a part of
        the model."""
        if self.folder is None:
            return self.name
        cached = self.name != TINY and not is_path(self.name)
        whole = not model_weights.lacking(self.folder) and any((self.folder / file).is_file() for file in TOKENIZERS)
        return self.name if cached and not whole else str(self.folder)

    @property
    def commit(self) -> str | None:
        """The hub's commit of the files in `folder`; None for a local folder or an unknown commit."""
        if self.folder is None or self.name == TINY or is_path(self.name):
            return None
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of config.json that describes the text model; all of it for a model with one part."""
        return self.config.get("text_config") or self.config

    @property
    def context(self) -> int | None:
        """The length of the model's longest sequence, in tokens; None if it is unknown."""
        stated = self.config.get("max_position_embeddings") or self.text.get("max_position_embeddings")
        return _stretched(stated, self.text.get("rope_scaling") or self.text.get("rope_parameters"))

    @property
    def group(self) -> int | None:
        """The number of query heads per KV head; None if config.json does not state both numbers of heads."""
        query, kv = self.text.get("num_attention_heads"), self.text.get("num_key_value_heads")
        return query // kv if type(query) is int and type(kv) is int and kv > 0 else None

    @property
    def has_chat_template(self) -> bool | None:
        """Whether the tokenizer has a chat template; None if it is unknown."""
        if self.folder is None or not (self.folder / "tokenizer_config.json").is_file():
            return None
        if (self.folder / "chat_template.jinja").is_file() or (self.folder / "chat_template.json").is_file():
            return True
        return bool(read_json(self.folder / "tokenizer_config.json").get("chat_template"))


def context_of(config: Any) -> int:
    """Return the length of the longest sequence, in tokens, of a model with this configuration of transformers."""
    text = config.get_text_config()
    stated = getattr(text, "max_position_embeddings", None)
    return _stretched(stated, getattr(text, "rope_parameters", None)) or NO_LIMIT


def _stretched(stated: int | None, rope: Any) -> int | None:
    """Return the length of a model's longest sequence; None if the model states none.

    stated: the configuration's max_position_embeddings. rope: its parameters of RoPE, or {kind of layer: parameters}.

    YaRN stretches the original length by a factor. DeepSeek-V3 and GPT-OSS state the stretched length. The cards of
    Qwen2.5 and Qwen3 switch YaRN on by its parameters alone, so that the stated length is too small.
    """
    if not stated:
        return None
    rope = rope if isinstance(rope, Mapping) else {}
    lengths = [stated]
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        factor, original = part.get("factor"), part.get("original_max_position_embeddings") or stated
        numbers = type(factor) in (int, float) and type(original) is int
        if "yarn" in (part.get("rope_type"), part.get("type")) and numbers and math.isfinite(original * factor):
            lengths.append(int(original * factor))
    return max(lengths)


def is_path(name: str) -> bool:
    """Return whether a model name means a folder: it begins like a path, has a backslash, or is a path that exists."""
    return name.startswith((".", "/", "~")) or "\\" in name or os.path.exists(name)


def describe(name: str, revision: str | None = None, *, weights: bool = True) -> ModelInfo:
    """Return the facts about a model from local files. Raises SetupError for an unusable folder, UserError for an
    invalid name.

    weights: whether a model folder must have weights. A hub model need not be on this machine; `ModelInfo.folder` is
    None if it is not.
    """
    if name == TINY:
        from kvbench import tiny

        return _local(name, tiny.path())
    if is_path(name):
        folder = Path(os.path.expanduser(name))
        if not os.path.exists(folder):
            raise SetupError(f"model folder {quote(name)} does not exist.")
        if not os.path.isdir(folder):
            raise SetupError(f"{quote(name)} is a file; --model takes a folder or a hub name.")
        return _local(name, folder, weights=weights)
    if not hub.is_name(name):
        raise UserError(f"{quote(name)} is neither a folder nor a hub name like 'org/model'.")
    if (cached := hub.kept("model", name, "config.json", revision)) is None:
        return ModelInfo(name=name, folder=None)
    _refuse_adapter(name, [path.name for path in cached.parent.iterdir()])
    return ModelInfo(name=name, folder=cached.parent, config=_config(cached))


def _local(name: str, folder: Path, *, weights: bool = True) -> ModelInfo:
    _refuse_adapter(name, [path.name for path in folder.iterdir()])
    if not (folder / "config.json").is_file():
        raise SetupError(f"{quote(name)} has no config.json; it is not a model folder.")
    if weights:
        model_weights.check(name, folder)
    return ModelInfo(name=name, folder=folder, config=_config(folder / "config.json"))


def _refuse_adapter(name: str, files: Iterable[str]) -> None:
    """Raise SetupError for a model with an adapter among its files, because transformers would load the adapter
    unasked."""
    if adapters.CONFIG in files:
        raise SetupError(
            f"{quote(name)} holds an adapter ({adapters.CONFIG}); give the base model with --model and the adapter's "
            "folder with --adapter."
        )


def check_tokenizer(name: str, folder: Path) -> None:
    """Raise SetupError if the folder has no tokenizer files, because transformers may then make an empty tokenizer."""
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise SetupError(f"model {quote(name)} has no tokenizer files ({TOKENIZERS[0]}). Copy them beside its weights.")


def located(name: str, revision: str | None = None) -> ModelInfo:
    """Return the facts about a model; download its configuration first if the local cache does not hold the whole
    model.

    Raises as `describe` does. Raises SetupError also if the hub refuses the model, if the model has no safetensors
    weights, or if the hub is unreachable and the cache lacks the configuration.
    """
    info = describe(name, revision)
    if info.folder is None or info.where != str(info.folder):
        info = _asked(info, revision)
    return info


def fetched(name: str, revision: str | None = None) -> ModelInfo:
    """Return the facts about a model as `located` does. Raises SetupError also for a model that needs code from its
    repository."""
    info = located(name, revision)
    if info.config.get("auto_map"):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if info.model_type not in CONFIG_MAPPING_NAMES:
            raise own_code(info.name)
    return info


@contextlib.contextmanager
def reading(name: str, where: str) -> Iterator[None]:
    """Turn an exception of transformers inside the `with` block, which reads a model, into a SetupError of one line.
    where: the folder or hub name that transformers reads.

    Exceptions for failures of the machine, such as too little memory, are not changed.
    """
    try:
        yield
    except KVBenchError:
        raise
    except Exception as error:
        if faults.of_machine(error):
            raise
        raise unreadable(name, where, error) from error


def _asked(info: ModelInfo, revision: str | None) -> ModelInfo:
    """Download a hub model's configuration, check the model's list of files, and return the facts about the model anew.
    If the hub is unreachable and the cache has the configuration, return `info`."""
    name = info.name
    import huggingface_hub

    hub.hush()
    try:
        files = hub.ask("model", name, revision).files
        if "config.json" in files:
            huggingface_hub.hf_hub_download(name, "config.json", revision=revision)
    except Exception as error:  # the hub's libraries raise many types, see `kvbench.sources.hub.why`
        reason = error.why if isinstance(error, hub.HubError) else hub.why(error)
        if reason == "unreachable" and info.folder is not None:
            return info  # transformers reports missing files itself
        raise refusal(name, reason, revision) or unreadable(name, name, error) from None
    _check_files(name, files)
    return describe(name, revision)


def _check_files(name: str, files: tuple[str, ...]) -> None:
    """Raise SetupError unless the list of a hub model's files has a config.json and safetensors weights, and no
    adapter."""
    _refuse_adapter(name, files)
    if "config.json" not in files:
        raise SetupError(f"{quote(name)} has no config.json on the hub; it is not a model of transformers.")
    top = [Path(file) for file in files if "/" not in file]
    if not any(path.suffix == ".safetensors" for path in top):
        raise model_weights.none_there(name, top)


@dataclass(frozen=True, slots=True)
class State:
    """Identifies the content of a model. `revision`: the hub's commit or, for a local folder, one hash over its files.
    `files`: {file name: hash}; empty for a hub model."""

    revision: str | None
    files: Mapping[str, str] = field(default_factory=dict)


def state(info: ModelInfo) -> State:
    """Return what identifies a model: the commit of a hub model or, for a local folder, the hashes of all files that
    affect which tokens the model generates.

    `kvbench.sources.model_files` chooses these files and hashes only parts of large files. The local cache of a hub
    model is not hashed: it is trusted to match its commit.
    """
    if info.folder is None or info.commit is not None:
        return State(info.commit)
    files = model_files.hashes(info.folder)
    return State(model_files.combined(files), files)


def revision(info: ModelInfo) -> str | None:
    """Return the commit of a hub model, None if it is unknown; for a local folder, one hash over its files."""
    return state(info).revision


def _config(path: Path) -> dict[str, Any]:
    """Read a config.json. Raises SetupError if `text_config` or one of `_SIZES` has a wrong type."""
    config = read_json(path)
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise _wrong(path, "text_config", text, "an object")
    for part in (config, text or {}):
        for name in _SIZES:
            if (size := part.get(name)) is not None and not (type(size) is int and size >= 0):
                raise _wrong(path, name, size, "a whole number")
    return config


def _wrong(path: Path, name: str, value: object, kind: str) -> SetupError:
    return SetupError(f"{quote(path)}: {name} is {quote(json.dumps(value))}, not {kind}. Download the model again.")
