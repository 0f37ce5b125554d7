"""kvbench compares KV-cache eviction methods in one engine, at equal physical budgets, on the same samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["EvictionCache", "__version__"]

if TYPE_CHECKING:
    from kvbench.integrations.transformers_cache import EvictionCache


def __getattr__(name: str) -> Any:
    if name == "EvictionCache":  # imports torch, so only when asked for
        from kvbench.integrations.transformers_cache import EvictionCache

        return EvictionCache
    raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
