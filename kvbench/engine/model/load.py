"""Loads a transformers model for the engine: from safetensors only, without remote code. Reads its geometry once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench.console import faults
from kvbench.console.faults import words
from kvbench.engine.attention.flash import Attn, check_attn
from kvbench.engine.attention.geometry import LayerGeometry, devices_of, read_layers
from kvbench.engine.attention.positions import check_latents, check_positions, check_states
from kvbench.engine.cache.recurrent import StateShape
from kvbench.engine.model.adapter import merge, refuse_quantised
from kvbench.engine.model.fingerprint import fingerprint
from kvbench.errors import KVBenchError, SetupError, UserError, quote
from kvbench.sources import quantised, vocabulary
from kvbench.sources.adapters import Adapter
from kvbench.sources.model_weights import REPORTING, difference
from kvbench.sources.models import context_of, describe
from kvbench.sources.quantised import Form
from kvbench.sources.refusals import WITH_IMAGES
from kvbench.sources.tokenizer import decode, read_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class LoadedModel:
    """A model ready to generate. `context`: most tokens of a prompt and its answer together; `stop_ids`: end tokens.

    `tokenizer` may be None where text is not needed (speed measurements); `decode` then returns "".
    """

    model: Any
    tokenizer: Any
    geometry: tuple[LayerGeometry, ...]
    device: torch.device
    dtype: torch.dtype
    context: int
    stop_ids: frozenset[int]
    folder: Path | None = None  # the checkpoint's folder; None if the model was not loaded from a folder
    fingerprint: str | None = None  # see `fingerprint.fingerprint`
    attn: Attn = "sdpa"  # attention kernel for prompts
    states: tuple[StateShape, ...] = ()  # of recurrent layers
    devices: tuple[torch.device, ...] = ()  # those of the weights, `device` first; several if divided

    @property
    def divided(self) -> bool:
        """Whether the model's layers are on several devices."""
        return len(self.devices) > 1

    def decode(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else decode(self.tokenizer, ids)

    def check_ids(self, what: str, ids: Iterable[int]) -> None:
        """Raise UserError if a token has no embedding. what: the text of these tokens, for the message."""
        vocabulary.check_ids(what, self.tokenizer, ids, self.model.get_input_embeddings().weight.shape[0])


def pick_device(name: str) -> torch.device:
    """Return the device named "auto", "cpu", "cuda" or "cuda:N". Raises UserError for another name, SetupError when the
    device is not visible."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"--device {quote(name)}: choose auto, cpu, cuda or cuda:N.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SetupError(f"no CUDA device is visible (torch {torch.__version__}). Use --device cpu.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise SetupError(f"--device {quote(name)} is not visible; the last visible CUDA device is cuda:{last}.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name; "auto": bfloat16 on CUDA, float32 on CPU. Raises UserError for unknown names."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise UserError(f"--dtype {quote(name)}: choose {', '.join(DTYPES)}.")
    return DTYPES[name]


def load(
    path: str,
    *,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attn: Attn = "sdpa",
    adapter: Adapter | None = None,
    move: Callable[[Any], Any] | None = None,
) -> LoadedModel:
    """Load weights and tokenizer from a folder or hub id, and merge the adapter into the weights.

    move: function that moves the model from the host to its devices and returns it; None: the model moves to `device`.

    Raises SetupError (weights missing, damaged or not safetensors; hub unreachable; device or flash-attn missing) and
    UserError (architecture not supported, unknown device or dtype, adapter of another model).
    """
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    check_attn(attn, where, kind)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    quantised.silence_bitsandbytes()
    try:
        tokenizer = read_tokenizer(path, revision)
        config = transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        file = transformers.PreTrainedConfig.get_config_dict(path, revision=revision)[0]
        form, more = _in_its_form(config, where)
        model, report = auto_class(config).from_pretrained(
            path, revision=revision, dtype=kind, use_safetensors=True, trust_remote_code=False, **REPORTING, **more
        )
        if wrong := difference(model, report):
            raise SetupError(
                f"model {quote(path)} cannot be loaded: {wrong}. Download it again, or give another model."
            )
    except Exception as error:  # transformers' code for a model may raise any exception
        if isinstance(error, KVBenchError) or faults.of_machine(error):
            raise
        reason = (words(error).strip().splitlines() or [type(error).__name__])[0]
        raise SetupError(f"model {quote(path)} cannot be loaded: {reason}") from error
    limit_time_steps(model)
    if form is not None and form.kept:
        refuse_quantised(adapter, form)
        if move is not None:
            refuse_kept(form)
        return replace(prepare(model.eval(), tokenizer, file), attn=attn)
    if form is not None:
        _make_plain(model, kind)
    if adapter is not None:  # before the model moves, so that the merged weights do not depend on devices
        model = merge(model, adapter)
    model = move(model) if move is not None else model.to(where)
    return replace(prepare(model.eval(), tokenizer, file), attn=attn)


def refuse_kept(form: Form | None) -> None:
    """Raise UserError for weights that stay quantised in memory, because --device-map auto does not divide them."""
    if form is not None and form.kept:
        raise UserError(
            f"--device-map auto does not divide weights that stay quantised in memory ({form.name}). Leave out "
            "--device-map, or use weights that are not quantised."
        )


def _in_its_form(config: Any, where: torch.device) -> tuple[Form | None, dict[str, Any]]:
    """Return the form in which the model's weights are quantised, and the arguments with which transformers loads them.

    The form is None for weights that are not quantised. Raises SetupError if a package is missing, UserError for a form
    that kvbench does not load.
    """
    form = quantised.form_of(config.to_dict())
    if form is None:
        return None, {}
    form.require()
    if form.kept:
        return form, {"device_map": {"": where}}
    holder = config if getattr(config, "quantization_config", None) else config.get_text_config()
    method = {}
    if form.name == "fp8":
        from kvbench.engine.model import fp8  # its import registers the conversion with transformers

        method = {"quant_method": fp8.METHOD}
    holder.quantization_config = dict(holder.quantization_config) | {"dequantize": True} | method
    return form, {"config": config}


def _make_plain(model: Any, kind: torch.dtype) -> None:
    """Make a model with dequantised weights the same as one whose weights were never quantised.

    transformers leaves some weights in bfloat16, and the form in a configuration's text part. It would save the weights
    as it read them, quantised, but without their form in the configuration.
    """
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(kind)
    vars(model.config.get_text_config()).pop("quantization_config", None)
    model._weight_conversions = None  # then transformers saves the weights in the usual layout of this model type


def auto_class(config: Any) -> Any:
    """Return the transformers auto class that builds the model with its language-model head.

    This is AutoModelForCausalLM if that class knows the configuration, else AutoModelForImageTextToText. For model
    types whose images the engine reads, AutoModelForImageTextToText comes first. Raises UserError when neither class
    knows the configuration.
    """
    autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    for auto in reversed(autos) if config.model_type in WITH_IMAGES else autos:
        if type(config) in auto._model_mapping:
            return auto
    raise UserError(
        f"model type {quote(getattr(config, 'model_type', '?'))} is not supported: transformers "
        f"{transformers.__version__} has neither a causal language model nor an image-text model of this type."
    )


def load_draft(target: LoadedModel, name: str) -> LoadedModel:
    """Load a draft model on the device and in the dtype of `target`."""
    dtype = str(target.dtype).removeprefix("torch.")
    return load(describe(name).where, device=str(target.device), dtype=dtype)


def prepare(model: Any, tokenizer: Any, file: Mapping[str, Any] | None = None) -> LoadedModel:
    """Check a model in memory, and return it as a LoadedModel. Raises UserError when the model's architecture is not
    supported.

    model: may be wrapped by torch.compile or peft. file: the content of its config.json; None: unknown, see
    `vocabulary.end_ids`.
    """
    model = _unwrapped(model)
    parameter = next(model.parameters())
    if parameter.is_meta:
        raise UserError(
            "the model's weights are offloaded or were never loaded: its first parameter is on the meta device. Load "
            "the model without offloading."
        )
    if parameter.device.type == "cuda":
        torch.cuda.set_device(parameter.device)  # Triton launches on the current device
    geometry, states = read_layers(model)
    check_states(model, states) if states else check_positions(model)
    if any(g.latent for g in geometry):
        check_latents(model)
    config = model.config.get_text_config()
    embeddings = model.get_input_embeddings().weight.shape[0]
    if tokenizer is not None:
        vocabulary.check_tokenizer(tokenizer, embeddings)
    return LoadedModel(
        model,
        tokenizer,
        geometry,
        parameter.device,
        parameter.dtype,
        context_of(config),
        vocabulary.end_ids(tokenizer, model.generation_config, config, file),
        folder if (folder := Path(getattr(model.config, "_name_or_path", ""))).is_dir() and folder.name else None,
        fingerprint(model),
        states=states,
        devices=devices_of(model),
    )


def limit_time_steps(model: Any) -> None:
    """Give state-space layers the limits of time steps that the model's configuration states.

    transformers' Nemotron-H does not read these limits (huggingface/transformers#48989). Its passes of several tokens
    raise every time step to `time_step_min`, which should limit the initial weights only. Its passes of one token do
    not raise any time step.
    """
    limits = getattr(model.config.get_text_config(), "time_step_limit", None)
    if limits is None:
        return
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(map(float, limits))


def _unwrapped(model: Any) -> Any:
    """Return the model that torch.compile or peft wraps, with peft's adapter; any other model is returned unchanged.
    Raises UserError if peft adds tokens before the prompt, which the wrapped model alone does not read."""
    model = _uncompiled(model)
    if not hasattr(model, "get_base_model"):
        return model
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        raise UserError("the model's peft adapter adds tokens before the prompt, which kvbench does not support.")
    return _uncompiled(model.get_base_model())


def _uncompiled(model: Any) -> Any:
    return getattr(model, "_modules", {}).get("_orig_mod", model)  # peft would pass an attribute of the inner model on


def refuse_training(loaded: LoadedModel) -> None:
    """Raise UserError for a model that recipes do not support.

    Recurrent layers are refused, because recipes run passes that begin in the middle of a text, without the state of
    these layers. Latent attention is refused, because recipes make weights for separate KV heads.
    """
    if any(g.latent for g in loaded.geometry):
        raise UserError(
            f"model type {quote(loaded.model.config.model_type)} has latent attention, whose heads share one entry; "
            "'kvbench train' makes weights for separate KV heads and does not support it."
        )
    if loaded.states:
        raise UserError(
            f"layers of model type {quote(loaded.model.config.model_type)} keep a state beside attention; "
            "'kvbench train' does not support models with such layers."
        )
