"""Checks a model folder's weights: they must be safetensors, no file that the index names may be missing, and no file
may be truncated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, few, quote
from kvbench.sources import model_files
from kvbench.store.strict_json import lenient

REPORTING = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # arguments of `from_pretrained`
_OF_QUANTISERS = ("_zero_point", "g_idx", "k_scale", "v_scale")  # ends of names
_OF_BITSANDBYTES = (".absmax", ".SCB", "_format")  # ends of names that only bitsandbytes gives to tensors
EXPERTS = ".experts."  # every name of a routed expert's tensor has this part
_CONVERT = "kvbench loads safetensors only; convert it, for example with 'save_pretrained' of transformers."


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files, unchecked, without files that hold a method's weights."""
    return [path for path in sorted(folder.glob("*.safetensors")) if not model_files.is_of_a_method(path)]


def check(name: str, folder: Path) -> None:
    """Raise SetupError for weights that are missing, damaged, or stored only as pickles."""
    files = weight_files(folder)
    if not files:
        raise none_there(name, sorted(folder.iterdir()))
    if missing := lacking(folder):
        raise SetupError(f"{quote(name)} lacks weights that its index names: {few(missing, 1)}. Download it again.")
    for path in files:
        check_file(path)


def check_file(path: Path) -> None:
    """Raise SetupError for a safetensors file that has a broken header or is truncated."""
    size = path.stat().st_size
    with path.open("rb") as file:
        layout = model_files.tensors(file)
    if layout is None:
        raise SetupError(f"{path.name} is damaged (its header cannot be read). Download it again.")
    data, spans = layout
    expected = max((end for _, end in spans), default=data)
    if size < expected:
        sizes = f"header says {expected:,} bytes, file has {size:,}"
        raise SetupError(f"{path.name} is damaged ({sizes}). Download it again.")


def none_there(name: str, files: Sequence[Path]) -> SetupError:
    if pickles := [path.name for path in files if path.suffix in (".bin", ".pt", ".pth")]:
        return SetupError(f"{quote(name)} has only pickle weights ({pickles[0]}). {_CONVERT}")
    return SetupError(f"{quote(name)} has no weights (*.safetensors). Download it again, or give another model.")


def lacking(folder: Path) -> list[str]:
    """Return the names of the weight files that the folder lacks, according to its index. Without an index, the folder
    lacks model.safetensors if it has no weights."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [] if weight_files(folder) else ["model.safetensors"]
    named = read_json(index).get("weight_map")
    files = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    return [file for file in files if not (folder / file).is_file()]


def difference(model: Any, report: Mapping[str, Any]) -> str:
    """Return how the weights in a model's files differ from those that its config requires; "" if they do not differ.

    If the files lack a weight, or hold it in another shape, transformers fills the weight with random numbers and only
    logs a report. If it ignores the scale of a quantised weight, because config.json names no quantisation, it takes
    the stored codes for numbers. Missing buffers are no difference, because buffers start with constants; nor are
    missing numbers that a quantiser adds. Wrong shapes of quantised weights are not found, because the report does not
    list them.

    model, report: the results of transformers' `from_pretrained`, called with `REPORTING`.
    """
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        return f"tensor {quote(name)} has shape {list(stored)} in the files, but {list(wanted)} by config.json"
    parameters = {name for name, _ in model.named_parameters()}
    random = {name for name in parameters if not name.endswith(_OF_QUANTISERS)}
    if missing := sorted(random & set(report["missing_keys"])):
        return f"the files lack tensors that config.json asks for: {few(missing, 1)}"
    if scales := sorted(name for name in report["unexpected_keys"] if name.rpartition("_scale")[0] in parameters):
        return f"the files hold quantised weights, which config.json does not mention, with scales: {few(scales, 1)}"
    return quantised_experts(report["unexpected_keys"])


def quantised_experts(names: Iterable[str]) -> str:
    """Return what is wrong with a model's files if bitsandbytes' tensors of experts are among these names; else "".

    If transformers stacks a model's experts in one tensor, it ignores their scales, and takes the codes for numbers.
    """
    found = sorted(name for name in names if EXPERTS in name and name.endswith(_OF_BITSANDBYTES))
    why = "transformers cannot stack experts that bitsandbytes quantised, and the files hold"
    return f"{why} {few(found, 1)}" if found else ""


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = lenient(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{quote(path)} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise SetupError(f"{quote(path)} cannot be read as JSON ({error}). Download it again.") from None
    if not isinstance(data, dict):
        raise SetupError(f"{quote(path)} holds no JSON object. Download it again.")
    return data
