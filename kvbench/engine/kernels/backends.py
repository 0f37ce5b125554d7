"""The functions that compute a decode step's attention, chosen by name.

`triton` reads only the entries that a head holds, `torch` reads all cache rows with PyTorch's own operations and masks
the empty rows, `varlen` calls the attention that ships with torch 2.13. All give the same attention within rounding.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, Protocol, get_args

import torch

from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.errors import SetupError
from kvbench.records import Sampling

Backend = Literal["triton", "torch", "varlen"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

PROGRAMS = 264  # two for each of 132 multiprocessors: fixed, so that results do not depend on the device's size
LONGEST_SHARE, SHORTEST_SHARE = 4096, 256  # most and fewest cache rows per split when a head is full


class Decode(Protocol):
    """Write the new entry of every live slot to the cache; return the attention to this entry and all earlier ones.

    Each head of a slot has P cache rows, places for one entry each. With n earlier entries (`lengths`) it writes cache
    row n % P and reads cache rows 0 to min(n, P - 1). So a sliding-window layer passes its window as P and the tokens
    seen as `lengths`.

    Args:
        query: [S, Hq, D]; key: [S, Hk, D]; value: [S, Hk, Dv], of the new token.
        keys: [S, Hk, P, D], contiguous; or with a table the pool [pages * 16, D]. values: the same with Dv.
        lengths: integers [S, Hk], or [S, 1] for all heads: entries before this step.
        live: integers [S]. A slot with 0 leaves the cache as it was, and its result is zero.
        splits: programs per head, from the function `splits`; a layer gets the same number in every step of an engine.
        table: [S, Hk, W] int32 or int64, contiguous: the pages of every head in order.
        sinks: [Hq] logits of a virtual key without value.
        latent: in latent attention, how many of a key's first numbers are its value; value and values then have Dv 0.

    Returns [S, Hq, Dv or latent]. Never waits for the device; all calls may be captured in a CUDA graph.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        live: torch.Tensor,
        *,
        scaling: float,
        splits: int,
        table: torch.Tensor | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        latent: int = 0,
    ) -> torch.Tensor: ...


class Draw(Protocol):
    """Draw the next token for every row of logits, see `sampler.draw`."""

    def __call__(
        self, logits: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling
    ) -> torch.Tensor: ...


def splits(rows: int, heads: int) -> int:
    """Return how many GPU programs share a head of up to `rows` entries while S * Hk = `heads` heads decode at once."""
    wanted = max(-(-PROGRAMS // heads), -(-rows // LONGEST_SHARE))
    return max(1, min(wanted, -(-rows // SHORTEST_SHARE)))


def decode_with(backend: Backend, cache: SlotCache) -> Decode:
    """Return a backend's function for a cache.

    Raises SetupError where this installation lacks the backend, UserError where the backend does not serve the cache.
    """
    if backend == "triton":
        _check_triton(backend)
        from kvbench.engine.kernels.decode import decode as triton_decode

        return triton_decode
    if backend == "varlen":
        from kvbench.engine.kernels import varlen

        varlen.check_torch()
        varlen.check_cache(cache)
        return varlen.decode
    from kvbench.engine.kernels.masked import decode as masked

    return masked


def draw_with(backend: Backend) -> Draw | None:
    """Return the function that draws tokens on a GPU; None for the backend "torch", which draws by `sampler.draw`."""
    if backend == "torch":
        return None
    _check_triton(backend)
    from kvbench.engine.kernels.sample import draw

    return draw


def _check_triton(backend: Backend) -> None:
    if importlib.util.find_spec("triton") is None:
        raise SetupError(
            f"--decode-attn {backend} needs the package triton, which is not installed. Use --decode-attn torch."
        )
