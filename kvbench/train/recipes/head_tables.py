"""Estimates the table that `headkv` needs, the importance of every query head, from a model's attention.

Nothing is trained; a CPU is enough. The model reads retrieval problems with their right answers (`head_data`). The
tokens from which an answer can be copied are its evidence. For every query head, the table says how much attention the
queries that predict the answer pay to the evidence. Memory holds the attention of one layer and one block of
queries at a time.

Letters: L layers, Hq query heads.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from kvbench.engine.attention.geometry import for_lengths, homes
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError
from kvbench.eviction.terms.window_attention import window_attention
from kvbench.train.forward import forward
from kvbench.train.head_data import Example, is_tiny, source, text_examples, tiny_examples
from kvbench.train.sparse_masks import SparseAttention
from kvbench.train.tables import Estimate, OnExample

BLOCK = 512  # queries per attention call


def estimate(loaded: LoadedModel, samples: int, seed: int, on_example: OnExample | None = None) -> Estimate:
    """Estimate a model's table for `headkv`, the importance of every query head, from `samples` problems."""
    examples = tiny_examples(samples, seed) if is_tiny(loaded) else text_examples(loaded, samples, seed)
    table = importance(loaded, examples, on_example)
    tokens = sum(len(example.ids) for example in examples)
    made = {"how": "estimated from attention, not trained", "data": source(loaded), "tokens": tokens}
    made["layers"] = sorted(_evicted(loaded, examples))
    return Estimate(tensors={"importance": table}, made=made, heads=table, what="importance")


def importance(model: LoadedModel, examples: Sequence[Example], on_example: OnExample | None = None) -> torch.Tensor:
    """Return the importance [L, Hq] of every query head.

    The importance is the head's attention to the evidence, divided by the sum over all heads. Raises SetupError if no
    head attends to the evidence, or if layers have different numbers of query heads.
    """
    shares = attention_shares(model, examples, on_example)
    total = float(shares.sum())
    if total <= 0:
        raise SetupError(
            "no head attends to the tokens that answers are copied from, so no head has an importance. Use another "
            "model."
        )
    return (shares / total).float()


@torch.inference_mode()
def attention_shares(
    model: LoadedModel, examples: Sequence[Example], on_example: OnExample | None = None
) -> torch.Tensor:
    """Return, for each query head, the share of attention that it pays to the evidence, [L, Hq] in float64.

    The share is a mean over the queries that predict answers. It is 0 where methods do not evict: in layers whose
    sliding window is shorter than the longest example, and in layers that attend to the entries of an earlier layer.
    Raises SetupError if layers have different numbers of query heads.
    """
    sizes = {g.query_heads for g in model.geometry}
    if len(sizes) > 1:
        raise SetupError(
            "the table needs equally many query heads in all layers, but the model's layers differ. Use another model."
        )
    sums = torch.zeros(len(homes(model.geometry)), sizes.pop(), dtype=torch.float64)
    layers = _evicted(model, examples)
    for done, example in enumerate(examples, start=1):
        reader = _Reader(sums, layers, example, model.device)
        forward(model.model, reader, input_ids=torch.tensor([example.ids], device=model.device))
        if on_example is not None:
            on_example(done)
    return sums / sum(len(example.rows) for example in examples)


def _evicted(model: LoadedModel, examples: Sequence[Example]) -> set[int]:
    """Return the layers from which methods evict sequences as long as the examples."""
    longest = max(len(example.ids) for example in examples)
    return {g.index for g in for_lengths(model.geometry, longest) if g.evicts}


class _Reader:
    """Computes a model's attention while the model reads an example.

    For every query head of `layers` it adds to `sums` [L, Hq] the attention that the queries at `example.rows` pay to
    the evidence.
    """

    def __init__(self, sums: torch.Tensor, layers: Set[int], example: Example, device: torch.device) -> None:
        self.sums, self.layers, self.causal = sums, layers, SparseAttention({}, BLOCK)
        self.rows = torch.tensor(example.rows, device=device)
        self.evidence = torch.zeros(len(example.rows), len(example.ids), dtype=torch.bool, device=device)
        for row, positions in zip(self.evidence, example.evidence):
            row[list(positions)] = True

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        n, hk = call.key.shape[2], call.key.shape[1]
        positions = torch.arange(n, device=call.key.device)
        if call.layer in self.layers:
            at = self.rows[None], positions.expand(1, hk, -1)
            scale: dict[str, Any] = {"scaling": call.scaling, "softcap": call.softcap}
            paid = window_attention(
                call.query[:, :, self.rows], call.key, *at, None, **scale, reduce_g=None, reduce_q=None
            )  # [1, Hk, g, rows, n]
            self.sums[call.layer] += (paid * self.evidence).sum(dim=(-1, -2)).flatten().double().cpu()
        return self.causal(call)
