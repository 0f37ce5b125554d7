"""Hashes the files in a model's folder that affect which tokens the model generates. No torch, no transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
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
TEMPLATES = "additional_chat_templates"  # the only subfolder that transformers reads
_NOT_READ_FOR_PROMPTS = ("*.safetensors", "*.index.json", "adapter_*", "generation_config*")
WHOLE = 64 << 20  # bytes; larger weight files are hashed in parts
CHECKPOINT = "checkpoint.safetensors"  # of a training
BLOCK = 4096
BLOCKS = 1024  # blocks to hash per large file, divided among its tensors
LEAST = 3  # fewest blocks to hash per tensor: its start, middle and end
_LONGEST_HEADER = 100_000_000
_LARGEST = 1 << 60  # a header with an offset beyond this many bytes is broken

Span = tuple[int, int]  # a tensor's byte range in its file: start, end


def names(folder: Path) -> list[str]:
    """Return the names of the files that transformers may read from a model's folder, sorted.

    These are the files that match `PATTERNS`, and the chat templates in `TEMPLATES`. Other files, such as notes, logs
    and pickles, are left out: they do not affect tokens, so a change in them must not stop a run. A method's weights
    (with a card beside them) are left out too, because they do not belong to the model.
    """
    top = [path.name for path in folder.iterdir() if path.is_file() and not is_of_a_method(path)]
    chosen = [name for name in top if any(fnmatchcase(name, pattern) for pattern in PATTERNS)]
    templates = (f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))
    return sorted([*chosen, *templates])


def is_of_a_method(path: Path) -> bool:
    """Return whether a safetensors file in a model's folder does not belong to the model: it holds a method's weights
    (a card, NAME.json, lies beside it), or it is the checkpoint of a training that had this folder as --out."""
    return path.suffix == ".safetensors" and (path.with_suffix(".json").is_file() or path.name == CHECKPOINT)


def makes_prompts(name: str) -> bool:
    """Return whether a file may change the text or tokens of a prompt (weights, for example, do not)."""
    return not any(fnmatchcase(name, pattern) for pattern in _NOT_READ_FOR_PROMPTS)


def hashes(folder: Path) -> dict[str, str]:
    """Return {file name: hash} of the files that `names` lists. Raises SetupError if a file cannot be read.

    For a file of up to `WHOLE` bytes, the hash is its SHA-256. For a larger file, the hash covers only the file's size
    and parts of its content. In a safetensors file, these parts are the header and some blocks of every tensor, evenly
    spaced from the tensor's first to its last byte. In any other file, they are blocks that are evenly spaced over the
    file. These hashes detect a tensor that was trained further, merged or replaced, but not changes that lie only
    between the blocks.
    """
    return {name: file_hash(folder / name) for name in names(folder)}


def combined(files: Mapping[str, str]) -> str:
    """Return one hash, of 16 hex digits, over the names and hashes in `files`."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def tensors(file: BinaryIO) -> tuple[int, list[Span]] | None:
    """Return the offset at which the data of a safetensors file begin, and each tensor's byte range; None if its header
    is broken."""
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
    """Return whether two values are valid offsets of a tensor's first byte and of the byte after its last.
    `model_weights.check` reports a file that ends before its last offset."""
    return type(start) is int and type(end) is int and 0 <= start <= end <= _LARGEST


def file_hash(path: Path) -> str:
    """Return a file's hash as `hashes` does. Raises SetupError if it cannot be read."""
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
    """Yield the offset of each block to hash: all blocks of a small tensor, some blocks of a large tensor. spans: the
    byte range of each tensor.

    Of a large tensor, an odd number of blocks is hashed, so that one block is in its middle.
    """
    most = max(LEAST, BLOCKS // max(1, len(spans))) | 1
    for start, end in sorted(spans):
        length = end - start
        if length <= most * BLOCK:
            yield from range(start, end, BLOCK)
        else:
            yield from (start + (length - BLOCK) * i // (most - 1) for i in range(most))
