"""Text and images among the entries: the column that distinguishes them, and a check which methods serve images."""

from __future__ import annotations

from kvbench.errors import UserError, quote
from kvbench.eviction.api import Column, Method

# 0 for text, else the number of the entry's image in the prompt, from 1. A method that declares it may read it; the
# engine writes it.
MODALITY = Column(name="modality")


def check_images(name: str, method: Method) -> None:
    """Raise UserError if a method does not serve prompts with images. name: the method's name."""
    needs = method.needs()
    if needs.rope or needs.attention:
        raise UserError(
            f"method {quote(name)} does or undoes RoPE by one position per token, but image tokens have three. Use "
            "another method for prompts with images."
        )
    if needs.prompt:
        raise UserError(
            f"method {quote(name)} reads the prompt's tokens once more, without the images that belong to them. Use "
            "another method for prompts with images."
        )
