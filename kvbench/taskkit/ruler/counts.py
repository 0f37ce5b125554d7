"""How many tokens texts have, remembered from run to run.

    with TokenCounts(reader.count, cache_file(tokenizer, "vt", 4096)) as count:
        rows = make_rows("vt", Room(count=count, ...), ...)

Making a set of prompts is mostly counting their tokens: seconds at 4K, many minutes at 128K. What is kept on disk is
not the prompts (gigabytes, and other people's texts) but the counts, by the hash of each text. A remembered count is
right whatever the generator, the seed or the number of rows, so nothing has to be thrown away when these change; the
file's name holds the tokenizer's hash. Lost or damaged files cost time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from kvbench.errors import SetupError
from kvbench.sources.data.cache import folder, keeping


class TokenCounts:
    """Counts texts; remembers in `file`, or nowhere when it is None. The file is written when the block ends."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.file and self.new:
            with suppress(SetupError), keeping(self.file) as stream:  # on a full or read-only disk there is no memory
                stream.write(json.dumps(self.known).encode())


def cache_file(tokenizer: Any, prompts: str, length: int) -> Path | None:
    """Where counts are kept, a file for each tokenizer, kind of prompt and length. None without a tokenizer's hash."""
    backend = getattr(tokenizer, "backend_tokenizer", None)  # those written in Python tell nothing of themselves
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
