"""Templates parted at their long text."""

from __future__ import annotations

import pytest

from kvbench.taskkit.context_template import bundled, parts, text_id


@pytest.mark.parametrize(
    ("template", "context", "question"),
    [
        ("Read.\n\n{t}\n\nNow answer {q}:", "Read.\n\n{t}\n\n", "Now answer {q}:"),
        ("{t}\n\n Answer", "{t}\n\n", " Answer"),  # a blank is part of the word behind it
        ("Code:\n{t}Next line:\n", "Code:\n{t}", "Next line:\n"),
        ("{t}", "{t}", ""),
    ],
)
def test_parts(template: str, context: str, question: str):
    assert parts(template, "{t}") == (context, question)
    assert context + question == template


def test_bundled_text_keeps_its_line_ends():
    assert bundled("longbench_v2/0shot.txt").endswith('answer here)".')
    assert "\r" not in bundled("longproc/html_to_tsv.txt")


def test_names_of_texts():
    assert text_id("a") == text_id("a") != text_id("b")
    assert len(text_id("\ud800")) == 16
