"""lookaheadkv: learned tokens after the prompt imitate the answer's queries, and their attention ranks the entries.

Paper: LookaheadKV, arXiv 2603.10899, Algorithm 2.

The weights file has n learned embeddings. After the prompt the model reads them as if they were further tokens. A
low-rank adapter acts on these learned tokens only, so it does not change the prompt's keys and values. The attention of
the learned tokens ranks the prompt's entries, once:

    s_j = mean over the n learned tokens of softmax( q . k / sqrt(D) )_j,  over prompt and learned tokens

The learned tokens are then dropped, and the plain model decodes. The paper leaves three things open, which are options
here: how the query heads of a group are reduced (default: mean), the width of pooling (default: none) and how many of
the newest tokens stay (default: none). `kvbench train lookaheadkv` makes the weights; no code was released.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Column, Method, Needs, Once, Probe, Prompt, Protect, Trigger, option
from kvbench.eviction.learned import LearnedWeights, Shapes, Sizes
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

RANK, ROWS = 8, 8  # adapter rank and n of random weights for checks; files may have other sizes


@methods.register("lookaheadkv", aliases=("lookahead-kv", "lkv"))
@dataclass(frozen=True)
class LookaheadKV(Method):
    paper = "arXiv 2603.10899, Algorithm 2"
    kind = "probes"
    trained = True

    lookahead: str = option("auto", "file with embeddings and adapter; auto: lookaheadkv.safetensors beside the model")
    reduce_g: Literal["mean", "max"] = option("mean", "how the query heads of a group become one score")
    kernel: int = option(1, "max-pooling width, 1 for none", low=1, odd=True)
    recent: int = option(0, "newest prompt tokens that always stay", low=0)

    def needs(self) -> Needs:
        return Needs(probes=True)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="lookahead"),)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def unscored(self) -> int:
        return self.recent

    def summed(self, view: LayerView) -> int:
        return len(view.weights["embeddings"])

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def weights(self) -> LearnedWeights:
        where = {"kind": "lookaheadkv", "path": self.lookahead, "recipe": "lookaheadkv", "option": "lookahead"}
        return LearnedWeights(**where, what="lookahead", shapes=_shapes, check=_misfit)

    def probes(self, prompt: Prompt) -> Generator[Probe, int, None]:
        yield Probe(learned="embeddings")

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        return {"lookahead": view.columns["lookahead"] + view.attend(reduce_g=self.reduce_g, reduce_q="sum")}

    def score(self, view: LayerView) -> torch.Tensor:
        return view.pool(view.columns["lookahead"], "max", self.kernel, view.older(self.recent))


def _shapes(model: Sizes) -> Shapes:
    """Return the shapes of random weights for tests and audits: embeddings, and an adapter of the attention projections
    with its scaling. Other projections get no adapter, because not every model's configuration states their sizes."""
    hidden, dim = model["hidden_size"], model["head_dim"]
    query, key = model["num_attention_heads"] * dim, model["num_key_value_heads"] * dim
    sizes = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    shapes: Shapes = {"embeddings": (ROWS, _width(model)), "scaling": (1,)}
    for layer in range(model["num_hidden_layers"]):
        for name, (wide, out) in sizes.items():
            shapes |= {f"A.{layer}.{name}": (RANK, wide), f"B.{layer}.{name}": (out, RANK)}
    return shapes


def _width(model: Sizes) -> int:
    """Return the size of the model's embeddings; in OPT, a projection follows that makes hidden states of them."""
    return model.get("word_embed_proj_dim") or model["hidden_size"]


def _misfit(tensors: Mapping[str, torch.Tensor], model: Sizes) -> str:
    if {"embeddings", "scaling"} - tensors.keys():
        return "the tensor 'embeddings' or 'scaling' is missing"
    if (size := tensors["embeddings"].shape[-1]) != _width(model):
        return f"the learned embeddings have size {size}, but the model's embeddings have {_width(model)}"
    alone = {name[2:] for name in tensors if name[:2] in ("A.", "B.")}
    half = [name for name in sorted(alone) if f"A.{name}" not in tensors or f"B.{name}" not in tensors]
    return f"the adapter of {half[0]} lacks one of its two matrices" if half else ""
