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
from kvbench.eviction.terms.series import table_shapes
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.taskkit.synthetic.vocabulary import ids
from kvbench.train.forward import forward
from kvbench.train.head_data import is_tiny, text_examples
from kvbench.train.sparse_masks import plain
from kvbench.train.tables import Estimate, OnExample

TINY_TEXTS = ("lookup-8", "chain-4", "orbit-300")


def estimate(loaded: LoadedModel, samples: int, seed: int, on_example: OnExample | None = None) -> Estimate:
    """Estimate a model's table for `triattention`, two means over the queries of every head, from `samples` texts."""
    texts = _texts(loaded, samples, seed)
    mean, modulus = mean_queries(loaded, texts, on_example)
    geometry = for_lengths(loaded.geometry, max(map(len, texts)))
    data = f"problems of {', '.join(TINY_TEXTS)}" if is_tiny(loaded) else "codes among unrelated sentences, English"
    made = {"how": "estimated from queries, not trained", "data": data, "tokens": sum(map(len, texts))}
    made["layers"] = [g.index for g in geometry if g.evicts]
    length = read_rope(loaded.model, loaded.geometry).moduli(mean)
    share = length.sum(-1) / modulus.sum(-1).clamp_min(torch.finfo(modulus.dtype).tiny)
    return Estimate(tensors={"mean": mean, "modulus": modulus}, made=made, heads=share, what="concentration")


def _texts(loaded: LoadedModel, samples: int, seed: int) -> list[tuple[int, ...]]:
    """Return texts as token ids: problems with solutions for the built-in model, English texts for other models."""
    if not is_tiny(loaded):
        return [example.ids for example in text_examples(loaded, samples, seed)]
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
    rope = read_rope(loaded.model, geometry)

    def add_queries(call: AttentionCall) -> torch.Tensor:
        if call.layer in layers:
            queries = rope.rotate(call.query, -torch.arange(call.query.shape[2], device=call.query.device))
            lengths = rope.moduli(queries)
            mean[call.layer] += queries[0].double().sum(dim=1).cpu()
            modulus[call.layer, :, : lengths.shape[-1]] += lengths[0].double().sum(dim=1).cpu()
        return plain(call)

    for done, text in enumerate(texts, start=1):
        forward(loaded.model, add_queries, input_ids=torch.tensor([list(text)], device=loaded.device))
        if on_example is not None:
            on_example(done)
    tokens = sum(map(len, texts))
    return (mean / tokens).float(), (modulus / tokens).float()
