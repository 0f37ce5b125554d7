"""Estimates the table of `triattention`: for every head, two means over its queries before RoPE.

The means are the mean query, and the mean length of each pair of dimensions that RoPE rotates together. The model reads
the texts of `head_data`; the built-in model reads synthetic problems with solutions. Every token's query is rotated
back by its position.

The method predicts a head's attention well if the head's queries lie close to one centre. Then every pair of dimensions
has nearly the same length in the mean query as it has in the queries on average.

Letters: L layers, Hq query heads, d size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import torch

from kvbench.engine.attention.geometry import for_lengths
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.attention.rope import read_rope
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import model_fields
from kvbench.eviction.rope import Rope
from kvbench.eviction.terms.series import table_shapes
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.taskkit.synthetic.vocabulary import ids
from kvbench.train.forward import forward
from kvbench.train.head_data import encoder, first_ids, is_tiny, text_examples
from kvbench.train.sparse_masks import plain
from kvbench.train.tables import Estimate, OnExample

LONGEST = 4096  # most tokens of a text, even if the model's context is longer
TINY_TEXTS = ("lookup-8", "chain-4", "orbit-300")


def estimate(loaded: LoadedModel, samples: int, seed: int, on_example: OnExample | None = None) -> Estimate:
    """Estimate a model's table for `triattention`, two means over the queries of every head, from `samples` texts."""
    texts = _texts(loaded, samples, seed)
    mean, modulus = mean_queries(loaded, texts, on_example)
    data = f"problems of {', '.join(TINY_TEXTS)}" if is_tiny(loaded) else "codes among unrelated sentences, English"
    made = {"how": "estimated from queries, not trained", "data": data, "tokens": sum(map(len, texts))}
    length = read_rope(loaded.model, loaded.geometry).moduli(mean)
    share = length.sum(-1) / modulus.sum(-1).clamp_min(torch.finfo(modulus.dtype).tiny)
    return Estimate(tensors={"mean": mean, "modulus": modulus}, made=made, heads=share, what="concentration")


def _texts(loaded: LoadedModel, samples: int, seed: int) -> list[tuple[int, ...]]:
    """Return texts as token ids: problems with solutions for the built-in model, English texts for other models."""
    if not is_tiny(loaded):
        longest = min(loaded.context, LONGEST)
        return [e.ids for e in text_examples(encoder(loaded), samples, seed, first_ids(loaded), longest)]
    draw = Draw("mean queries", seed)  # below: seeds of problems that no evaluation uses
    problems = [VARIANTS[name].generate(draw.below(HELD_OUT)) for name in islice(cycle(TINY_TEXTS), samples)]
    return [tuple(ids([*problem.prompt_pieces, *problem.solution_pieces])) for problem in problems]


@torch.inference_mode()
def mean_queries(
    loaded: LoadedModel, texts: Sequence[Sequence[int]], on_example: OnExample | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two means over all tokens: the mean query, [L, Hq, d], and the mean length of each pair, [L, Hq, d / 2].

    A pair: two dimensions of a query that RoPE rotates together. Both means are 0 in layers from which methods evict no
    entries.
    """
    geometry = for_lengths(loaded.geometry, max(map(len, texts)))
    shapes = table_shapes(model_fields(loaded.model.config))
    mean, modulus = (torch.zeros(shapes[name], dtype=torch.float64) for name in ("mean", "modulus"))
    layers = {g.index for g in geometry if g.evicts}
    collector = _Collector(mean, modulus, read_rope(loaded.model, geometry), layers)
    for done, text in enumerate(texts, start=1):
        forward(loaded.model, collector, input_ids=torch.tensor([list(text)], device=loaded.device))
        if on_example is not None:
            on_example(done)
    tokens = sum(map(len, texts))
    return (mean / tokens).float(), (modulus / tokens).float()


class _Collector:
    """Computes a model's attention, and adds up its queries before RoPE.

    Each query is added to `mean`, and the lengths of its pairs of dimensions to `modulus`. layers: the layers whose
    queries are added.
    """

    def __init__(self, mean: torch.Tensor, modulus: torch.Tensor, rope: Rope, layers: set[int]) -> None:
        self.mean, self.modulus, self.rope, self.layers = mean, modulus, rope, layers

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.layers:
            queries = self.rope.rotate(call.query, -torch.arange(call.query.shape[2], device=call.query.device))
            lengths = self.rope.moduli(queries)
            self.mean[call.layer] += queries[0].double().sum(dim=1).cpu()
            self.modulus[call.layer, :, : lengths.shape[-1]] += lengths[0].double().sum(dim=1).cpu()
        return plain(call)
