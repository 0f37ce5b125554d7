"""triattention: score keys by the attention that the mean query of each head will pay at many distances ahead.

Paper: Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, arXiv 2604.04921.

Before rotation, the queries of a head lie around a centre q. With RoPE the logit of q and a key is a trigonometric
series in their distance, one term per pair f of rotated dimensions. With T tokens seen, key position p and offsets
d = 1, 2, 4 ... `reach`:

    S_j = mean (or max) over d of  q rotated to T + d, times k_j rotated to p    +    sum_f (E|q_f| - |q_f|) |k_jf|

The product equals sum_f |q_f||k_f| cos(w_f (T - p + d) + phase), so the keys need no rotation back. The scores S of a
query head are standardised over the scored entries (`normalize`). `level` says which entries share a score:

    head        largest over the group, then mean over the layers: one set of tokens per KV head, the same in all layers
    layer_head  largest or mean over the group (option `group`): every KV head of every layer has its own set of tokens
    all         largest over all heads of all layers: one set of tokens for the whole model

The tokens of the prompt stay and are not scored, as long as the budget has room for another entry. Otherwise they
compete; with prompt=score they always compete. q and E|q_f| are a table (`mean`, `modulus`) that
`kvbench train triattention` estimates. Defaults: those of the released runners; their budget is 2,048, their interval
128.

Traps: the next query's own distance (d = 0) is not among the offsets. Angles reach 65,536 rad and need double
precision. If the prompt fills the budget, the released code keeps the prompt's first tokens and drops every generated
token. It evicts at C + interval entries (C: the budget), and adds noise of 1e-6 to break ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Method, Needs, ScoreOut, option
from kvbench.eviction.learned import LearnedWeights
from kvbench.eviction.select import competing
from kvbench.eviction.terms.series import series, standardised, table_misfit, table_shapes
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("triattention")
@dataclass(frozen=True)
class TriAttention(Method):
    paper = "Mao et al., arXiv 2604.04921"
    kind = "weights"
    trained = True

    table: str = option("auto", "file with the mean queries; auto: triattention.safetensors beside the model")
    level: Literal["head", "layer_head", "all"] = option(
        "head",
        "which tokens stay. head: one set per KV head, the same in all layers; layer_head: one set for every head of "
        "every layer; all: one set for the whole model",
    )
    reach: int = option(65536, "largest offset beyond the next position", low=1)
    over: Literal["mean", "max"] = option("mean", "how a key's scores at the offsets become one score")
    group: Literal["max", "mean"] = option("max", "how the query heads of a group are merged (level=layer_head)")
    normalize: bool = option(True, "standardise the scores of each query head")
    trig: bool = option(
        True, "score a key by its product with the mean query plus its weighted norm; false: by the weighted norm alone"
    )
    spread: bool = option(
        True,
        "weigh a key's norm by the queries' mean norm minus the norm of the mean query; false: by the queries' mean "
        "norm",
    )
    prompt: Literal["keep", "score"] = option("keep", "whether the prompt stays, or competes")

    @property
    def joint(self) -> bool:  # type: ignore[override]  # an option decides
        return self.level != "layer_head"

    def needs(self) -> Needs:
        return Needs(rope=True)

    def weights(self) -> LearnedWeights:
        where = {"kind": "triattention", "path": self.table, "recipe": "triattention", "option": "table"}
        return LearnedWeights(**where, what="table", shapes=table_shapes, check=table_misfit)

    def score(self, view: LayerView) -> torch.Tensor:
        keeps = self.prompt == "keep" and self.replaced is None
        room = view.prompt_len < view.budget if keeps else torch.zeros_like(view.seen, dtype=torch.bool)
        stays = (view.positions < view.prompt_len[:, None, None]) & room[:, None, None]
        among = competing(self, view) & ~stays
        scores = series(view, self.reach, over=self.over, trig=self.trig, spread=self.spread)  # [b, Hk, g, N]
        if self.normalize:
            scores = standardised(scores, among[:, :, None])
        mean = self.level == "layer_head" and self.group == "mean"
        return torch.where(stays, float("inf"), scores.mean(dim=2) if mean else scores.amax(dim=2))

    def settled(self, views: Sequence[LayerView], outs: list[ScoreOut]) -> list[ScoreOut]:
        merge = _mean_of_layers if self.level == "head" else _best_of_heads
        return [ScoreOut(score) for score in merge(views, [out.score for out in outs])]


def _mean_of_layers(views: Sequence[LayerView], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor [b, Hk, N] per layer: for each entry of head h, the mean score of its token in head h. The mean
    is over those layers whose head h still holds the token. All layers must have the same number of heads."""
    total = views[0].keys.new_zeros(*views[0].positions.shape[:2], _end(views) + 1, dtype=torch.float64)
    count = torch.zeros_like(total)
    for at, score in zip(_places(views), scores):
        total.scatter_add_(-1, at, score.double())
        count.scatter_add_(-1, at, torch.ones_like(at, dtype=torch.float64))
    return [(total.gather(-1, at) / count.gather(-1, at)).float() for at in _places(views)]


def _best_of_heads(views: Sequence[LayerView], scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor [b, Hk, N] per layer: for each entry, the best score of its token in any head of any layer."""
    best = scores[0].new_full((len(scores[0]), _end(views) + 1), float("-inf"))
    for at, score in zip(_places(views), scores):
        best.scatter_reduce_(-1, at.flatten(1), score.flatten(1), "amax")
    return [best.gather(-1, at.flatten(1)).view_as(at) for at in _places(views)]


def _places(views: Sequence[LayerView]) -> Iterator[torch.Tensor]:
    """Yield the positions of each layer's entries [b, Hk, N]; invalid entries get a number above all positions."""
    yield from (torch.where(view.valid, view.positions, _end(views)) for view in views)


def _end(views: Sequence[LayerView]) -> int:
    return max(view.longest for view in views)
