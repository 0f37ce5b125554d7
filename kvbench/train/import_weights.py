"""Converts published networks that score cache entries into kvbench's weights files, without running published code.

The networks are the gates of `trimkv` and `retention`, the scorers of `foresightkv`, and the surrogates of `kvzap`. The
module reads safetensors files, and pickle files by `torch.load(weights_only=True)`, which creates tensors only. From a
checkpoint of a whole model it keeps only the tensors of these networks.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvbench.engine.model.weights import Base, model_fields, save_weights
from kvbench.errors import SetupError, UserError, quote
from kvbench.eviction.learned import Sizes, misfit
from kvbench.eviction.terms import published_checkpoints
from kvbench.eviction.terms.foresight import COUNT, Features, scorer_shapes
from kvbench.eviction.terms.gates import Gate, form_of
from kvbench.eviction.terms.published_checkpoints import Layers
from kvbench.eviction.terms.surrogate import surrogate_misfit

MODULES = {"foresightkv": published_checkpoints.SCORER, "kvzap": published_checkpoints.SURROGATE}
PICKLES = (".pth", ".pt", ".bin")


@dataclass(frozen=True, slots=True)
class Imported:
    """The weights file that an import wrote, its card, and the options with which a method can use the file."""

    path: Path
    card: dict[str, Any]
    options: dict[str, str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint: the tensors of each layer's gate, scorer or surrogate, the files that hold them, and the
    checkpoint's configuration ({} if it has none)."""

    layers: Layers
    files: list[Path]
    config: dict[str, Any]


def import_weights(
    source: Path, kind: str, config: Mapping[str, Any], base_model: str, folder: Path, gate: Gate | None = None
) -> Imported:
    """Convert the gates, scorers or surrogates of a published checkpoint; write them and their card to `folder`.

    Args:
        source: a file, or a folder with files and perhaps a ``config.json``.
        kind: trimkv, retention, foresightkv or kvzap.
        config: the ``config.json`` of the model for which the checkpoint was made; base_model: the model's name.
        gate: the kind of gate; needed if the tensors' names and sizes and the checkpoint's configuration leave it open.
            A given kind overrides that of the checkpoint's configuration.

    Raises SetupError when the source cannot be read or holds no weights for this model. Raises UserError when `gate` is
    needed but not given.
    """
    module = MODULES.get(kind, published_checkpoints.GATE)
    checkpoint, model = read(source, module), model_fields(config)
    options: dict[str, str] = {}
    if module == published_checkpoints.SCORER:
        tensors, options = _scorer(checkpoint, model)
        about: dict[str, Any] = dict(options)
    elif module == published_checkpoints.SURROGATE:
        tensors, about = _surrogate(checkpoint, model)
    else:
        tensors, options, about = _gates(checkpoint, model, gate)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in checkpoint.files}
    made = {"how": "imported", "files": files, **about}
    path = folder / f"{kind}.safetensors"
    return Imported(path, save_weights(path, kind, tensors, Base(name=base_model, config=config), made=made), options)


def read(source: Path, module: str) -> Checkpoint:
    """Read the tensors of the gate, the scorer or the surrogate in every layer of a checkpoint.

    module: the name of the module to read, `GATE`, `SCORER` or `SURROGATE` of `published_checkpoints`. Raises
    SetupError when the source cannot be read, or when its tensors are missing or damaged.
    """
    if not source.exists():
        raise SetupError(f"{quote(source)} does not exist; give a file or a folder.")
    folder = source if source.is_dir() else source.parent
    candidates = [source] if source.is_file() else _candidates(folder)
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    used = []
    for file in candidates:
        part = _safetensors(file, module) if file.suffix == ".safetensors" else _pickle(file, module)
        if part:
            used.append(file)
            tensors |= part
    if not tensors:
        where = "layers.N" if module == published_checkpoints.SURROGATE else f"...layers.N.self_attn.{module}..."
        raise SetupError(f"{quote(source)} holds no tensors named '{where}'; give another file.")
    layers = _layers(source, module, tensors)
    for i, layer in enumerate(layers):
        if {n: t.shape for n, t in layer.items()} != {n: t.shape for n, t in layers[0].items()}:
            raise SetupError(
                f"{quote(source)}: the tensors of layer {i} differ in names or shapes from those of layer 0; "
                "the checkpoint is damaged. Download it again."
            )
    return Checkpoint(layers, used, _config(folder / "config.json"))


def _layers(source: Path, module: str, tensors: Mapping[tuple[int, str], torch.Tensor]) -> Layers:
    """Group the tensors by layer, in float32. Raises SetupError for a missing layer, and for a tensor that is sparse or
    has a wrong number of dimensions."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for (at, name), tensor in tensors.items():
        if tensor.layout != torch.strided or published_checkpoints.dimensions(module, name) not in (None, tensor.dim()):
            raise SetupError(
                f"{quote(source)}: tensor {quote(name)} of layer {at} (shape {list(tensor.shape)}) is sparse or has a "
                "wrong number of dimensions; the checkpoint is damaged. Download it again."
            )
        layers.setdefault(at, {})[name] = tensor.float()
    lacking = [i for i in range(len(layers)) if i not in layers]
    if lacking:
        raise SetupError(
            f"{quote(source)}: layer {max(layers)} has tensors, but layer {lacking[0]} has none; "
            "the checkpoint is incomplete. Download it again."
        )
    return [layers[i] for i in range(len(layers))]


def _candidates(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder; if it has none, its pickle files. Raises SetupError if it has
    neither."""
    files = sorted(folder.glob("*.safetensors")) or sorted(f for f in folder.iterdir() if f.suffix in PICKLES)
    if not files:
        endings = ", ".join((".safetensors", *PICKLES))
        raise SetupError(f"{quote(folder)} holds no file that ends in one of {endings}; give another folder.")
    return files


def _safetensors(file: Path, module: str) -> dict[tuple[int, str], torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            names = published_checkpoints.wanted(opened.keys(), module)
            return {place: opened.get_tensor(name) for name, place in names.items()}
    except (OSError, SafetensorError) as error:
        raise SetupError(
            f"{quote(file)} cannot be read ({error}). Check its permissions, or download it again."
        ) from None


def _pickle(file: Path, module: str) -> dict[tuple[int, str], torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # a pickle is a program and may raise anything
        raise SetupError(f"{quote(file)} {_refused(error)}. kvbench ran no code from it; give another file.") from None
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping):
        raise SetupError(f"{quote(file)} holds no dictionary of named tensors; give another file.")
    tensors = {name: x for name, x in loaded.items() if isinstance(name, str) and isinstance(x, torch.Tensor)}
    return {place: tensors[name].clone() for name, place in published_checkpoints.wanted(tensors, module).items()}


def _refused(error: Exception) -> str:
    """Return why torch could not read a pickle file. The returned text replaces torch's own message, which advises the
    user to run the code in the file."""
    if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"holds more than tensors (it calls {quote(match[1])})"
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return f"is damaged or holds more than tensors ({type(error).__name__})"


def _config(file: Path) -> dict[str, Any]:
    """Return the configuration in a checkpoint's ``config.json``, or {} if it cannot be read. In the configuration of a
    vision-language model, the fields of its text model take precedence."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _gates(
    checkpoint: Checkpoint, model: Sizes, gate: Gate | None
) -> tuple[dict[str, torch.Tensor], dict[str, str], dict[str, Any]]:
    layer, config = checkpoint.layers[0], checkpoint.config
    kinds = published_checkpoints.gate_kinds(layer)
    if not kinds:
        raise SetupError(f"the tensors {', '.join(sorted(layer))} are not those of a known gate. Give another file.")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise SetupError(f"the gate's activation is {quote(activation)}; only silu gates are supported.")
    _same_heads("gate", len(checkpoint.layers), len(layer["bias"]), model)
    if len(kinds) > 1:
        stated = (gate, config.get("retention_gate"))
        kinds = [kind for name in stated for kind in kinds if kind == name][:1] or _by_size(layer, model)
    if len(kinds) > 1:
        raise UserError(
            "the kind of gate is ambiguous: rg reads hidden states, rg2 reads keys and values, and the size of the "
            "gate's input fits both. Give --gate rg or --gate rg2."
        )
    tensors = published_checkpoints.gates(checkpoint.layers, kinds[0])
    form = form_of(tensors)
    assert form is not None
    if why := misfit(tensors, form.shapes(model)):
        raise SetupError(f"gate weights do not fit the model: {why}. Give weights that were trained for this model.")
    about = {"gate": form.gate, "tie": form.tie, "width": form.width}
    about |= {name: config[name] for name in ("base_model", "memory_size", "global_capacity") if name in config}
    return tensors, {}, about


def _by_size(layer: Mapping[str, torch.Tensor], model: Sizes) -> list[Gate]:
    """Return the kinds of gate whose input size in this model equals that of the tensors. Raises SetupError if there is
    none."""
    inputs = layer["linear1.weight"].shape[1]
    sizes: dict[Gate, int] = {
        "rg": model["hidden_size"],
        "rg2": 2 * model["num_key_value_heads"] * model["head_dim"],
    }
    if inputs not in sizes.values():
        wanted = " or ".join(f"{size} ({gate})" for gate, size in sizes.items())
        raise SetupError(
            f"gate weights do not fit the model: the gate reads {inputs} numbers per token; a gate for this model "
            f"reads {wanted}. Give weights that were trained for this model."
        )
    return [gate for gate, size in sizes.items() if size == inputs]


def _scorer(checkpoint: Checkpoint, model: Sizes) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    layers = [{n: t for n, t in layer.items() if n not in published_checkpoints.UNUSED} for layer in checkpoint.layers]
    if layers[0].keys() != published_checkpoints.SCORERS.keys():
        found = ", ".join(sorted(layers[0]))
        raise SetupError(f"the tensors {found} are not those of a ForesightKV scorer. Give a checkpoint of a scorer.")
    _same_heads("scorer", len(layers), len(layers[0]["fc1.weight"]), model)
    tensors = published_checkpoints.scorer(layers)
    inputs, hidden = tensors["w1"].shape[2:]
    fits: dict[int, Features] = {scorer_shapes(f, model)["w1"][2]: f for f in COUNT}
    if inputs not in fits:
        wanted = " or ".join(f"{size} ({features})" for size, features in fits.items())
        raise SetupError(
            f"the scorer reads {inputs} numbers per entry; a scorer for this model reads {wanted}. Give weights that "
            "were trained for this model."
        )
    if why := misfit(tensors, scorer_shapes(fits[inputs], model, hidden)):
        raise SetupError(f"scorer weights do not fit the model: {why}. Give weights that were trained for this model.")
    return tensors, {"features": fits[inputs]}


def _surrogate(checkpoint: Checkpoint, model: Sizes) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = published_checkpoints.surrogate(checkpoint.layers)
    if found is None:
        found_here = ", ".join(sorted(checkpoint.layers[0]))
        raise SetupError(f"the tensors {found_here} are not those of a KVzap network. Give a checkpoint of KVzap.")
    form, tensors = found
    _same_heads("surrogate", len(checkpoint.layers), tensors["out.bias"].shape[1], model)
    if why := surrogate_misfit(tensors, model):
        raise SetupError(
            f"surrogate weights do not fit the model: {why}. Give weights that were trained for this model."
        )
    return tensors, {"form": form}


def _same_heads(what: str, layers: int, heads: int, model: Sizes) -> None:
    wanted = model["num_hidden_layers"], model["num_key_value_heads"]
    if (layers, heads) != wanted:
        raise SetupError(
            f"{what} weights are for {layers} layers x {heads} KV heads; the model has {wanted[0]} x {wanted[1]}. "
            "Give weights that were trained for this model."
        )
