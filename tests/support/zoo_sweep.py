"""Every causal and every image-text model type of the installed transformers, built small and tried in the engine.

    python -m support.zoo_sweep [MODEL_TYPE ...]        (in tests/)

prints a line each: what the engine says of it, and whether its greedy tokens are those of `model.generate`. It finds
families that the zoo's table does not name; a model type that cannot be built by its usual sizes is said to be so.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.engine.model.shape import read_shape
from kvbench.errors import KVBenchError
from kvbench.records import Request, Sampling
from support import zoo

PROMPT, NEW = 60, 24  # tokens; more than the sliding windows of `zoo`
LARGE = 50_000_000  # parameters; where the usual names do not make a model small


def model_types() -> list[str]:
    tables = (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return list(dict.fromkeys(name for table in tables for name in table))


def greedy(model: Any, ids: torch.Tensor, attention: str = "eager") -> list[int]:
    """Tokens of `model.generate`. Eager attention applies all that models ask for; SDPA leaves out logit caps."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in out[0, ids.shape[1] :]]


def engine_tokens(model: Any, ids: torch.Tensor) -> list[int]:
    loaded = replace(prepare(model, None), stop_ids=frozenset())
    full = registry.methods.get("full")()
    engine = Engine(loaded, full, budget=None, interval=16, slots=2, max_tokens=PROMPT + NEW)
    request = Request(
        task="zoo", doc_id="0", prompt_ids=tuple(ids[0].tolist()), max_new_tokens=NEW, sampling=Sampling(temperature=0)
    )
    (answer,) = engine.generate([request])
    return list(answer.token_ids)


def verdict(model_type: str) -> str:
    try:
        config = zoo.configuration(model_type, {})
        with torch.device("meta"):
            size = sum(p.numel() for p in zoo.auto_class(config).from_config(config).parameters())
        if size > LARGE:
            return f"not built: {size:,} parameters"
        model = zoo.build(config)
    except KVBenchError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"not built: {type(error).__name__}: {_line(error)}"
    try:
        read_shape(config)
        where = "on meta"
    except KVBenchError as error:
        where = f"not on meta: {error}"
    ids = torch.randint(3, 250, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    try:
        ours = engine_tokens(model, ids)
    except KVBenchError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"INTERNAL ERROR {type(error).__name__}: {_line(error)}"
    try:
        theirs = greedy(model, ids)
    except Exception as error:
        return f"{where}; generate fails: {type(error).__name__}: {_line(error)}"
    same = "equal" if ours == theirs else "OTHER TOKENS"
    return f"{same}, {len(set(ours))} different tokens, {where}"


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:150]


def main() -> None:
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or model_types():
        began = time.process_time()
        print(f"{name}: {verdict(name)} ({time.process_time() - began:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
