"""Weights and tables that methods need: one safetensors file, and beside it a JSON card that names their model.

A file fits a model if the card has the same `FIELDS` as the model's configuration and the same fingerprint
(`kvbench.engine.model.fingerprint`) as the model. If the card or the model has no fingerprint, only the fields are
compared. For example, the card of imported weights has no fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from kvbench import __version__, tiny
from kvbench.errors import SetupError, UserError, bare, counted, quote
from kvbench.eviction.api import Weights
from kvbench.eviction.learned import LearnedWeights
from kvbench.sources.models import TINY
from kvbench.store.files import reason, replacing

FORMAT = "kvbench-weights/1"
OTHERS = "Give weights that were made for this model and these options."
HEADS = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
FIELDS = ("model_type", "num_hidden_layers", *HEADS, "vocab_size")
# Kind of table -> tensor -> configuration fields that give the tensor's shape. Axis 0 also has elements for layers that
# no method evicts, so that an element's index is its layer's index.
TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "headkv": {"importance": ("num_hidden_layers", "num_attention_heads")},
    "duo": {"alpha": ("num_hidden_layers", "num_key_value_heads")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that weights are made for; `save_weights` writes it into their card."""

    name: str  # as on the command line
    config: Any  # a configuration that `model_fields` reads
    fingerprint: str | None = None  # None if only the configuration was available, not the parameters


def model_fields(config: Any) -> dict[str, Any]:
    """Return the `FIELDS` of a transformers configuration or a parsed ``config.json``, by name.

    The fields are read from the configuration's part for the text model if there is one. A missing field is None, with
    two exceptions. A missing number of KV heads is the number of query heads. A missing head dimension is the hidden
    size divided by the number of query heads.
    """
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    elif config.get("text_config"):
        config = config["text_config"]
    get = config.get if isinstance(config, Mapping) else partial(_attribute, config)
    found = {name: get(name) for name in FIELDS}
    heads = found["num_attention_heads"]
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = heads
    if found["head_dim"] is None and heads:
        found["head_dim"] = (found["hidden_size"] or 0) // heads
    return found


def model_sizes(config: Any) -> dict[str, Any]:
    """Return the `model_fields` and, if the configuration has it, `word_embed_proj_dim`: the width of the embeddings
    where it differs from the hidden size."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config.get("text_config") or config
    get = text.get if isinstance(text, Mapping) else partial(_attribute, text)
    width = get("word_embed_proj_dim")
    return model_fields(config) | ({} if width is None else {"word_embed_proj_dim": width})


def _attribute(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises it for a field that differs between layers
        return None


def config_hash(config: Any) -> str:
    """Return the SHA-256 over `model_fields`."""
    return hashlib.sha256(json.dumps(model_fields(config), sort_keys=True).encode()).hexdigest()


def save_weights(
    path: Path, kind: str, tensors: Mapping[str, torch.Tensor], base: Base, *, made: Mapping[str, Any]
) -> dict[str, Any]:
    """Write a file of weights in float32 and its card; return the card. made: the card's facts on how the weights were
    made. Raises SetupError when a file cannot be written."""
    data = save({name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()})
    card = {
        "format": FORMAT,
        "kind": kind,
        "base_model": base.name,
        "model": model_fields(base.config),
        "config_sha256": config_hash(base.config),
        "fingerprint": base.fingerprint,
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "sha256": hashlib.sha256(data).hexdigest(),
        "kvbench": __version__,
        "made": dict(made),
    }
    try:
        for target, content in ((path, data), (card_path(path), (json.dumps(card, indent=2) + "\n").encode())):
            with replacing(target) as file:
                file.write(content)
            target.chmod(0o644)
    except OSError as error:
        raise SetupError(f"{quote(error.filename or path)} cannot be written: {reason(error)}.") from error
    return card


def load_weights(
    weights: Weights,
    model_folder: Path | None,
    config: Any,
    device: torch.device | str,
    fingerprint: str | None = None,
    layers: Collection[int] = (),
) -> dict[str, torch.Tensor]:
    """Return the tensors of a method's weights in float32.

    model_folder, config, fingerprint: those of the model on which the method runs; if `fingerprint` is None,
    fingerprints are not compared. layers: the layers that the method will evict.

    Raises:
        SetupError: the file or its card is missing, unreadable or damaged, or does not fit the model or the method's
            options.
        UserError: the method needs trained weights, no path was given, and the model's folder has none. Or the card
            says that the weights were trained in some layers only, and `layers` has others.
    """
    path = find(weights, model_folder, _name(config, model_folder))
    card = read_card(path)
    try:
        data = path.read_bytes()
        tensors = load(data)
    except OSError as error:
        raise SetupError(f"weights {quote(path)} cannot be read: {reason(error)}. Check permissions.") from None
    except SafetensorError as error:
        raise SetupError(f"weights {quote(path)} {_damage(data, error)}") from None
    if hashlib.sha256(data).hexdigest() != card.get("sha256"):
        raise SetupError(
            f"weights {quote(path)} do not belong to the card {quote(card_path(path).name)}: their hash is not the "
            "card's. Copy both files again."
        )
    _check(path, weights, card, tensors, config)
    if fingerprint and card.get("fingerprint") not in (None, fingerprint):
        raise SetupError(
            f"weights {quote(path)} were made for {quote(card.get('base_model'))}, whose parameters differ from this "
            "model's. Train new weights. To use these weights nevertheless, copy the file and its card, and set "
            "'fingerprint' in the copied card to null."
        )
    _check_layers(path, card, layers)
    return {name: tensor.float().to(device) for name, tensor in tensors.items()}


def find(weights: Weights, model_folder: Path | None, model: str = "MODEL") -> Path:
    """Return the path of the weights that a method needs. model: the model's name, for the error text. Raises an error
    when the file is missing: UserError if the weights must be trained and no path was given, else SetupError."""
    file = f"{weights.kind}.safetensors"
    if weights.path == "auto":
        path = None if model_folder is None else model_folder / file
    else:
        path = Path(weights.path).expanduser()
        path = path / file if path.is_dir() else path
    if path is not None and path.is_file():
        return path
    missing = f"there is no {file} beside {quote(model)}" if path is None else f"{quote(path)} does not exist"
    command = f"'kvbench train {weights.recipe} --model {bare(model)} --out DIR'"
    if isinstance(weights, LearnedWeights) and weights.path == "auto":
        how = f", which {command} makes" if weights.recipe else ""
        raise UserError(
            f"method {quote(weights.kind)} needs trained {weights.what} weights; "
            f"give --method-opt {weights.kind}.{weights.option}=PATH{how}. None is bundled for {quote(model)}."
        )
    how = f" {command} makes them." if weights.recipe else ""
    raise SetupError(f"weights {quote(weights.kind)} are missing: {missing}.{how}")


def card_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _damage(data: bytes, error: SafetensorError) -> str:
    """Return why the file's bytes `data` are no readable safetensors, as the end of the message "weights PATH ..."."""
    if data[:1] == b"\x80" or data[:4] == b"PK\x03\x04":  # torch.save's format before and since torch 1.6
        return "are a pickle, which kvbench does not open; save the tensors as safetensors."
    why = str(error).rpartition("deserializing: ")[2].partition(": ")[0]
    return f"are no safetensors file, or a damaged one of {len(data):,} bytes ({why}). Make or copy them again."


def _name(config: Any, folder: Path | None) -> str:
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    return TINY if folder == tiny.path() else str(get("_name_or_path", None) or folder or "MODEL")


def read_card(weights: Path) -> dict[str, Any]:
    """Return the card of a file of weights. Raises SetupError if the card is missing, unreadable or damaged."""
    path = card_path(weights)
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SetupError(f"the weights have no card: there is no {quote(path)}. Copy both files.") from None
    except (OSError, ValueError) as error:
        raise SetupError(
            f"the card {quote(path)} of the weights cannot be read ({error}). Copy it again, or check its permissions."
        ) from None
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        raise SetupError(f"{quote(path)} is no card of format {FORMAT}. Copy the card of these weights again.")
    return card


def _check(path: Path, weights: Weights, card: dict[str, Any], tensors: dict[str, torch.Tensor], config: Any) -> None:
    kind = weights.kind
    if card.get("kind") != kind:
        raise SetupError(
            f"weights {quote(path)} are of kind {quote(card.get('kind'))}, but the method needs kind {quote(kind)}. "
            "Give weights of that kind."
        )
    theirs, ours = card.get("model"), model_fields(config)
    if not isinstance(theirs, dict):
        raise SetupError(f"the card of weights {quote(path)} names no model. Copy the card again.")
    if isinstance(weights, LearnedWeights) and _heads(theirs) != _heads(ours):
        (a, b), (c, d) = _heads(theirs), _heads(ours)
        what = f"{weights.what} weights {quote(path)}"
        raise SetupError(f"{what} are for {a} layers x {b} KV heads; the model has {c} x {d}. {OTHERS}")
    for name, value in ours.items():
        if theirs.get(name) != value:
            other = quote(card.get("base_model"))
            raise SetupError(
                f"weights {quote(path)} were made for another model, {other}: "
                f"its {name} is {quote(theirs.get(name))}, here it is {quote(value)}. {OTHERS}"
            )
    if card.get("config_sha256") != config_hash(config):
        raise SetupError(
            f"the card of weights {quote(path)} was changed: its configuration hash does not match its other fields. "
            "Copy the card again."
        )
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wanted = {name: [ours[field] for field in fields] for name, fields in TABLES.get(kind, {}).items()}
    for expected in (card.get("shapes"), wanted or shapes):
        if shapes != expected:
            raise SetupError(
                f"weights {quote(path)} have shapes {quote(shapes)} instead of {quote(expected)}. "
                "Copy the file and its card again."
            )
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor.float()).all()):
            raise SetupError(
                f"weights {quote(path)}: {quote(name)} holds numbers that are not finite. "
                "Copy the file again, or train new weights."
            )
    if isinstance(weights, LearnedWeights) and (why := weights.check(tensors, model_sizes(config))):
        raise SetupError(f"{weights.what} weights {quote(path)} do not fit: {why}. {OTHERS}")


def _check_layers(path: Path, card: Mapping[str, Any], layers: Collection[int]) -> None:
    """Raise UserError if the weights are untrained in one of `layers`, SetupError if the card's list of trained layers
    is damaged. Layers whose sliding window was shorter than a text of the training are untrained. If a card has no such
    list, all layers count as trained."""
    trained = card["made"].get("layers") if isinstance(card.get("made"), Mapping) else None
    if trained is None:
        return
    if not isinstance(trained, list) or not all(isinstance(layer, int) for layer in trained):
        raise SetupError(
            f"the card of weights {quote(path)} is damaged: its trained layers are no list of numbers. Copy the card "
            "again."
        )
    if missing := sorted(set(layers) - set(trained)):
        raise UserError(
            f"weights {quote(path)} are untrained in {counted(len(missing), 'layer')} that the method would evict (the "
            f"first is layer {missing[0]}): their sliding windows hold every sequence, but not the longest text of the "
            "training. Use longer sequences (--max-new-tokens; max_tokens of EvictionCache), or weights that were made "
            "with shorter texts."
        )


def _heads(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    return fields.get("num_hidden_layers"), fields.get("num_key_value_heads")
