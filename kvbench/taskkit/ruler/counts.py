"""Count the tokens of texts, and store the counts on disk for later runs.

Making a set of prompts takes seconds at 4K tokens and many minutes at 128K, mostly for counting tokens. Each file holds
the counts of one tokenizer, under a hash of each text. So the counts stay valid when the generator, the seed or the
number of prompts changes. No file holds the texts, which are large and copyrighted. A lost or damaged file only costs
time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError
from kvbench.sources.data.cache import folder, keeping


class TokenCounts:
    """Counts the tokens of texts, each text once. Use it in a ``with`` block.

    file: holds the counts of earlier runs, and gets the new counts at the end of the block; None: store no counts.
    """

    def __init__(self, count: Callable[[str], int], file: Path | None) -> None:
        self.count, self.file = count, file
        self.known = _read(file) if file else {}
        self.new = 0

    def __call__(self, text: str) -> int:
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        if key not in self.known:
            self.known[key] = self.count(text)
            self.new += 1
        return self.known[key]

    def __enter__(self) -> TokenCounts:
        return self

    def __exit__(self, *error: object) -> None:
        if self.file and self.new:
            with suppress(SetupError), keeping(self.file) as stream:  # on a full or read-only disk, store no counts
                stream.write(json.dumps(self.known).encode())


def cache_file(tokenizer: Any, prompts: str, length: int) -> Path | None:
    """Return the path of the file with token counts for a tokenizer, a kind of prompt (`prompts`) and a length. None
    for a tokenizer that cannot be hashed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # slow tokenizers (in Python) have no text to hash
    if backend is None:
        return None
    name = hashlib.sha256(backend.to_str().encode()).hexdigest()[:24]
    return folder() / "token-counts" / name / f"{prompts}-{length}.json"


def _read(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(found, dict) and all(type(count) is int and count >= 0 for count in found.values())
    return found if whole else {}
