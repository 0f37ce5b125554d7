"""expected-attention: keep the entries that future queries will attend to, as the statistics of past queries predict.

Paper: Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution,
arXiv 2510.00636 (NVIDIA/kvpress).

Queries before rotation are modelled as Gaussian, with mean m and (population) covariance S over all tokens seen except
the first `sinks`. R is the rotation averaged over the next `n_future` positions, mu = R m and Sigma = R S R^T. For each
query head

    a_j = softmax_j(mu k_j / sqrt(d) + k_j^T Sigma k_j / (2 d))      over all entries but the sinks

and the score is (mean of a_j over the group + epsilon) * |v_j|; `vnorm=false` omits the factor |v_j|. Sinks always
stay. Where another protection (`--protect`) does not keep one of the first `sinks` tokens, its entry is scored like all
others. Defaults: n_future 512, sinks 4, epsilon 0.

kvpress computes the moments from the prompt, and while decoding from the last hidden states that it stored. Here each
layer has running moments, which every later query updates.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Needs, Protect, State, option
from kvbench.eviction.rope import Rope
from kvbench.eviction.select import competing
from kvbench.eviction.terms.blocks import blocks, in_blocks
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("expected-attention")
@dataclass(frozen=True)
class ExpectedAttention(Method):
    paper = "Devoto et al., arXiv 2510.00636"
    version = "2"  # 2: first tokens that another protection does not keep are scored
    stacked = True

    n_future: int = option(512, "number of next positions over which the rotation is averaged", low=1)
    sinks: int = option(4, "first tokens, which always stay; their queries do not count", low=0)
    covariance: bool = option(True, "use the covariance of the queries, not their mean alone")
    vnorm: bool = option(True, "multiply an entry's score by the norm of its value")
    epsilon: float = option(0.0, "number added to the expected attention before the multiplication by the norm", low=0)

    def needs(self) -> Needs:
        return Needs(queries="since_last", values=self.vnorm, rope=True)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks)

    def states(self) -> tuple[State, ...]:
        spread = (State(name="spread", shape=("query_heads", "head_dim", "head_dim")),) if self.covariance else ()
        return (State(name="count"), State(name="mean", shape=("query_heads", "head_dim")), *spread)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        """Merge the mean and covariance of new queries into the stored mean and covariance of all earlier ones. A sum
        of squares would lose precision in float32; merging means and covariances does not."""
        parts = [self._merge(view, block) for block in blocks(view.queries, view.queries.shape[1:].numel())]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _merge(self, view: LayerView, block: slice) -> dict[str, torch.Tensor]:
        """Do what `observe` does, for a block of the view's rows."""
        at = view.query_positions[block]
        queries = view.rotate(view.queries[block], -at)
        counted = (at >= self.sinks)[:, None, :, None]  # [b, 1, w, 1]
        new = counted.sum(dim=(1, 2, 3)).float()
        old, before = view.states["count"][block], view.states["mean"][block]
        total = (old + new).clamp_min(1)
        mean = torch.where(counted, queries, 0.0).sum(dim=2) / new.clamp_min(1)[:, None, None]
        gap = mean - before
        values = {"count": old + new, "mean": before + gap * (new / total)[:, None, None]}
        if self.covariance:
            centred = torch.where(counted, queries - mean[:, :, None], 0.0)
            between = gap[..., :, None] * gap[..., None, :] * (old * new / total)[:, None, None, None]
            values["spread"] = view.states["spread"][block] + centred.transpose(-1, -2) @ centred + between
        return values

    def score(self, view: LayerView) -> torch.Tensor:
        among = competing(self, view) | (view.valid & (view.positions >= self.sinks))
        logits = self._logits(view, torch.where(view.valid[..., None], view.keys.float(), 0.0))
        expected = logits.masked_fill(~among[:, :, None], float("-inf")).softmax(dim=-1).mean(dim=2)
        expected = torch.where(among, expected, 0.0)  # the softmax is NaN for a head that holds only sinks
        if not self.vnorm:
            return expected
        assert view.values is not None
        return torch.where(among, (expected + self.epsilon) * view.values.float().norm(dim=-1), 0.0)

    def _logits(self, view: LayerView, keys: torch.Tensor) -> torch.Tensor:
        """Return [b, Hk, g, N]: per key k, the logarithm of the mean of exp(q k / sqrt(d)) over future queries q. With
        `covariance` off, the mean of q k / sqrt(d)."""
        assert view.rope is not None, "the method declares Needs(rope=True)"
        b, heads = keys.shape[:2]
        d = keys.shape[-1]
        turn = mean_rotation(view.rope, view.seen, self.n_future, d)  # [b, d, d]
        mean = (view.states["mean"] @ turn.transpose(-1, -2)).view(b, heads, -1, d)
        logits = (keys @ mean.transpose(-1, -2)).transpose(-1, -2) * view.scaling
        if self.covariance:
            spread = view.states["spread"] / view.states["count"].clamp_min(1)[:, None, None, None]
            spread = (turn[:, None] @ spread @ turn[:, None].transpose(-1, -2)).view(b, heads, -1, d, d)
            logits = logits + 0.5 * view.scaling**2 * _squares(keys, spread)
        return logits


def _squares(keys: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Return k^T S k [b, Hk, g, N] for keys k [b, Hk, N, d] and covariances S [b, Hk, g, d, d]."""

    def of_rows(some: slice) -> torch.Tensor:
        k, s = keys[some], spread[some]
        return torch.stack([((k @ s[:, :, head]) * k).sum(dim=-1) for head in range(s.shape[2])], dim=2)

    return in_blocks(keys, keys.shape[1:].numel(), of_rows)


def mean_rotation(rope: Rope, start: torch.Tensor, count: int, d: int) -> torch.Tensor:
    """Return RoPE's rotation averaged over positions start .. start + count - 1: [b, d, d] float32, for start [b]."""
    frequencies = rope.frequencies.to(start.device, torch.float64)
    ahead = torch.arange(count, device=start.device, dtype=torch.float64)[:, None] * frequencies  # [count, r / 2]
    angles = start.double()[:, None] * frequencies  # [b, r / 2]
    # The mean of the rotations by start + n is the rotation by start times the mean of those by n.
    mean_cos, mean_sin = ahead.cos().mean(dim=0), ahead.sin().mean(dim=0)
    cos = (angles.cos() * mean_cos - angles.sin() * mean_sin).float()
    sin = (angles.sin() * mean_cos + angles.cos() * mean_sin).float()
    half = len(frequencies)
    first = torch.arange(half, device=start.device)
    first, second = (2 * first, 2 * first + 1) if rope.interleaved else (first, first + half)
    matrix = torch.eye(d, device=start.device).repeat(len(start), 1, 1)  # RoPE leaves other dimensions alone
    matrix[:, first, first], matrix[:, second, second] = cos, cos
    matrix[:, first, second], matrix[:, second, first] = -sin, sin
    return matrix
