"""Finds a model and reads what its folder says, without torch and without weights.

    describe("tiny"), describe("./folder"), describe("org/name")  ->  ModelInfo
    revision(info)                                                ->  commit or hash of the weights

A value that looks like a path is never sent to the hub. For a hub name only the local cache is looked at: what is not
there is unknown (None) until the engine loads the model. Damaged and pickled weights are found before any loading.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, UserError, show

TINY = "tiny"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
UNREACHABLE = {
    "ConnectionError",
    "OfflineModeIsEnabled",
    "ConnectError",
    "TimeoutException",
    "LocalEntryNotFoundError",
    "gaierror",
}  # class names of the libraries that talk to the hub
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model as far as its folder tells. `folder` is None for a hub model that is not in the local cache."""

    name: str
    folder: Path | None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def context(self) -> int | None:
        """Longest sequence the model was made for, in tokens."""
        text = self.config.get("text_config")
        value = self.config.get("max_position_embeddings") or (text or {}).get("max_position_embeddings")
        return int(value) if value else None

    @property
    def group(self) -> int | None:
        """Query heads that share a KV head; None when it is unknown."""
        text = self.config.get("text_config") or self.config
        query, kv = text.get("num_attention_heads"), text.get("num_key_value_heads")
        return int(query) // int(kv) if query and kv else None

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
    return name.startswith((".", "/", "~")) or "\\" in name or Path(name).is_dir()


def describe(name: str, revision: str | None = None) -> ModelInfo:
    """Raises SetupError when a local model cannot be used, UserError when the name is no name."""
    if name == TINY:
        from kvbench import tiny

        return _local(name, tiny.path())
    if is_path(name):
        folder = Path(name).expanduser()
        if not folder.exists():
            raise SetupError(f"model folder {show(name)} does not exist.")
        if not folder.is_dir():
            raise SetupError(f"{show(name)} is a file; --model takes a folder or a hub name.")
        return _local(name, folder)
    if not _HUB_NAME.fullmatch(name):
        raise UserError(f"{show(name)} is neither a folder nor a hub name like 'org/model'.")
    cached = _cached(name, revision)
    return ModelInfo(name=name, folder=cached, config=_json(cached / "config.json") if cached else {})


def _local(name: str, folder: Path) -> ModelInfo:
    if not (folder / "config.json").is_file():
        raise SetupError(f"{show(name)} has no config.json; it is not a model folder.")
    check_weights(name, folder)
    return ModelInfo(name=name, folder=folder, config=_json(folder / "config.json"))


def check_tokenizer(name: str, folder: Path) -> None:
    """A tokenizer must be there: transformers makes an empty one for some models where it is not. Raises SetupError."""
    if not any((folder / file).is_file() for file in TOKENIZERS):
        raise SetupError(
            f"model {show(name)}: it has no tokenizer files ({TOKENIZERS[0]}). Copy them beside its weights."
        )


def unreadable(name: str, where: str, error: Exception) -> SetupError:
    """The line for a model whose tokenizer or configuration transformers cannot load."""
    about = f"model {show(name)}"
    if not Path(where).is_dir():
        chain: list[BaseException] = [error]
        while (link := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
            chain.append(link)
        kinds = {base.__name__ for e in chain for base in type(e).__mro__}
        if "GatedRepoError" in kinds:
            return SetupError(f"{about} is gated: accept the terms on its page and set HF_TOKEN.")
        if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
            return SetupError(
                f"the hub has no {about}, or not that --revision (or it is private and HF_TOKEN not set)."
            )
        if kinds & UNREACHABLE or "connect to" in str(error):
            return SetupError(
                f"{about} is not on this machine and the hub is unreachable. Give a local folder with --model, or "
                "fetch it on a connected machine; HF_HUB_OFFLINE=1 then uses the cached copy without asking the hub."
            )
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SetupError(f"{about} cannot be read: {reason}")


def fetched(name: str) -> ModelInfo:
    """`describe`, after the configuration of a hub model was fetched, so that its commit is known.

    Raises SetupError when it cannot be read.
    """
    info = describe(name)
    if info.folder is not None:
        return info
    import transformers

    try:
        transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise unreadable(name, name, error) from error
    return describe(name)


def revision(info: ModelInfo) -> str | None:
    """What tells one state of a model from another: the hub commit, or for a local folder a hash of its weights.

    The hash covers the configuration and of each weight file the header, the size and 64 blocks spread over it, so
    that it takes no longer for a large model than for a small one.
    """
    if info.folder is None:
        return None
    if info.folder.parent.name == "snapshots":
        return info.folder.name
    digest = hashlib.sha256((info.folder / "config.json").read_bytes())
    for path in _weights(info.folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for block in range(64):
                file.seek(size * block // 64)
                digest.update(file.read(65536))
    return digest.hexdigest()[:16]


def _weights(folder: Path) -> list[Path]:
    """The model's own files; a method's table beside them has a card of its name."""
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.with_suffix(".json").is_file()]


def check_weights(name: str, folder: Path) -> None:
    """Weights must be there, as safetensors, and whole. Raises SetupError."""
    files = _weights(folder)
    if not files:
        if pickles := [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]:
            raise SetupError(
                f"{show(name)} has only pickle weights ({pickles[0].name}). kvbench loads safetensors only; convert."
            )
        raise SetupError(f"{show(name)} has no weights (*.safetensors).")
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


def _safetensors_size(path: Path) -> int | None:
    """Bytes the file must have by its own header; None when the header is broken."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= 100_000_000:
            return None
        try:
            header = json.loads(file.read(length))
            return 8 + length + max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a hub model in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{show(path)} cannot be read as JSON ({error}).") from None
    if not isinstance(data, dict):
        raise SetupError(f"{show(path)} holds no JSON object.")
    return data
