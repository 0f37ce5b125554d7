"""A base class that refuses operations of transformers' caches: changes of a batch's sequences, and deep copies."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from kvbench.errors import UserError


class FixedBatch(Cache):
    """A cache whose sequences cannot be reordered, repeated, selected, shortened or deep-copied."""

    is_compileable = False

    def get_max_cache_shape(self, layer_idx: int | None = 0) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise UserError("EvictionCache does not support beam search; use num_beams=1.")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UserError("EvictionCache cannot remove tokens that were read; generate without assisted decoding.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UserError("EvictionCache does not repeat sequences of its batch; repeat the prompt instead.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UserError("EvictionCache does not select sequences of its batch; make a new cache for the selected ones.")

    def __deepcopy__(self, memo: Any) -> FixedBatch:
        raise UserError("EvictionCache cannot be deep-copied; make a new cache and read the prompt again.")
