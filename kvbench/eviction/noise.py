"""Counter-based random numbers: a hash of integers, equal on every device and in every batch.

The hash is splitmix64's finaliser in wrapping int64 arithmetic. Torch shifts int64 arithmetically, so every right shift
is masked to make it logical; without the mask the bits are visibly not uniform.
"""

from __future__ import annotations

from kvbench.lazy import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)


def signed64(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def mix(*parts: torch.Tensor | int) -> torch.Tensor:
    """Return an int64 hash of integers and int64 tensors. Tensors broadcast, and give a hash per element."""
    state = _finalise(torch.as_tensor(parts[0]) + _GOLDEN)
    for part in parts[1:]:
        state = _finalise(state + part + _GOLDEN)
    return state


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Map hashed int64 to float64 in the open interval (0, 1). The result is (k + 0.5) / 2^52, where k is the number in
    the upper 52 bits. With 53 bits, the largest result would be rounded to 1."""
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def _shift(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def _finalise(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_A
    x = (x ^ _shift(x, 27)) * _MIX_B
    return x ^ _shift(x, 31)
