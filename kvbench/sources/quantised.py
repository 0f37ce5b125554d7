"""Weights that are stored quantised: which forms kvbench loads, which packages each form needs, and how many bytes the
weights take. Imports no torch.

Some forms stay in memory as they are stored; transformers converts the others to ordinary weights while loading them.
FP8 and MXFP4 are always converted, because otherwise transformers would download code for their matrix products from
the hub and run it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import model_weights

PLAIN = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # number types of unquantised weights -> bytes per number


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of quantised weights, named as in a model's config.json.

    packages: modules that transformers imports to load this form. kept: whether the weights stay in this form in
    memory.
    """

    name: str
    packages: tuple[str, ...]
    kept: bool

    def missing(self) -> str:
        """Return a sentence that names the missing packages and how to install them; "" if none is missing."""
        lacking = [name for name in self.packages if importlib.util.find_spec(name) is None]
        names = " and ".join(name.replace("_", "-") for name in lacking)
        return f"weights stored as {self.name} need {names}: pip install 'kvbench[{self.name}]'." if lacking else ""

    def require(self) -> None:
        """Raise SetupError if a package is missing."""
        if text := self.missing():
            raise SetupError(text)


FORMS = {
    form.name: form
    for form in (
        Form(name="fp8", packages=("accelerate",), kept=False),
        Form(name="mxfp4", packages=("accelerate",), kept=False),
        Form(name="compressed-tensors", packages=("compressed_tensors",), kept=False),
        Form(name="bitsandbytes", packages=("bitsandbytes", "accelerate"), kept=True),
        Form(name="torchao", packages=("torchao",), kept=True),
        Form(name="gptq", packages=("gptqmodel", "optimum"), kept=True),
        Form(name="awq", packages=("gptqmodel", "accelerate"), kept=True),
    )
}


def form_of(config: Mapping[str, Any]) -> Form | None:
    """Return the form of quantised weights that a config.json describes; None if the weights are not quantised. Raises
    UserError for a form that kvbench does not load: transformers would read its tensors as ordinary weights."""
    told = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not told:
        return None
    name = told.get("quant_method") if isinstance(told, Mapping) else told
    if name not in FORMS:
        stored = "quantised in a form that config.json does not name" if name is None else f"stored as {quote(name)}"
        raise UserError(
            f"the model's weights are {stored}, which kvbench does not load. It loads "
            f"{', '.join(FORMS)} and weights that are not quantised."
        )
    return FORMS[str(name)]


def silence_bitsandbytes() -> None:
    """Silence a line that bitsandbytes logs on import: advice to install a package whose CPU code comes from the
    hub."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """Bytes that a model's weights take in memory if quantised weights stay in their stored form. routed: the part of
    `total` that belongs to the experts of a mixture-of-experts model."""

    total: int
    routed: int


def stored_bytes(folder: Path, element: int) -> StoredBytes | None:
    """Return the bytes that a model's weights take in memory, from the headers of its files; None if files are missing.

    element: bytes that each number of an unquantised matrix takes in memory. An unquantised vector takes the bytes that
    it has in the file.
    """
    if model_weights.lacking(folder):
        return None
    total = routed = 0
    for path in model_weights.weight_files(folder):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                size = _bytes(tensor.get_dtype(), tensor.get_shape(), element)
                total += size
                routed += size if model_weights.EXPERTS in name else 0
    return StoredBytes(total=total, routed=routed)


def refuse_experts(name: str, folder: Path) -> None:
    """Raise SetupError if bitsandbytes quantised the experts in a model's files. Call it for a model whose experts
    transformers stacks in one tensor. name: the model's name."""
    for path in model_weights.weight_files(folder):
        with safe_open(path, "np") as file:
            if wrong := model_weights.quantised_experts(file.keys()):
                raise SetupError(f"model {quote(name)} cannot be loaded: {wrong}. Give weights in another form.")


def _bytes(kind: str, shape: list[int], element: int) -> int:
    """Return a tensor's bytes in memory. kind: the number type in the file. element: as for `stored_bytes`."""
    count = math.prod(shape)
    if kind in PLAIN:
        return count * (element if len(shape) > 1 else PLAIN[kind])
    return count * max(1, int("".join(c for c in kind.partition("_")[0] if c.isdigit()) or 8) // 8)
