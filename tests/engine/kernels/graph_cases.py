"""Sequences decoded by the Triton kernel from a graph on the pretended device, beside the same on the CPU.

Prints one line of JSON per case: whether tokens and usage are equal, and the most that a replayed step costs.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from support.methods import small, with_tables
from support.models import build, requests
from support.pretend_cuda import pretended_cuda

from kvbench.engine.graph import StepGraph
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.records import Sampling

CASES = (
    ("qwen3", "gkv", "dense"),
    ("qwen3", "gkv", "paged"),
    ("qwen3", "ada-kv while decoding", "paged"),
    ("qwen3", "trimkv", "dense"),
    ("qwen3", "retention by layer", "paged"),
    ("gemma2", "full", "dense"),  # rings and softcap
    ("gpt-oss", "full", "dense"),  # rings and sinks
)
TODO = requests(lengths=(26, 9, 14), new_tokens=(11, 9, 6), samples=1, sampling=Sampling())


def decoded(loaded: Any, method: str, layout: Any) -> tuple[dict[str, Any], str]:
    made = small(method)
    engine = Engine(
        loaded,
        made,
        budget=20 if made.takes_budget else None,
        interval=5,
        slots=2,
        max_tokens=40,
        layout=layout,
        compiled=False,
    )
    times = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "evict_seconds": 0.0, "decoding": ""}
    done = list(engine.generate(TODO))
    return {d.request.doc_id: (d.token_ids, dataclasses.replace(d.usage, **times)) for d in done}, engine.decoding


with pretended_cuda() as device:
    for architecture, method, layout in CASES:
        want, _ = decoded(with_tables(build(architecture)), method, layout)
        model = build(architecture)
        model = with_tables(prepare(model.model.to("cuda"), model.tokenizer))
        replays = device.watch(StepGraph, "replay")
        before = len(replays)
        got, decoding = decoded(model, method, layout)
        costs = [(c.launches, c.syncs + c.waits + c.h2d + c.d2h) for c in replays[before:]]
        print(
            json.dumps(
                {"case": [architecture, method, layout], "decoding": decoding, "equal": got == want, "cost": max(costs)}
            )
        )
