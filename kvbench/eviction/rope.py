"""Rotary position embedding (RoPE), to move keys and queries from one position to another."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.lazy import torch


@dataclass(frozen=True, slots=True)
class Rope:
    """A model's rotary embedding: frequencies [r / 2] of the first r dimensions, and how dimensions are paired.

    interleaved: dimensions (0, 1), (2, 3) ... form pairs; otherwise dimensions i and i + r / 2 do.
    """

    frequencies: torch.Tensor
    interleaved: bool = False

    def rotate(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Return x [b, H, w, d] in float32, with each vector moved forward by `by` positions ([b, w] or [w]). Negative
        numbers in `by` move a vector back."""
        angles = by.double()[..., None] * self.frequencies.to(by.device, torch.float64)  # [(b,) w, r / 2]
        cos, sin = angles.cos().float(), angles.sin().float()
        if by.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        first, second = self.pairs(x.float())
        turned = first * cos - second * sin, second * cos + first * sin
        pair = torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
        rest = x[..., 2 * self.frequencies.numel() :].float()
        return torch.cat([pair, rest], dim=-1) if rest.shape[-1] else pair

    def pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first and the second number of every rotated pair of dimensions, [..., r / 2] each."""
        turned = x[..., : 2 * self.frequencies.numel()]
        if self.interleaved:
            return turned[..., ::2], turned[..., 1::2]
        first, second = turned.chunk(2, dim=-1)
        return first, second

    def moduli(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the two numbers in every rotated pair of dimensions, [..., r / 2] float32."""
        return torch.hypot(*self.pairs(x.float()))
