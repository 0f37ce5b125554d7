"""Errors for models that the hub refuses, that transformers cannot read, or that cannot take a task's images."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.console import faults
from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import hub


def unreadable(name: str, where: str, error: Exception) -> SetupError:
    """Return the error for a model whose tokenizer or configuration transformers cannot load. where: the folder or hub
    name that transformers read."""
    reason = hub.why(error)
    if reason == "code":
        return own_code(name)
    if not Path(where).is_dir() and (answer := refusal(name, reason)):
        return answer
    lines = [line.strip() for line in faults.words(error).splitlines() if line.strip()] or [type(error).__name__]
    reasons = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return SetupError(f"model {quote(name)} cannot be read: {reasons}")


def own_code(name: str) -> SetupError:
    return SetupError(
        f"{quote(name)} needs code from its repository, which kvbench never runs. "
        "Use a model whose architecture transformers has itself."
    )


def refused(what: str, reason: hub.Why, revision: str | None = None) -> str:
    """Return the message if the hub refused a model or data set for one of three reasons: it is missing, its revision
    is unknown, or the token is invalid. Return "" for any other reason. what: the model or data set in words."""
    named = quote(revision) if revision else "that revision"
    sentences: dict[str, str] = {
        "missing": f"the hub has no {what} (or it is private and HF_TOKEN is not set).",
        "revision": f"{what} has no revision {named} on the hub.",
        "token": f"the hub refuses the token of this machine for {what}. Set HF_TOKEN to a valid token.",
    }
    return sentences.get(reason, "")


def refusal(name: str, reason: hub.Why, revision: str | None = None) -> SetupError | None:
    """Return the error for the hub's refusal of a model; None if kvbench has no message for the reason."""
    model = quote(name)
    if sentence := refused(f"model {model}", reason, revision):
        return SetupError(sentence)
    match reason:
        case "gated":
            return SetupError(
                f"{model} is gated. Accept its terms on its page, then set HF_TOKEN or run 'hf auth login'."
            )
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
                "(--model PATH) or a cached model; HF_HUB_OFFLINE=1 then avoids the hub."
            )
    return None


# Model types whose images the engine reads, each tested against the model's own `generate` (transformers 5.17).
WITH_IMAGES = frozenset(
    {
        *("glm4v", "glm4v_moe", "internvl", "llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_5"),
        *("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    }
)
# Model types whose attention between the tokens of an image is not causal.
BOTH_WAYS = frozenset({"gemma3", "gemma4", "gemma4_unified", "paligemma"})


def check_images_of(config: Mapping[str, Any], name: str = "") -> None:
    """Raise UserError unless the engine supports images with this model. config: the content of config.json; name: the
    model's name."""
    kind = str(config.get("model_type", ""))
    what = f"model {quote(name)} (model type {quote(kind)})" if name else f"model type {quote(kind)}"
    if kind in WITH_IMAGES:
        return
    if "vision_config" not in config:
        raise UserError(
            f"{what} reads text only, and the prompts have images. Use a vision-language model such as Qwen3-VL."
        )
    if kind in BOTH_WAYS:
        raise UserError(
            f"{what} lets an image's earlier tokens attend to later ones; kvbench computes causal attention only. "
            "Use a model that reads images causally, such as Qwen3-VL."
        )
    served = ", ".join(sorted(WITH_IMAGES))
    raise UserError(f"kvbench does not support images with {what}. It supports them with the model types {served}.")
