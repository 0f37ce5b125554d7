"""Imports kvpress, without the changes that it makes to transformers."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from typing import Any

from kvbench.errors import SetupError
from kvbench.integrations.kvpress.facts import VERSION

INSTALL = f"pip install 'kvbench[kvpress]' && pip install --no-deps kvpress=={VERSION}"


@functools.cache
def kvpress() -> Any:
    """Return the package kvpress. Raises SetupError if it, or a package that it imports, is missing, or its version is
    another one than `facts.VERSION`.

    When imported, kvpress replaces transformers' attention functions to mask entries; they are put back, because
    kvbench drops entries, and because baselines of a benchmark must be transformers' own.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    try:
        found = importlib.metadata.version("kvpress")
        package = importlib.import_module("kvpress")
    except ImportError as error:  # PackageNotFoundError is one
        raise SetupError(
            f"methods kvpress:NAME need kvpress, which lacks {error.name}. Install it: {INSTALL}"
        ) from None
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)
    if found != VERSION:
        raise SetupError(f"methods kvpress:NAME are made for kvpress {VERSION}, found {found}. Install it: {INSTALL}")
    return package
