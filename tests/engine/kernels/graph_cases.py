"""Sequences decoded by the Triton kernel from a graph on the pretended device, beside the same on the CPU.

Prints one line of JSON per case: whether tokens and usage are equal, and the most that a replayed step costs.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from support.methods import small, with_tables
from support.models import build, divided, requests
from support.pretend_cuda import pretended_cuda

from kvbench.engine.graph import StepGraph
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.records import Sampling

GREEDY, DRAWN = Sampling(), Sampling(temperature=0.8, top_p=0.9)
CASES = (
    ("qwen3", "gkv", "dense", GREEDY),
    ("qwen3", "h2o", "dense", GREEDY),  # attention summed by the kernel
    ("qwen3", "gkv", "paged", DRAWN),
    ("qwen3", "ada-kv while decoding", "paged", GREEDY),
    ("qwen3", "trimkv", "dense", DRAWN),
    ("qwen3", "retention by layer", "paged", GREEDY),
    ("deepseek-v3", "gkv", "dense", GREEDY),  # latents
    ("deepseek-v3", "gkv", "paged", DRAWN),
    ("gemma2", "full", "dense", GREEDY),  # rings and softcap
    ("gpt-oss", "full", "dense", GREEDY),  # rings and sinks
    ("gemma4", "h2o", "dense", GREEDY),  # layers that share the entries of earlier ones
    ("gemma4", "gkv", "paged", GREEDY),
)


def decoded(loaded: Any, method: str, layout: Any, sampling: Sampling) -> tuple[dict[str, Any], str]:
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
    todo = requests(lengths=(26, 9, 14), new_tokens=(11, 9, 6), samples=1, sampling=sampling)
    done = list(engine.generate(todo))
    return {d.request.doc_id: (d.token_ids, dataclasses.replace(d.usage, **times)) for d in done}, engine.decoding


with pretended_cuda(devices=2):
    want, _ = decoded(with_tables(build("qwen3")), "gkv", "dense", GREEDY)
    got, decoding = decoded(with_tables(divided("qwen3")), "gkv", "dense", GREEDY)
    tokens, wanted = ({name: ids for name, (ids, _) in done.items()} for done in (got, want))  # bytes are per device
    print(json.dumps({"case": ["qwen3", "gkv", "divided"], "decoding": decoding, "equal": tokens == wanted}))

with pretended_cuda() as device:
    for architecture, method, layout, sampling in CASES:
        want, _ = decoded(with_tables(build(architecture)), method, layout, sampling)
        model = build(architecture)
        model = with_tables(prepare(model.model.to("cuda"), model.tokenizer))
        replays = device.watch(StepGraph, "replay")
        before = len(replays)
        got, decoding = decoded(model, method, layout, sampling)
        costs = [(c.launches, c.syncs + c.waits + c.h2d + c.d2h) for c in replays[before:]]
        print(
            json.dumps(
                {"case": [architecture, method, layout], "decoding": decoding, "equal": got == want, "cost": max(costs)}
            )
        )
