"""The files of a model's folder that decide its tokens, each with a hash.

    found = hashes(folder)      # {"config.json": "1f0c...", "model.safetensors": "9a41...", ...}
    combined(found)             # 16 hex digits for all of them

No torch, no transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from kvbench.errors import SetupError, quote
from kvbench.store.strict_json import parse

PATTERNS = (
    *("*config*.json", "*.index.json", "*.safetensors", "adapter_*"),
    *("tokenizer*", "*vocab*", "*merges*", "*tokens*.json", "tekken.json", "chat_template*"),
    *("*.model", "*.spm", "*.tiktoken", "*.tokenizer", "*.codes", "dict.txt"),
    *("byte_maps.json", "emoji.json", "normalizer.json", "word_*.json"),
)
TEMPLATES = "additional_chat_templates"  # a folder: the only one that transformers looks into
_NOT_READ_FOR_PROMPTS = ("*.safetensors", "*.index.json", "adapter_*", "generation_config*")
WHOLE = 64 << 20  # bytes; a larger file of weights is sampled
BLOCK = 4096
BLOCKS = 1024  # of a sampled file, shared by its tensors
LEAST = 3  # blocks of each tensor: its start, middle and end
_LONGEST_HEADER = 100_000_000
_LARGEST = 1 << 60  # bytes of a file, beyond which its header is no header

Span = tuple[int, int]  # bytes of a tensor in its file: start, end


def names(folder: Path) -> list[str]:
    """The files that transformers may read from a model's folder, sorted.

    Patterns choose them, because notes, logs, pickles and results of other tools in the folder change no token and must
    not stop a run. Weights of a method, with a card of the same name beside them, are not the model's.
    """
    top = [path.name for path in folder.iterdir() if path.is_file() and not is_of_a_method(path)]
    chosen = [name for name in top if any(fnmatchcase(name, pattern) for pattern in PATTERNS)]
    templates = (f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))
    return sorted([*chosen, *templates])


def is_of_a_method(path: Path) -> bool:
    """Whether a safetensors file holds a method's weights: a card of the same name lies beside it."""
    return path.suffix == ".safetensors" and path.with_suffix(".json").is_file()


def makes_prompts(name: str) -> bool:
    """Whether a file may change the text or tokens of a prompt, as weights, for example, do not."""
    return not any(fnmatchcase(name, pattern) for pattern in _NOT_READ_FOR_PROMPTS)


def hashes(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
    """A hash of each wanted file of `names`. Raises SetupError when a file cannot be read.

    Up to `WHOLE` bytes the hash is the file's SHA-256. Of a larger safetensors file it covers size, header and blocks
    of every tensor, evenly spaced from its first to its last byte. This detects a tensor that was
    trained on, merged or replaced, but not a change of single bytes between the blocks of a large file.
    """
    return {name: _hash(folder / name) for name in names(folder) if wanted(name)}


def combined(files: Mapping[str, str]) -> str:
    """One hash of 16 hex digits over names and hashes of files."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def tensors(file: BinaryIO) -> tuple[int, list[Span]] | None:
    """The offset of the data in a safetensors file, and the byte range of each tensor; None for a broken header."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _LONGEST_HEADER:
        return None
    try:
        header = parse(file.read(length))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        spans = [(8 + length + start, 8 + length + end) for start, end in offsets if _is_span(start, end)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (8 + length, spans) if len(spans) == len(offsets) else None


def _is_span(start: object, end: object) -> bool:
    """Whether these are valid offsets. `model_weights.check` reports a file that ends before them."""
    return type(start) is int and type(end) is int and 0 <= start <= end <= _LARGEST


def _hash(path: Path) -> str:
    try:
        return _content_hash(path)
    except OSError as error:
        raise SetupError(f"{quote(path)} cannot be read ({error.strerror}).") from error


def _content_hash(path: Path) -> str:
    with path.open("rb") as file:
        if (size := path.stat().st_size) <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"sampled {size}".encode())
        data, spans = tensors(file) or (0, [(0, size)])
        file.seek(0)
        digest.update(file.read(data))
        for start in _blocks(spans):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _blocks(spans: list[Span]) -> Iterator[int]:
    """Offsets of the blocks of every tensor: an odd number each, so that one lies in the middle of the tensor."""
    most = max(LEAST, BLOCKS // max(1, len(spans))) | 1
    for start, end in sorted(spans):
        length = end - start
        if length <= most * BLOCK:
            yield from range(start, end, BLOCK)
        else:
            yield from (start + (length - BLOCK) * i // (most - 1) for i in range(most))
