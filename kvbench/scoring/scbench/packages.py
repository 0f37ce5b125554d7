"""Import packages of the extra ``scbench``, which the scores of some of SCBench's data sets need."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from kvbench.errors import SetupError, quote


def package(name: str) -> Any:
    """Import the module of this name and return it. Raises SetupError if its package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise SetupError(
            f'this set of scbench needs the package {quote(name.partition(".")[0])}: pip install "kvbench[scbench]".'
        ) from None


def require(names: Iterable[str]) -> None:
    for name in names:
        package(name)
