"""Find the text after an output's thinking block, and the content of the last LaTeX ``\\boxed{...}`` in a text.

Plain text search without parsing of mathematics, so it needs no time limit.
"""

from __future__ import annotations

import re

from kvbench.sources.tokenizer import THINKING_TAGS

_BOX = re.compile(r"\\(?:boxed|fbox)\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character: an escaped brace is printed and opens no group
_OPEN, _CLOSE = (re.compile(f"<{slash}(?:{'|'.join(THINKING_TAGS)})>") for slash in ("", "/"))


def thinking_tags(text: str) -> tuple[int, int]:
    """Return the places of a text's last opening tag and last closing tag of a thinking block, -1 without such a
    tag."""
    opened, closed = ([match.start() for match in tag.finditer(text)] for tag in (_OPEN, _CLOSE))
    return max(opened, default=-1), max(closed, default=-1)


def after_thinking(text: str, thinking: bool | None) -> str:
    """Return the text after the last closed thinking block; the whole text if it has no block; "" if the block never
    ends.

    thinking: whether the model thinks; it matters only for a text without a closing tag. True: the text is a block that
    never ends, even without an opening tag, because some chat templates put the opening tag into the prompt. None
    (unknown): the text is such a block if it holds an opening tag. False: the text is the answer, also if the model
    thinks although it was asked not to.
    """
    opened, closed = thinking_tags(text)
    if closed >= 0:
        return text[text.index(">", closed) + 1 :]
    unfinished = thinking or (thinking is None and opened >= 0)
    return "" if unfinished else text


def last_box(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}`` or ``\\fbox{...}`` whose braces are balanced; None without
    one."""
    boxes = {match.end() for match in _BOX.finditer(text)}
    opened: list[int] = []
    start, stop = -1, -1
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (begun := opened.pop()) in boxes and begun > start:
            start, stop = begun, brace.start()
    return None if start < 0 else text[start:stop]
