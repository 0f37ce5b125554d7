"""`Pool`: the pages of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.slot_cache import Shape
from kvbench.errors import BudgetViolation

PAGE = 16  # entries


class Pool:
    """Pages for entries of one shape, shared by all layers whose entries have that shape."""

    def __init__(
        self, geometry: LayerGeometry, shape: Shape, pages: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        rows = pages * PAGE
        self.keys = torch.zeros(rows, geometry.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(rows, geometry.value_dim, device=device, dtype=dtype)
        self.positions = torch.zeros(rows, device=device, dtype=torch.int32)
        self.columns = {c.name: torch.full((rows,), c.init, device=device) for c in shape.columns}
        self.free = list(range(pages - 1, 0, -1))
        self.page_extra = PAGE * 4 * (1 + len(self.columns))  # bytes of positions and columns
        self.page_bytes = PAGE * (geometry.head_dim + geometry.value_dim) * dtype.itemsize + self.page_extra

    def take(self, count: int) -> list[int]:
        """Return `count` free pages, which then belong to the caller. Raises BudgetViolation if there are fewer."""
        if count > len(self.free):
            raise BudgetViolation(
                f"the cache needs {count} more pages but has only {len(self.free)} free pages, because the method "
                "keeps more entries than it announced."
            )
        first = len(self.free) - count
        taken = self.free[first:]
        del self.free[first:]
        return taken

    def give_back(self, pages: np.ndarray) -> None:
        self.free.extend(pages.tolist())

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.positions, *self.columns.values()]


def pages(layers: Sequence[LayerGeometry], shape: Shape) -> int:
    """Return how many pages suffice for all slots: for every head, the pages of `shape.rows` entries, and one more. The
    extra page is needed because `shape.rows` is a mean over heads, and each head's last page may be partly filled."""
    heads = sum(g.kv_heads for g in layers)
    return shape.slots * heads * (-(-shape.rows // PAGE) + 1)
