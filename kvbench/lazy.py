"""Imports torch when it is first used.

A method file writes ``from kvbench.lazy import torch``. Commands that need only the method's name, options and
documentation, such as ``kvbench list``, then start without the two seconds that importing torch takes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            value = getattr(importlib.import_module(self._name), attribute)
            setattr(self, attribute, value)  # so that the next access is an ordinary attribute
            return value

    torch = _LazyModule("torch")
