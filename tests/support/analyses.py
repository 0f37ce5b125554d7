"""Slow computations from which tests of analyses make the expected figures."""

from __future__ import annotations

import torch

from kvbench.config.run_config import MethodChoice
from kvbench.engine.attention.interface import route
from kvbench.replay.analyses.api import Study, choose
from kvbench.replay.choices import Chosen
from kvbench.replay.read_analyses import read

BUDGET, INTERVAL, SINKS = 24, 8, 4
STREAMING = Chosen(method=MethodChoice(name="streaming-llm"), budget=BUDGET)


def found(loaded, asked, name, *chosen, **more):
    """The rows of one analysis."""
    study = Study(task="t", traces=asked, interval=INTERVAL, **more)
    [analysis] = [kind(study) for kind in choose([name])]
    read(loaded, study, [analysis], chosen, max_tokens=200)
    return analysis.rows()


def dense(loaded, trace):
    """{layer: attention [Hq, T, T] in double precision} of a trace without its last token, from one plain pass."""
    count = len(trace.prompt) + len(trace.answer) - 1
    return read_plainly(loaded, trace, torch.ones(count, count, dtype=torch.bool).tril())[0]


def read_plainly(loaded, trace, sees):
    """As `dense`, and the logits [T, V], where query i sees the tokens that `sees` [T, T] marks."""
    ids, seen = [*trace.prompt, *trace.answer[:-1]], {}

    def attend(call):
        keys = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        logits = (call.query @ keys.transpose(-1, -2)).double() * call.scaling
        seen[call.layer] = logits.masked_fill(~sees, float("-inf")).softmax(dim=-1)[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, attn_mask=sees, scale=call.scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    with torch.inference_mode(), route(loaded.model, attend):
        out = loaded.model(
            input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], attention_mask=None
        )
    return seen, out.logits[0]


def seen_under_streaming(trace):
    """[T, T]: the tokens that each query sees, where the prompt and then every block of 8 tokens end with an
    eviction."""
    prompt, total = len(trace.prompt), len(trace.prompt) + len(trace.answer) - 1
    sees = torch.ones(total, total, dtype=torch.bool).tril()
    for i in range(prompt, total):
        last = prompt + (i - prompt) // INTERVAL * INTERVAL  # tokens read at the last tick
        dropped = sorted(set(range(last)) - held_by_streaming(last))
        sees[i, dropped] = False
    return sees


def most_attended(paid):
    """The fewest tokens with 90% of what is paid, one by one."""
    chosen, mass, total = set(), 0.0, sum(paid)
    for token in sorted(range(len(paid)), key=lambda j: -paid[j]):
        if mass >= 0.9 * total:
            break
        chosen.add(token)
        mass += paid[token]
    return chosen


def mean(values):
    return sum(values) / len(values)


def held_by_streaming(seen):
    """Of `seen` tokens right after an eviction."""
    return {*range(SINKS), *range(seen - BUDGET + SINKS, seen)} if seen > BUDGET else set(range(seen))
