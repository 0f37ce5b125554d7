"""Renders the stored answers to one question as one HTML file without a script, with its images in their places.

write([Asked(...)], Path("question.html"), run="r1")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench import __version__
from kvbench.report.image_list import ListedImage
from kvbench.report.page import template
from kvbench.report.page.text import cut, shown

MOST = 2_000_000  # bytes of one text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The stored answer of one sample, turn by turn. facts: the sample's status, its scores and the shares of text and
    images that were kept, in words."""

    title: str
    facts: str
    outputs: Sequence[str]
    extracted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question with one of its prompts, and the stored answers to this prompt.

    turns: the prompt, then the later questions, each as texts and images in their order. places: images whose place in
    these texts is unknown. uris: the `data:` address of each image by the image's number; an image without an address
    is shown by its name. notes: sentences that say why images or texts are missing.
    """

    title: str
    turns: Sequence[Sequence[str | ListedImage]]
    places: Sequence[ListedImage]
    uris: Mapping[int, str]
    reference: str
    answers: Sequence[Answer]
    notes: Sequence[str]


def write(asked: Sequence[Asked], path: Path, *, run: str) -> Path:
    """Write the page to `path`. Raises SetupError if the file cannot be written. run: the run's name."""
    shown.cache_clear()
    values = {"asked": asked, "run": run, "version": __version__, "cut": _cut}
    return template.write(template.render("question.html", values), path)


def _cut(text: str) -> str:
    return "\n".join(filter(None, cut(text, "in the run's texts.parquet", MOST)))
