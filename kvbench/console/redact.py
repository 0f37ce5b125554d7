"""Keeps secrets out of files and output.

Stored settings and the commands in kvbench's own messages must stay exact. In these texts, `hide_secrets` and
`hide_keys` therefore hide recognisable secrets only: users and passwords in URLs, keys of the usual shapes, and values
of environment variables whose names announce a secret, such as ``HF_TOKEN``. Before a command stores settings, it
refuses a setting in which `holds_secret` finds a secret.

Other texts are only shown, or were written by other programs. In them, every value behind a name that announces a
secret, such as ``token=``, is hidden as well. `redact_text` does this for messages, URLs and paths, `redact_argv` for a
command line, and `redact_config` for nested settings. No function recognises a secret of unknown shape behind an
ordinary name, so never put such a secret on a command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

# "max_new_tokens" counts tokens and "keydiff" is a method; neither is a secret.
_NAME = r"(?:key(?!diff|error)|token(?!s|iz)|secret|passw(?:or)?d|credential)"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]{1,40}")
_SHAPES = re.compile(
    r"""hf_[A-Za-z0-9]{20,}
      | (?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{16,}
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{16,}
      | (?<![A-Z0-9])A[KS]IA[A-Z0-9]{16}(?![A-Z0-9])
      | xox[abprs]-[\w-]{10,}
      | (?<![\w.-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*""",
    re.VERBOSE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s?#]+@")  # user:password@ and token@
SHORTEST = 8  # characters of a secret
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
_ASSIGNMENT = re.compile(rf"""(\b[\w-]*{_NAME}[\w-]*["']?\s*[=:]\s*["']?)([^\s"'&,;]+)""", re.IGNORECASE)


def redact_text(text: str) -> str:
    """Return a text with ``~`` in place of the path of the home folder, and without recognisable secrets and values
    behind names such as ``token=``."""
    return fold_home(redact_keys(text))


def fold_home(text: str) -> str:
    """Return the text with the path of the home folder replaced by ``~``."""
    home = os.path.expanduser("~").rstrip("/")
    return re.sub(rf"(?<![\w.~]){re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def redact_keys(text: str) -> str:
    """Return another program's text with its secrets hidden as `redact_text` hides them, but with paths unchanged."""
    text = _BEARER.sub(rf"\1 {HIDDEN}", hide_keys(text))
    return _ASSIGNMENT.sub(rf"\g<1>{HIDDEN}", text)


def hide_keys(text: str) -> str:
    """Return a text in which values that look like secrets are hidden, whatever the name before them:
    ``token=abc/q.jsonl`` is not changed, because ``abc/q.jsonl`` does not look like a secret."""
    for value in _secret_values(os.environ):
        text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    return _USERINFO.sub(f"{HIDDEN}@", text)


def _secret_values(environ: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables whose names announce a secret, such as ``HF_TOKEN``.

    Values that are probably no secrets are left out: words, paths, web addresses, names of variables, and values of
    fewer than `SHORTEST` characters.
    """
    return [
        value
        for name, value in environ.items()
        if len(value) >= SHORTEST
        and _SECRET_NAME.search(name)
        and not value.isalpha()
        and not value.startswith(("/", "~", ".", "http://", "https://"))
        and not _VARIABLE_NAME.fullmatch(value)
        and value not in environ
    ]


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Return a command line in which the values of options such as ``--api-key`` are hidden, in both spellings
    ``--api-key VALUE`` and ``--api-key=VALUE``. All other words are redacted by `redact_text`."""
    redacted = []
    option = ""  # the option whose value comes next
    for word in argv:
        name, equals, value = word.partition("=")
        if option and not word.startswith("--"):
            redacted.append(_value(option, word))
        elif equals and _SECRET_NAME.search(name):
            redacted.append(f"{redact_text(name)}={_value(name, value)}")
        else:
            redacted.append(redact_text(word))
        option = word if word.startswith("-") and not equals and _SECRET_NAME.search(word) else ""
    return redacted


def redact_config(value: Any) -> Any:
    """Return settings in which secrets are hidden, also inside dictionaries and lists. Tuples become lists."""
    if isinstance(value, Mapping):
        return {
            str(name): _value(str(name), v)
            if isinstance(v, str) and _SECRET_NAME.search(str(name))
            else redact_config(v)
            for name, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_config(v) for v in value]
    return redact_text(value) if isinstance(value, str) else value


def holds_secret(value: Any) -> bool:
    """Return whether a text, or any text in a list or dictionary, contains something that looks like a secret."""
    if isinstance(value, Mapping):
        return any(map(holds_secret, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_secret, value))
    if not isinstance(value, str):
        return False
    known = any(secret in value for secret in _secret_values(os.environ))
    return known or bool(_SHAPES.search(value) or _USERINFO.search(value))


def hide_secrets(value: Any) -> Any:
    """Return settings in which ``***`` takes the place of every text that contains a secret.

    The value of `judge_key_env` is shown only if it has the form of a variable's name. Otherwise the user may have
    typed a key in place of the name.
    """
    if isinstance(value, Mapping):
        return {str(name): _kept(str(name), v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [hide_secrets(v) for v in value]
    return HIDDEN if isinstance(value, str) and holds_secret(value) else value


def _kept(name: str, value: Any) -> Any:
    return _value(name, value) if isinstance(value, str) and name == "judge_key_env" else hide_secrets(value)


def _value(name: str, value: str) -> str:
    """Return ``***`` in place of an option's value. Callers pass only options whose names announce a secret.

    Options such as ``--judge-key-env`` take the name of a variable. Their value is returned unchanged if it has the
    form of such a name, because it is then no secret.
    """
    names_variable = name.lower().replace("-", "_").endswith("_env") and _VARIABLE_NAME.fullmatch(value)
    return value if names_variable and not _SHAPES.search(value) else HIDDEN
