"""Variables of chat templates that a user sets with --template-option, such as `reasoning_effort` of GPT-OSS."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.errors import UserError, bare, quote
from kvbench.registry import did_you_mean

THINKING = "enable_thinking"  # the variable that --thinking sets
SWITCHES = frozenset({"thinking", "think", "reasoning"})  # other names of it (Granite, DeepSeek-V3.1)
# Variables that kvbench or transformers sets for every prompt, and functions of Jinja and transformers.
SET = frozenset({"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"})
FUNCTIONS = frozenset({"range", "dict", "namespace", "raise_exception", "strftime_now"})


def parse(options: Iterable[str]) -> dict[str, Any]:
    """Parse texts of the form NAME=VALUE, and return {name: value}.

    A VALUE that is valid JSON is parsed as JSON; true and false may be written in any case. Any other VALUE stays a
    text. Raises UserError for variables that another option or kvbench sets.
    """
    variables = {}
    for option in options:
        name, _, value = option.partition("=")
        if name == THINKING:
            raise UserError(f"--template-option {quote(option)}: use --thinking or --no-thinking instead.")
        if name in SET:
            raise UserError(f"--template-option {quote(option)}: kvbench sets {quote(name)} itself. Leave it out.")
        variables[name] = _value(value)
    return variables


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_syntax(template: str, origin: str) -> None:
    """Raise UserError if a template is not Jinja. origin: its file."""
    import jinja2

    try:
        _parsed(template)
    except jinja2.TemplateSyntaxError as error:
        if "unknown tag" not in str(error.message):  # tokenizers of remote code may define further tags
            raise UserError(f"chat template {bare(origin)}, line {error.lineno}: {error.message}.") from None


def names(template: str) -> frozenset[str] | None:
    """Return the variables that a template reads but does not set; None if jinja2 alone cannot parse it."""
    import jinja2.meta

    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_parsed(template)))
    except jinja2.TemplateSyntaxError:
        return None


def check_names(variables: Mapping[str, Any], template: str, about: str) -> None:
    """Raise UserError for the first variable that a template does not read; check nothing if jinja2 alone cannot parse
    the template. about: the template's origin, for messages."""
    known = names(template)
    for name in variables:
        if known is not None and name not in known:
            others = sorted(known - SET - FUNCTIONS - {THINKING})
            there = f"It reads {', '.join(others[:8])}." if others else "It reads no variables of its own."
            raise UserError(
                f"--template-option {bare(name)}: chat template {about} does not read this variable."
                f"{did_you_mean(name, others)} {there}"
            )


def reads_thinking(template: str) -> bool:
    """Return whether a template reads `enable_thinking`; True if jinja2 alone cannot parse the template."""
    known = names(template)
    return known is None or THINKING in known


def reads_switch(template: str) -> bool:
    """Return whether a template reads a variable of `SWITCHES`; False if jinja2 alone cannot parse the template."""
    return not (names(template) or frozenset()).isdisjoint(SWITCHES)


def switched(variables: Mapping[str, Any]) -> bool | None:
    """Return the value of the first variable that is in `SWITCHES` and is true or false; None if there is none."""
    return next((value for name, value in variables.items() if name in SWITCHES and isinstance(value, bool)), None)


def _parsed(template: str) -> Any:
    import jinja2

    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # transformers' own tag
    return jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
