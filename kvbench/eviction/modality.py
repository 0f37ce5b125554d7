"""Prompts with images: the column that marks entries of images, and a check that a method can score such prompts."""

from __future__ import annotations

from kvbench.errors import UserError, quote
from kvbench.eviction.api import Column, Method

# 0 for text, else the number of the entry's image in the prompt, from 1. A method that declares this column may read
# it; the engine writes it.
MODALITY = Column(name="modality")


def check_images(name: str, method: Method) -> None:
    """Raise UserError if a method cannot score prompts with images. name: the method's name."""
    needs = method.needs()
    if needs.rope or needs.attention:
        raise UserError(
            f"method {quote(name)} rotates keys or queries (RoPE) by one position per token, but image tokens have "
            "three positions. Use another method for prompts with images."
        )
    if needs.prompt:
        raise UserError(
            f"method {quote(name)} reads the prompt's tokens a second time, but without the images. Use another "
            "method for prompts with images."
        )
