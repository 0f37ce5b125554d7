"""The backends of a decode step's attention: functions with one signature (`Decode`), chosen by name.

A cache row is a place for one entry of a head. `triton` reads only the rows that hold an entry. `torch` reads all rows
with PyTorch's own operations and masks the empty ones. `varlen` calls the attention that ships with torch 2.13. All
give the same attention within rounding.

Letters: S slots, Hq query heads, Hk KV heads, P cache rows per head, D and Dv dimensions of a key and a value, W pages
per head in a block table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal, Protocol, get_args

import torch

from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.errors import SetupError
from kvbench.records import Sampling

Backend = Literal["triton", "torch", "varlen"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

PROGRAMS = 264  # wanted GPU programs: 2 * 132 multiprocessors on any device, so that results do not depend on its size
LONGEST_SHARE, SHORTEST_SHARE = 4096, 256  # most and fewest cache rows of a full head that one split reads


class Decode(Protocol):
    """Write the new entry of every live slot to the cache; return the attention to this entry and all earlier ones.

    If a head has n earlier entries (`lengths`), the function writes cache row n % P of the head. It reads cache rows 0
    to min(n, P - 1). For a sliding-window layer, P is the window, and `lengths` counts all tokens seen.

    Args:
        query: [S, Hq, D]; key: [S, Hk, D]; value: [S, Hk, Dv], of the new token.
        keys: [S, Hk, P, D], contiguous; with a table, the pool [pages * 16, D]. values: the same with Dv.
        lengths: integers [S, Hk], or [S, 1] for all heads: entries before this step.
        live: integers [S]. 0: the slot's cache is not changed, and its result is zero.
        splits: number of parts into which `triton` divides a head's entries, from the function `splits`; a layer gets
            the same number in each step of an engine. The other backends ignore it.
        table: [S, Hk, W] int32 or int64, contiguous: the pages of every head in order.
        sinks: [Hq] logits of a virtual key without value.
        latent: in latent attention, how many of a key's first numbers are its value; else 0. `value` and `values` then
            hold index keys (`attention.indexer`) or nothing (Dv is 0); `triton` neither reads nor writes them.
        sums: [S, Hk, g, P] float32, contiguous; only without a table. The function adds to `sums`, for each query head
            of a live slot, the attention that every entry receives (see `grouped_attention`).

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
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sampling], torch.Tensor]  # see `sampler.draw`


def splits(rows: int, heads: int) -> int:
    """Return into how many parts `triton` divides the entries of a head, which are at most `rows`; each part has GPU
    programs of its own. heads: S * Hk, the heads that decode at once."""
    wanted = max(-(-PROGRAMS // heads), -(-rows // LONGEST_SHARE))
    return max(1, min(wanted, -(-rows // SHORTEST_SHARE)))


def decode_with(backend: Backend, cache: SlotCache) -> Decode:
    """Return a backend's attention function for a cache. Raises SetupError if this installation lacks the backend,
    UserError if the backend does not support the cache."""
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
    """Return the function that draws tokens on a GPU; None for the backend "torch", which draws by `sampler.draw`.
    Raises SetupError if triton is not installed and the backend is not "torch"."""
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
