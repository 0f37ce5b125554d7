"""Cleans text of unknown origin for the page: hides secrets, and escapes control and text-direction characters.

The template (`kvbench.report.page.template`) escapes the text for HTML.
"""

from __future__ import annotations

import functools
import re

from kvbench.console import terminal
from kvbench.console.redact import redact_text

MOST = 20_000  # bytes of one text
_BREAKS = re.compile(r"([\n\t])")


@functools.lru_cache(1 << 14)  # each page clears the cache: the environment's secrets may have changed
def shown(text: str) -> str:
    """Hide the secrets in a text, and escape its control and text-direction characters. Line ends and tabs stay."""
    hidden = redact_text(text)
    if hidden.isascii() and hidden.replace("\n", "").isprintable():
        return hidden
    return "".join(part if part in "\n\t" else terminal.clean(part) for part in _BREAKS.split(hidden))


def cut(text: str, where: str, most: int = MOST) -> tuple[str, str]:
    """Return at most `most` bytes of a text, cleaned by `shown`, and a note on where to find the rest. The note is
    empty if nothing is cut. where: where the whole text is stored, in words."""
    data = shown(text).encode()
    note = f"[cut: {len(data)} bytes in all, {where}]" if len(data) > most else ""
    return data[:most].decode(errors="ignore"), note
