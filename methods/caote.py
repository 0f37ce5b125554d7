"""caote: keep the tokens without which the output of attention would change most.

Paper: Goel et al., CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token Eviction,
arXiv 2504.14051. If token j with attention a_j and value v_j is removed, the output o = sum_i a_i v_i changes by

    c_j = a_j / (1 - a_j) * |o - v_j|_2

form=mean     score c_j, with one averaged row a per KV head: the newest `window` queries attend to all older entries
              (the softmax excludes the window). a is a mean over queries and group, then pooled, then clamped to
              the range from 1e-6 to 1 - 1e-6.
form=squared  DropKV (openreview.net/forum?id=UVbaJoD3Qa), after the prompt only: each query of the window has its own
              row a and its own output o, and attends to all entries. Score: sum over the window, mean over the group,
              of (a_j / (1 - a_j + 1e-6))^2 |o - v_j|^2, then pooling over all entries.

The window always stays. The paper evicts token after token by the output of each query head; its authors released no
code. form=mean follows the code of Random Attention (arXiv 2609.03430): it evicts many tokens at once, window 64,
optional average pooling of 5. DropKV's defaults: window 8, average pooling of 11.
Traps: a / (1 - a) is much larger than a only at sinks: DropKV's weights reach 1e12. Pooled attention does not sum to 1.
DropKV pools before it protects the window, so the window's scores leak into the entries before the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Every, Method, Needs, Once, Protect, Trigger, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

LEAST = 1e-6


@methods.register("caote")
@dataclass(frozen=True)
class CAOTE(Method):
    paper = "Goel et al., arXiv 2504.14051"

    form: Literal["mean", "squared"] = option(
        "mean",
        "mean: score by the output error of one averaged attention row; squared: by squared errors of each query's row",
    )
    window: int | None = option(
        None,
        "newest tokens: their queries vote, and they always stay; none: 64 with form=mean, 8 with form=squared",
        low=1,
    )
    kernel: int | None = option(
        None, "width of average pooling; none: 1 with form=mean, 11 with form=squared", low=1, odd=True
    )
    sinks: int = option(0, "first tokens that always stay", low=0)

    @property
    def voters(self) -> int:
        return self.window or {"mean": 64, "squared": 8}[self.form]

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.voters, keys=False, values=True)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=self.voters)

    def summed(self, view: LayerView) -> int:
        return self.voters if self.form == "squared" else 1

    def trigger(self, interval: int) -> Trigger:
        return Every(interval) if self.form == "mean" else Once()

    def score(self, view: LayerView) -> torch.Tensor:
        view = view.last_queries(self.voters)  # a combined method may need more queries
        assert view.values is not None
        values = torch.where(view.valid[..., None], view.values.float(), 0.0)
        return self._of_rows(view, values) if self.form == "squared" else self._of_mean(view, values)

    def _of_mean(self, view: LayerView, values: torch.Tensor) -> torch.Tensor:
        among = view.older(self.voters)
        paid = view.attend(domain="outside_window")
        if (self.kernel or 1) > 1:
            paid = view.pool(paid, "avg", self.kernel or 1, among)
        paid = torch.where(among, paid.clamp(LEAST, 1 - LEAST), 0.0)
        error = (values - (paid[:, :, None] @ values)).norm(dim=-1)
        return torch.where(among, paid / (1 - paid) * error, float("-inf"))

    def _of_rows(self, view: LayerView, values: torch.Tensor) -> torch.Tensor:
        paid = view.attend(reduce_g=None, reduce_q=None)  # [b, Hk, g, w, N]
        group, rows = paid.shape[2], paid.flatten(2, 3)
        error = torch.cdist(rows @ values, values, compute_mode="donot_use_mm_for_euclid_dist")
        score = (rows / (1 - rows + LEAST) * error).square().sum(dim=2) / group
        return view.pool(score, "avg", self.kernel or 11, view.valid)
