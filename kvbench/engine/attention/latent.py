"""Latent attention (MLA): a layer's keys and values as one short vector per token, shared by all heads.

Such a layer computes the key and value of every head from the token's latent c, which has R numbers. The rotary part
k_rot of a key has r numbers and is the same for all heads. Head h has the key [U_h c, k_rot], the value V_h c and the
query q_h = [q_pass, q_rot]. Head h gives token i, whose latent is c_i, the attention weight w_i. So

    q_h . [U_h c, k_rot] = [U_h^T q_pass, q_rot] . [c, k_rot]        sum_i w_i V_h c_i = V_h (sum_i w_i c_i)

Attention therefore needs only the entries [c, k_rot], as one KV head whose value is the key's first R numbers. U is
applied to the queries and V to the result (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). This is exact up to rounding.

The latent is the input of the module's `kv_b_proj`; every size follows from the tensors' shapes.
`positions.check_latents` checks on each model that attention over latents gives the same outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

PROJECTION = "kv_b_proj"  # transformers' name of the module that computes keys and values from latents


@dataclass(frozen=True, slots=True)
class Latent:
    """The matrices of one layer that compute keys and values from a latent c of R numbers.

    up_key: [Hq, N, R] (U); up_value: [Hq, Dv, R] (V). Letters: Hq heads; N numbers of a head's key without its rotary
    part (U_h c); Dv numbers of a head's value (V_h c). Letters in the methods' shapes: b sequences; t tokens; r
    (not R) numbers of the rotary part.
    """

    up_key: torch.Tensor
    up_value: torch.Tensor

    @property
    def rank(self) -> int:
        """The size of a latent, R."""
        return self.up_key.shape[2]

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Convert the model's queries [b, Hq, t, N + r] into queries [b, Hq, t, R + r] for attention to the entries.
        The result is [U^T q_pass, q_rot]."""
        plain, rotary = query.split([self.up_key.shape[1], query.shape[3] - self.up_key.shape[1]], dim=-1)
        return torch.cat([torch.einsum("bhtn,hnr->bhtr", plain, self.up_key), rotary], dim=-1)

    def entries(self, latent: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return the entries [b, 1, t, R + r] of tokens. latent: the tokens' latents [b, 1, t, R]; key: the tokens'
        keys [b, Hq, t, N + r], of which only the rotary part is used."""
        return torch.cat([latent, key[:, :1, :, self.up_key.shape[1] :]], dim=-1)

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """Convert attention-weighted latents [b, t, Hq, R] into the attention output [b, t, Hq, Dv]."""
        return torch.einsum("bthr,hvr->bthv", out, self.up_value)


class Latents:
    """The matrices (`Latent`) of a model's latent layers.

    If a layer's projection (`PROJECTION`) is a plain linear layer, its matrices are views of the projection's weight.
    If the projection is another module, its matrices are computed on first use and kept.
    """

    def __init__(self) -> None:
        self._unfolded: dict[int, torch.Tensor] = {}  # of modules other than nn.Linear, by id()

    def of(self, projection: torch.nn.Module, rank: int, key: torch.Tensor, value: torch.Tensor) -> Latent:
        """Return the matrices of a layer, split from the weight of `projection`. rank: R.

        key, value: [b, Hq, t, ...], keys and values that the layer computed with `projection`. The method uses
        only their sizes, and the dtype and device of `key`.
        """
        weight = self._weight(projection, rank, key)
        heads, dv = key.shape[1], value.shape[3]
        plain = weight.shape[0] // heads - dv
        up = weight.view(heads, plain + dv, rank)
        return Latent(up[:, :plain], up[:, plain:])

    def _weight(self, projection: Any, rank: int, like: torch.Tensor) -> torch.Tensor:
        """Return the matrix [out, R] by which the projection multiplies latents. If the projection is quantised or has
        an adapter, the matrix is its output for unit vectors, in the dtype and on the device of the tensor `like`."""
        if type(projection) is torch.nn.Linear:
            return projection.weight
        found = self._unfolded.get(id(projection))
        if found is None or (found.device, found.dtype) != (like.device, like.dtype):
            unit = torch.eye(rank, dtype=like.dtype, device=like.device)
            found = self._unfolded[id(projection)] = projection(unit).T.contiguous()
        return found


def projections(model: Any) -> dict[int, torch.nn.Module]:
    """Return the module that computes keys and values from latents in each latent layer, by the layer's index."""
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, PROJECTION)]
    return {int(layer.layer_idx): getattr(layer, PROJECTION) for layer in layers}
