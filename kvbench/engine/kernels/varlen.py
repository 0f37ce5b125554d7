"""A decode step's attention by `torch.nn.attention.varlen`, flash-attention as it ships with torch 2.13.

The kernel gets every KV head of every slot as a sequence of its own, with one new token and with the query heads of the
group. `num_splits=1` keeps the kernel from splitting a sequence. If the kernel chose the number of splits, that number
would depend on the longest sequence, so a slot's result would depend on the other slots.
"""

from __future__ import annotations

import importlib.util

import torch

from kvbench.engine.cache.paged import PagedCache
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.kernels.masked import write
from kvbench.errors import SetupError, UserError

LARGEST = 256  # head dimension


def check_torch() -> None:
    """Raise SetupError if torch lacks `torch.nn.attention.varlen` with the argument `seqused_k`."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        from torch.nn.attention.varlen import varlen_attn

        if "seqused_k" in varlen_attn.__annotations__:
            return
    raise SetupError(
        f"--decode-attn varlen needs torch 2.13 or newer; this is torch {torch.__version__}. Use --decode-attn triton."
    )


def check_cache(cache: SlotCache) -> None:
    """Raise UserError for a cache with a layer that `torch.nn.attention.varlen` does not support."""
    for g in cache.geometry:
        check(cache.device, cache.dtype, g.head_dim, g.read_dim, isinstance(cache, PagedCache), g.softcap)


def check(
    device: torch.device, dtype: torch.dtype, dim: int, value_dim: int, paged: bool, softcap: float | None
) -> None:
    """Raise UserError for a layer that `torch.nn.attention.varlen` does not support."""
    refusals = {
        f"the device {device.type}": device.type != "cuda",
        str(dtype).removeprefix("torch."): dtype not in (torch.bfloat16, torch.float16),
        "the paged layout": paged,
        "a softcap of attention": softcap is not None,
        "keys and values of different dimensions": value_dim != dim,
        f"head dimension {dim}": dim > LARGEST,
    }
    for what, refused in refusals.items():
        if refused:
            raise UserError(f"--decode-attn varlen does not support {what}. Use --decode-attn triton.")


def decode(
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
) -> torch.Tensor:
    """Write each live slot's new entry and return the attention [S, Hq, Dv]; see `backends.Decode`."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    assert sums is None, "the kernel returns no attention weights, see `layout.sums_attention`"
    check(query.device, query.dtype, query.shape[-1], latent or value.shape[-1], table is not None, softcap)
    slots, heads, rows, dim = keys.shape
    for store, new in ((keys, key), (values, value)):
        write(store, new, lengths, live, rows)
    sequences = slots * heads
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=query.device)
    used = (lengths + 1).clamp(max=rows) * (live[:, None] != 0)
    out, lse = varlen_attn(
        query.reshape(sequences, -1, dim),
        keys.view(-1, 1, dim),
        values.view(-1, 1, dim),
        cu_seq_q=starts,
        cu_seq_k=starts * rows,
        max_q=1,
        max_k=rows,
        return_aux=AuxRequest(lse=True),
        scale=scaling,
        enable_gqa=True,
        seqused_k=used.expand(slots, heads).reshape(-1).int(),
        num_splits=1,
    )
    out = out.view(slots, -1, dim)
    if sinks is not None:  # lse: [G, S * Hk]; the virtual key takes a share of the softmax from the others
        share = torch.sigmoid(lse.T.reshape(slots, -1) - sinks.float())
        out = (out * share[..., None]).to(out.dtype)
    return torch.where(live[:, None, None] != 0, out, 0)
