"""Import kvpress, without the changes that it makes to transformers."""

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
    """Import the package kvpress and return it. Raises SetupError if kvpress, or a package that it imports, is missing,
    or if kvpress has another version than `facts.VERSION`.

    When imported, kvpress replaces transformers' attention functions by ones that mask entries. This function puts the
    original functions back: kvbench drops entries, and the baselines of a benchmark need transformers' own functions.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    try:
        if (found := importlib.metadata.version("kvpress")) != VERSION:
            raise SetupError(f"methods kvpress:NAME need kvpress {VERSION}; found {found}. Install it: {INSTALL}")
        return importlib.import_module("kvpress")
    except ImportError as error:  # also for a package without metadata
        raise SetupError(
            f"methods kvpress:NAME need {error.name}, which is not installed. Install it: {INSTALL}"
        ) from None
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.update(before)
