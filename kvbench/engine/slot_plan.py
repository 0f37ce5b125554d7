"""The plan of the slots of one cell.

This module imports no torch, because a worker receives plans before it imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """The number of slots of one cell, the entries and bytes per slot, and the tokens/s that the machine allows."""

    slots: int
    fitting: int  # how many slots fit into memory; `slots` may be fewer
    entries_after: int | None  # entries per layer and head right after an eviction; None: the method takes no budget
    entries_peak: int  # entries per layer and head that a slot has room for
    slot_bytes: int
    peak_bytes: int  # planned, see `footprint.Footprint.at`
    evictable: float  # share of the longest sequence's full cache that methods may evict; the rest: states, windows
    limit: float  # tokens/s that the machine allows at this many slots
    devices: int = 1  # number of devices that share the model; with several, `peak_bytes` is that of the fullest

    def line(self) -> str:
        kept = "all entries kept" if self.entries_after is None else f"{self.entries_after} entries after eviction"
        part = f", evictable KV {self.evictable:.0%} of a sequence's memory" if self.evictable < 1 else ""
        each = f" on the fullest of {self.devices} GPUs" if self.devices > 1 else ""
        return (
            f"{self.slots} slots x {self.entries_peak} entries ({kept}), {self.slot_bytes / 2**20:.2f} MiB per slot, "
            f"{self.peak_bytes / 2**30:.2f} GiB planned{each}, hardware limit {self.limit:,.0f} tokens/s{part}"
        )
