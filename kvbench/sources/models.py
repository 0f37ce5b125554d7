"""Finds a model and reads what its folder says, without torch and without weights.

    describe("tiny"), describe("./folder"), describe("org/name")  ->  ModelInfo
    fetched("org/name")                                           ->  the same, after the hub was asked
    state(info)                                                   ->  State: commit, or hashes of the files

A value that looks like a path is never sent to the hub. For a hub name `describe` looks only at the local cache: what
is not there is unknown (None) until `fetched` asks. Damaged and pickled weights are found before any loading.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.console import faults
from kvbench.errors import KVBenchError, SetupError, UserError, show
from kvbench.sources import hub, model_files
from kvbench.store.strict_json import lenient

TINY = "tiny"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_SIZES = ("max_position_embeddings", "vocab_size")  # of config.json, that are read here
_CONVERT = "kvbench loads safetensors only; convert it, for example with 'save_pretrained' of transformers."


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model as far as its folder tells. `folder` is None for a hub model that is not in the local cache."""

    name: str
    folder: Path | None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """What transformers loads: the folder, or the hub's name where the cache does not hold all of the model."""
        if self.folder is None:
            return self.name
        cached = self.name != TINY and not is_path(self.name)
        whole = not _lacking(self.folder) and any((self.folder / file).is_file() for file in TOKENIZERS)
        return self.name if cached and not whole else str(self.folder)

    @property
    def commit(self) -> str | None:
        """The hub's commit that lies in `folder`; None for a local folder, wherever that is, and when it is unknown."""
        if self.folder is None or self.name == TINY or is_path(self.name):
            return None
        return self.folder.name if self.folder.parent.name == "snapshots" else None

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def context(self) -> int | None:
        """Longest sequence the model was made for, in tokens."""
        text = self.config.get("text_config")
        return self.config.get("max_position_embeddings") or (text or {}).get("max_position_embeddings") or None

    @property
    def group(self) -> int | None:
        """Query heads that share a KV head; None when it is unknown."""
        text = self.config.get("text_config") or self.config
        query, kv = text.get("num_attention_heads"), text.get("num_key_value_heads")
        return query // kv if type(query) is int and type(kv) is int and kv > 0 else None

    @property
    def has_chat_template(self) -> bool | None:
        """Whether the tokenizer brings a chat template; None when it is unknown."""
        if self.folder is None or not (self.folder / "tokenizer_config.json").is_file():
            return None
        if (self.folder / "chat_template.jinja").is_file() or (self.folder / "chat_template.json").is_file():
            return True
        return bool(_json(self.folder / "tokenizer_config.json").get("chat_template"))


def is_path(name: str) -> bool:
    """Whether a model name means a folder: it begins like a path or exists."""
    return name.startswith((".", "/", "~")) or "\\" in name or os.path.exists(name)


def describe(name: str, revision: str | None = None) -> ModelInfo:
    """Raises SetupError when a local model cannot be used, UserError when the name is no name."""
    if name == TINY:
        from kvbench import tiny

        return _local(name, tiny.path())
    if is_path(name):
        folder = Path(os.path.expanduser(name))
        if not os.path.exists(folder):
            raise SetupError(f"model folder {show(name)} does not exist.")
        if not os.path.isdir(folder):
            raise SetupError(f"{show(name)} is a file; --model takes a folder or a hub name.")
        return _local(name, folder)
    if not hub.is_name(name):
        raise UserError(f"{show(name)} is neither a folder nor a hub name like 'org/model'.")
    cached = _cached(name, revision)
    return ModelInfo(name=name, folder=cached, config=_config(cached / "config.json") if cached else {})


def _local(name: str, folder: Path) -> ModelInfo:
    if not (folder / "config.json").is_file():
        raise SetupError(f"{show(name)} has no config.json; it is not a model folder.")
    check_weights(name, folder)
    return ModelInfo(name=name, folder=folder, config=_config(folder / "config.json"))


def check_tokenizer(name: str, folder: Path) -> None:
    """A tokenizer must be there: transformers makes an empty one for some models where it is not. Raises SetupError."""
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise SetupError(
            f"model {show(name)}: it has no tokenizer files ({TOKENIZERS[0]}). Copy them beside its weights."
        )


def unreadable(name: str, where: str, error: Exception) -> SetupError:
    """The line for a model whose tokenizer or configuration transformers cannot load."""
    reason = hub.why(error)
    if reason == "code":
        return _own_code(name)
    if not Path(where).is_dir() and (refusal := _refusal(name, reason)):
        return refusal
    lines = [line.strip() for line in faults.words(error).splitlines() if line.strip()] or [type(error).__name__]
    told = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return SetupError(f"model {show(name)} cannot be read: {told}")


def _own_code(name: str) -> SetupError:
    return SetupError(
        f"{show(name)} needs code from its repository, which kvbench never runs. "
        "Use a model whose architecture transformers has itself."
    )


def _refusal(name: str, reason: hub.Why, revision: str | None = None) -> SetupError | None:
    """The line for what the hub answers, or None when it does not say why."""
    model = show(name)
    match reason:
        case "missing":
            return SetupError(f"the hub has no model {model} (or it is private and HF_TOKEN is not set).")
        case "revision":
            named = show(revision) if revision else "that revision"
            return SetupError(f"model {model} has no revision {named} on the hub.")
        case "gated":
            return SetupError(
                f"{model} is gated. Accept its terms on its page, then set HF_TOKEN or run 'hf auth login'."
            )
        case "token":
            return SetupError(f"the hub refuses the token of this machine for {model}. Set HF_TOKEN anew.")
        case "unnamed":
            return SetupError(
                f"model {model} is not in the local cache, and only the run's folder names it: kvbench downloads "
                f"nothing that a folder asks for. Give --model {shlex.quote(name)} again, or download it first."
            )
        case "unreachable" if hub.is_offline():
            return SetupError(
                f"cannot reach the hub and {model} is not in the local cache: HF_HUB_OFFLINE is set, so the hub is "
                "not asked. Unset it, or give a local folder (--model PATH)."
            )
        case "unreachable":
            return SetupError(
                f"cannot reach the hub and {model} is not in the local cache. Try again, or give a local folder "
                "(--model PATH), or HF_HUB_OFFLINE=1 with a cached model."
            )
    return None


def located(name: str, revision: str | None = None) -> ModelInfo:
    """`describe`, after the hub was asked for a model that is not whole in the local cache; its configuration is then.

    Raises SetupError when it cannot be had or has no weights that are loaded.
    """
    info = describe(name, revision)
    if info.folder is None or info.where != str(info.folder):
        info = _asked(info, revision)
    return info


def fetched(name: str, revision: str | None = None) -> ModelInfo:
    """`located`. Raises SetupError also for a model that works only with code from its repository."""
    info = located(name, revision)
    if info.config.get("auto_map"):
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if info.model_type not in CONFIG_MAPPING_NAMES:
            raise _own_code(info.name)
    return info


@contextlib.contextmanager
def reading(name: str, where: str) -> Iterator[None]:
    """Tell in one line what transformers' code raises within the block, which reads a model; it raises what it likes.

    Raises SetupError.
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
    """The model after the hub has told its files and its configuration is here."""
    name = info.name
    import huggingface_hub

    hub.hush()
    try:
        files = hub.ask("model", name, revision).files
        if "config.json" in files:
            huggingface_hub.hf_hub_download(name, "config.json", revision=revision)
    except Exception as error:  # of many kinds, see `kvbench.sources.hub.why`
        reason = error.why if isinstance(error, hub.HubError) else hub.why(error)
        if reason == "unreachable" and info.folder is not None:
            return info  # transformers tells whether what is here is enough
        raise _refusal(name, reason, revision) or unreadable(name, name, error) from None
    _check_files(name, files)
    return describe(name, revision)


def _check_files(name: str, files: tuple[str, ...]) -> None:
    """The list of a hub model's files, as `_local` checks a folder's."""
    if "config.json" not in files:
        raise SetupError(f"{show(name)} has no config.json on the hub; it is not a model of transformers.")
    top = [Path(file) for file in files if "/" not in file]
    if not any(path.suffix == ".safetensors" for path in top):
        raise _no_weights(name, top)


@dataclass(frozen=True, slots=True)
class State:
    """One state of a model. `files` has a hash for each file of a local folder; a hub model is named by its commit."""

    revision: str | None
    files: Mapping[str, str] = field(default_factory=dict)


def state(info: ModelInfo) -> State:
    """What tells one state of a model from another: the hub's commit, or hashes of all files that decide its tokens.

    `kvbench.sources.model_files` says which files these are, and what is read of large ones. A hub model in the local
    cache is taken to be what its commit says.
    """
    if info.folder is None or info.commit is not None:
        return State(info.commit)
    files = model_files.hashes(info.folder)
    return State(model_files.combined(files), files)


def revision(info: ModelInfo) -> str | None:
    """The commit, or one hash over the files, of `state`; None while it is unknown."""
    return state(info).revision


def _weights(folder: Path) -> list[Path]:
    """The model's own weights."""
    return [path for path in sorted(folder.glob("*.safetensors")) if not model_files.is_of_a_method(path)]


def check_weights(name: str, folder: Path) -> None:
    """Weights must be there, as safetensors, and whole. Raises SetupError."""
    files = _weights(folder)
    if not files:
        raise _no_weights(name, sorted(folder.iterdir()))
    if lacking := _lacking(folder):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise SetupError(f"{show(name)} lacks weights that its index names: {lacking[0]}{more}. Download it again.")
    for path in files:
        size = path.stat().st_size
        expected = _safetensors_size(path)
        if expected is None or size < expected:
            says = (
                "its header cannot be read"
                if expected is None
                else f"header says {expected:,} bytes, file has {size:,}"
            )
            raise SetupError(f"{path.name} is damaged ({says}). Download it again.")


def _no_weights(name: str, files: Sequence[Path]) -> SetupError:
    if pickles := [path.name for path in files if path.suffix in (".bin", ".pt", ".pth")]:
        return SetupError(f"{show(name)} has only pickle weights ({pickles[0]}). {_CONVERT}")
    return SetupError(f"{show(name)} has no weights (*.safetensors).")


def _lacking(folder: Path) -> list[str]:
    """Weight files that should be in a folder and are not."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if _weights(folder) else ["model.safetensors"]
    named = _json(index).get("weight_map")
    files = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    return [file for file in files if not (folder / file).is_file()]


def _safetensors_size(path: Path) -> int | None:
    """Bytes the file must have by its own header; None when the header is broken."""
    with path.open("rb") as file:
        found = model_files.tensors(file)
    return None if found is None else max((end for _, end in found[1]), default=found[0])


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a hub model in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _config(path: Path) -> dict[str, Any]:
    """A config.json, with what is read of it in its type. Raises SetupError."""
    config = _json(path)
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise _wrong(path, "text_config", text, "an object")
    for part in (config, text or {}):
        for name in _SIZES:
            if (size := part.get(name)) is not None and not (type(size) is int and size >= 0):
                raise _wrong(path, name, size, "a whole number")
    return config


def _wrong(path: Path, name: str, value: object, kind: str) -> SetupError:
    return SetupError(f"{show(path)}: {name} is {show(json.dumps(value))}, not {kind}. Download the model again.")


def _json(path: Path) -> dict[str, Any]:
    try:
        data = lenient(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{show(path)} cannot be read as JSON ({error}).") from None
    if not isinstance(data, dict):
        raise SetupError(f"{show(path)} holds no JSON object.")
    return data
