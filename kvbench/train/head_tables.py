"""Tables of heads for `headkv` and `duo`, estimated from a model's attention: no weight is trained, a CPU will do.

    importance(model, examples)               # [L, Hq] for headkv
    alpha(model, examples, sinks, recent)     # [L, Hk] for duo
    make("headkv", "tiny", folder)            # loads the model, makes its table, and writes it with its card

Both read the attention of the queries that write the right answers of retrieval problems (`head_data`), the answers
being given. Memory is that of one layer's attention of a block of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.attention import AttentionCall, causal_bias, grouped_attention, route
from kvbench.engine.model import LoadedModel, load
from kvbench.engine.weights import save_weights
from kvbench.errors import SetupError
from kvbench.eviction.attend import window_attention
from kvbench.models import describe
from kvbench.tiny import path as tiny_path
from kvbench.train.head_data import Example, text_examples, tiny_examples

BLOCK = 512  # queries of a layer that attend at once
LONGEST = 4096  # tokens of an example, whatever the model could read
Tick = Callable[[int, int], None]  # (examples done, tokens read)


@dataclass(frozen=True, slots=True)
class Made:
    """A table that was written, and its card."""

    path: Path
    table: torch.Tensor
    card: dict[str, Any]


def make(kind: str, model: str, out: Path, *, samples: int, seed: int, device: str, tick: Tick | None = None) -> Made:
    """kind: "headkv" or "duo"; model: as everywhere, "tiny", a folder or a hub name. Raises SetupError, UserError."""
    folder = describe(model).folder
    tiny = folder is not None and folder.resolve() == tiny_path().resolve()
    loaded = load(str(folder or model), device=device)
    examples = tiny_examples(samples, seed) if tiny else _texts(loaded, samples, seed)
    how: dict[str, Any] = {
        "how": "estimated from attention, not trained",
        "data": "problems of lookup-8" if tiny else "codes among unrelated sentences, English",
        "command": f"kvbench train {kind} --model {model} --samples {samples} --seed {seed} --out DIR",
        "samples": samples,
        "seed": seed,
        "tokens": sum(len(example.ids) for example in examples),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }
    if kind == "headkv":
        name, table = "importance", importance(loaded, examples, tick)
    else:
        # What a streaming head keeps; the built-in model's prompts are a tenth as long as texts.
        sinks, recent = (4, 32) if tiny else (64, 256)
        name, table = "alpha", alpha(loaded, examples, sinks, recent, tick)
        how |= {"sinks": sinks, "recent": recent}
    path = out / f"{kind}.safetensors"
    return Made(path, table, save_weights(path, kind, {name: table}, loaded.model.config, base_model=model, made=how))


def _texts(loaded: LoadedModel, samples: int, seed: int) -> list[Example]:
    tokenizer = loaded.tokenizer
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    return text_examples(encode, samples, seed, first, min(loaded.context, LONGEST))


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


def alpha(
    model: LoadedModel, examples: Sequence[Example], sinks: int, recent: int, tick: Tick | None = None
) -> torch.Tensor:
    """[L, Hk] share of attention that falls on neither the first `sinks` nor the newest `recent` tokens, mean over a
    group of query heads. 0 is a head that a streaming cache serves as well.
    """

    def far(example: Example, device: torch.device) -> torch.Tensor:
        keys = torch.arange(len(example.ids), device=device)
        rows = torch.tensor(example.rows, device=device)[:, None]
        return (keys >= sinks) & (keys <= rows - recent)

    shares = attention_shares(model, examples, far, tick)
    heads = {g.kv_heads for g in model.geometry}
    if len(heads) > 1:
        raise SetupError("layers of this model differ in KV heads; one table cannot hold them.")
    return shares.view(len(model.geometry), heads.pop(), -1).mean(dim=-1).float()


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
