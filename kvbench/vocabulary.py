"""Whether a tokenizer and a model belong together: a token without an embedding would end a run in the middle.

check(600, 512)                  # SetupError
tokens(Path("model"))            # 512, counted in tokenizer.json, without transformers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError


def check(tokens: int | None, embeddings: int | None) -> None:
    """Raises SetupError when there are more tokens than embeddings; what is not known (None) passes."""
    if tokens is not None and embeddings is not None and tokens > embeddings:
        raise SetupError(
            f"the tokenizer has {tokens} tokens and the model {embeddings} embeddings; they do not belong together."
        )


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Compare a folder's tokenizer.json with its config.json, as far as they tell. Raises SetupError."""
    size = (config.get("text_config") or config).get("vocab_size")
    check(tokens(folder), size if isinstance(size, int) else None)


def tokens(folder: Path) -> int | None:
    """How many tokens a folder's tokenizer.json has; None where it does not say."""
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        known, added = content["model"]["vocab"], content.get("added_tokens") or []
        names = set(known) if isinstance(known, dict) else {piece for piece, _ in known}
        return len(names | {token["content"] for token in added})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # transformers tells what is wrong with it
        return None
