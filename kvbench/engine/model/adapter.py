"""Merges a LoRA adapter into a model's weights with peft, so that the engine runs an ordinary model.

`check` needs no weights: it attaches tensors of the shapes in the adapter's file to a model on the meta device. So an
adapter of another model is refused before any weights are loaded. `USED` and `UNUSED` list the options of an adapter's
configuration that kvbench knows. Any other option is refused by name, unless it is off or has its default value: it may
be impossible to merge, or may name files or code to load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvbench.console.faults import words
from kvbench.errors import KVBenchError, UserError, bare, few, quote
from kvbench.sources.adapters import MERGE, Adapter
from kvbench.sources.quantised import Form, silence_bitsandbytes

NAME = "default"  # the adapter's name inside peft's layers
PREFIX = "base_model.model."  # begins the names of the model's parameters inside peft's wrapper
OWN = (".lora_", f".{NAME}.", f".{NAME}")  # the name of each of an adapter's parameters contains one of these
USED = (  # fields of an adapter's configuration that decide the merged weights
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias"),
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "trainable_token_indices", "ensure_weight_tying", "fan_in_fan_out"),
)
UNUSED = (  # fields about the adapter's training and origin
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "runtime_config", "peft_version", "init_lora_weights"),
)
PLAIN = (True, False, None, "gaussian", "orthogonal", "eva")  # `init_lora_weights` that do not change base weights


def check(adapter: Adapter, model: Any) -> None:
    """Raise UserError if an adapter does not fit a model. model: on the meta device; the adapter stays attached to this
    model."""
    with safe_open(adapter.weights, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    _attach(model, adapter, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def refuse_quantised(adapter: Adapter | None, form: Form | None) -> None:
    """Raise UserError for an adapter on weights that stay quantised: the merged weights would have to be quantised
    again."""
    if adapter is not None and form is not None and form.kept:
        raise UserError(
            f"adapter {quote(adapter.folder)} cannot be merged into weights that stay quantised ({form.name}); give "
            "the base model without quantisation."
        )


def merge(model: Any, adapter: Adapter) -> Any:
    """Return the model with an adapter merged into its weights. Raises UserError if the adapter does not fit."""
    attached = _attach(model, adapter, load_file(adapter.weights))
    with _in_one_line(adapter):
        return attached.merge_and_unload(safe_merge=True).requires_grad_(False)


def _attach(model: Any, adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the model inside peft's wrapper, with the adapter's tensors in its layers."""
    silence_bitsandbytes()
    from peft import PeftModel, set_peft_model_state_dict

    config = _config(adapter)
    tied = {weight for weight, count in Counter(id(w) for _, w in _weights(model)).items() if count > 1}
    names = {name for name, weight in _weights(model) if id(weight) in tied}
    with _in_one_line(adapter):
        attached = PeftModel(model, config, NAME, low_cpu_mem_usage=True)
        found: Any = set_peft_model_state_dict(attached, dict(tensors), NAME, low_cpu_mem_usage=True)
    if found.unexpected_keys:
        raise _another(adapter, f"the model lacks the modules of {_some(found.unexpected_keys)}")
    if lacking := [key for key in found.missing_keys if any(part in key for part in OWN)]:
        raise _another(adapter, f"{adapter.weights.name} lacks {_some(lacking)}")
    if shared := sorted(names & set(attached.targeted_module_names)):
        raise UserError(
            f"adapter {quote(adapter.folder)} changes {quote(shared[0])}, whose weights the model shares with another "
            f"layer, so the adapter cannot be merged into only one of the two. Train the adapter without this module."
        )
    return attached


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and weight of each module that has a weight. Modules with tied weights yield the same tensor."""
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter):
            yield name, weight


def _config(adapter: Adapter) -> Any:
    """Return peft's configuration of an adapter. Raises UserError for an option that cannot be merged into weights."""
    from peft import LoraConfig

    plain = dataclasses.asdict(LoraConfig())
    for name, value in adapter.config.items():
        other = name not in (*USED, *UNUSED) and bool(value) and value != plain.get(name)
        if other or (name == "init_lora_weights" and value not in PLAIN):
            raise UserError(
                f"adapter {quote(adapter.folder)} has the option {bare(name)} {quote(value)}, which kvbench cannot "
                f"merge. {MERGE}."
            )
    with _in_one_line(adapter):
        return LoraConfig(**{name: value for name, value in adapter.config.items() if name in USED})


@contextlib.contextmanager
def _in_one_line(adapter: Adapter) -> Iterator[None]:
    """Turn an exception of peft into a one-line UserError, while peft attaches or merges the adapter in the `with`
    block."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except KVBenchError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError) as error:
        lines = [line.strip() for line in words(error).splitlines() if line.strip()] or [type(error).__name__]
        why = lines[1].partition(":")[0] if lines[0].endswith(":") and lines[1:] else lines[0].rstrip(".")
        raise _another(adapter, bare(why.replace(PREFIX, ""))) from error


def _another(adapter: Adapter, why: str) -> UserError:
    base = adapter.config.get("base_model_name_or_path")
    made = f"; it was made for {quote(base)}" if base else ""
    return UserError(f"adapter {quote(adapter.folder)} does not fit the model: {why}{made}.")


def _some(keys: list[str]) -> str:
    return few([quote(key.removeprefix(PREFIX)) for key in keys], 1)
