"""Formats an outcome of a comparison for GitHub Actions: annotations, which are workflow commands, and a summary in
Markdown.

The format is https://docs.github.com/actions/reference/workflow-commands. `%`, CR and LF are escaped, and in titles
also `:` and `,`. `kvbench compare` prints the annotations, and appends the Markdown to the file that the variable
GITHUB_STEP_SUMMARY names. Without this variable it prints the Markdown to stdout, where GitHub reads every line that
begins with `::` as a command. The Markdown then stands between the command `::stop-commands::` and its end mark.
"""

from __future__ import annotations

import re
import secrets

from kvbench.compare import words
from kvbench.compare.outcome import Outcome
from kvbench.console.terminal import clean

_MESSAGE = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_TITLE = _MESSAGE | str.maketrans({":": "%3A", ",": "%2C"})


def commands(outcome: Outcome) -> list[str]:
    lines = [
        _command("error" if critical else "warning", "kvbench compare", why)
        for critical, why in words.failures(outcome)
    ]
    lines += [_command("warning", "kvbench compare, undecided", line) for line in words.undecided(outcome)]
    return lines or [_command("notice", "kvbench compare", words.summary(outcome))]


def fenced(markdown: str) -> str:
    """Return a Markdown text between two lines that keep GitHub from reading its lines as commands."""
    mark = secrets.token_hex(16)
    return f"::stop-commands::{mark}\n{markdown}\n::{mark}::"


def without_commands(text: str) -> str:
    """Return the text with a space inside everything that GitHub would read as a command: ``::`` at the beginning of a
    line, and the older ``##[``."""
    return re.sub(r"(?m)^(\s*):(?=:)", r"\1: ", text).replace("##[", "## [")


def _command(kind: str, title: str, message: str) -> str:
    return f"::{kind} title={title.translate(_TITLE)}::{clean(message).translate(_MESSAGE)}"
