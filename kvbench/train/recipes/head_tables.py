"""The table of heads for `headkv`, estimated from a model's attention: no weight is trained, a CPU will do.

    importance(model, examples)       # [L, Hq]
    make("tiny", folder)              # loads the model, makes its table, and writes it with its card

It reads the attention of the queries that write the right answers of retrieval problems (`head_data`), the answers
being given. Memory is that of one layer's attention of a block of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.attention.interface import AttentionCall, causal_bias, grouped_attention, route
from kvbench.engine.model.load import LoadedModel, load
from kvbench.engine.model.weights import Base, save_weights
from kvbench.errors import SetupError
from kvbench.eviction.terms.window_attention import window_attention
from kvbench.sources.models import describe
from kvbench.train.head_data import Example, encoder, first_ids, is_tiny, source, text_examples, tiny_examples

KIND = "headkv"
BLOCK = 512  # queries of a layer that attend at once
LONGEST = 4096  # tokens of an example, whatever the model could read
Tick = Callable[[int, int], None]  # (examples done, tokens read)


@dataclass(frozen=True, slots=True)
class Made:
    """A table that was written, and its card."""

    path: Path
    table: torch.Tensor
    card: dict[str, Any]


def make(model: str, out: Path, *, samples: int, seed: int, device: str, tick: Tick | None = None) -> Made:
    """model: as everywhere, "tiny", a folder or a hub name. Raises SetupError, UserError."""
    loaded = load(str(describe(model).folder or model), device=device)
    if is_tiny(loaded):
        examples = tiny_examples(samples, seed)
    else:
        examples = text_examples(encoder(loaded), samples, seed, first_ids(loaded), min(loaded.context, LONGEST))
    made: dict[str, Any] = {
        "how": "estimated from attention, not trained",
        "data": source(loaded),
        "command": f"kvbench train {KIND} --model {model} --samples {samples} --seed {seed} --out DIR",
        "samples": samples,
        "seed": seed,
        "tokens": sum(len(example.ids) for example in examples),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    table = importance(loaded, examples, tick)
    path = out / f"{KIND}.safetensors"
    base = Base(name=model, config=loaded.model.config, fingerprint=loaded.fingerprint)
    card = save_weights(path, KIND, {"importance": table}, base, made=made)
    return Made(path, table, card)


def importance(model: LoadedModel, examples: Sequence[Example], tick: Tick | None = None) -> torch.Tensor:
    """[L, Hq] share of a head's attention that falls on the answer's place in the prompt, all heads together 1."""

    def on_evidence(example: Example, device: torch.device) -> torch.Tensor:
        mask = torch.zeros(len(example.rows), len(example.ids), dtype=torch.bool, device=device)
        for row, places in zip(mask, example.evidence):
            row[list(places)] = True
        return mask

    shares = attention_shares(model, examples, on_evidence, tick)
    total = float(shares.sum())
    if total <= 0:
        raise SetupError("no head of the model attends to the answers; the table would be empty.")
    return (shares / total).float()


@torch.inference_mode()
def attention_shares(
    model: LoadedModel,
    examples: Sequence[Example],
    marked: Callable[[Example, torch.device], torch.Tensor],
    tick: Tick | None = None,
) -> torch.Tensor:
    """float64 [L, Hq]: the share of attention that falls on marked keys, mean over all answer rows of all examples.

    marked: [rows, tokens] bool. Layers with a sliding window, whose memory is bounded anyway, have 0.
    """
    sizes = {g.query_heads for g in model.geometry}
    if len(sizes) > 1:
        raise SetupError("layers of this model differ in query heads; one table cannot hold them.")
    sums = torch.zeros(len(model.geometry), sizes.pop(), dtype=torch.float64)
    tokens = 0
    for done, example in enumerate(examples, start=1):
        reader = _Reader(sums, torch.tensor(example.rows, device=model.device), marked(example, model.device))
        with route(model.model, reader):
            model.model(
                input_ids=torch.tensor([example.ids], device=model.device),
                position_ids=torch.arange(len(example.ids), device=model.device)[None],
                attention_mask=None,
                past_key_values=None,
                use_cache=False,
                logits_to_keep=1,
            )
        tokens += len(example.ids)
        if tick is not None:
            tick(done, tokens)
    return sums / sum(len(example.rows) for example in examples)


class _Reader:
    """An attention handler that adds up, for every query head, what the answer's rows pay to the marked keys."""

    def __init__(self, sums: torch.Tensor, rows: torch.Tensor, marked: torch.Tensor) -> None:
        self.sums, self.rows, self.marked = sums, rows, marked

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        n, hk = call.key.shape[2], call.key.shape[1]
        positions = torch.arange(n, device=call.key.device)
        if call.window is None:
            paid = window_attention(
                call.query[:, :, self.rows],
                call.key,
                self.rows[None],
                positions.expand(1, hk, -1),
                None,
                scaling=call.scaling,
                softcap=call.softcap,
                reduce_g=None,
                reduce_q=None,
            )  # [1, Hk, g, rows, n]
            self.sums[call.layer] += (paid * self.marked).sum(dim=(-1, -2)).flatten().double().cpu()
        parts = []
        for start in range(0, n, BLOCK):
            block = positions[start : start + BLOCK]
            end = start + len(block)
            bias = causal_bias(block, positions[:end], call.window, call.query.dtype)[None, None]
            out = grouped_attention(
                call.query[:, :, start:end],
                call.key[:, :, :end],
                call.value[:, :, :end],
                bias,
                scaling=call.scaling,
                softcap=call.softcap,
                sinks=call.sinks,
            )
            parts.append(out)
        return torch.cat(parts, dim=1)
