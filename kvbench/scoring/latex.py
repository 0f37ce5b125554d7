"""Write LaTeX as plain text, so that answers that differ in markup alone are the same text.

Plain text search, so it needs no time limit. It does not read mathematics: "1/2" and "0.5" stay different texts.
"""

from __future__ import annotations

import re

FONT = re.compile(r"\\(?:(?:text|math)(?:rm|bf|it|sf|tt)?|mbox|operatorname|boldsymbol)(?![a-zA-Z])")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|([0-9]))"
_FRACTION = re.compile(rf"\\[dt]?frac{_ARGUMENT}{_ARGUMENT}")
_ROOT = re.compile(rf"\\sqrt{_ARGUMENT}|√(?:\{{([^{{}}]*)\}}|\(([^()]*)\)|([0-9]+|\w))")
_RAISED = re.compile(r"([\^_])\s*\{([^{}]*)\}(?=([0-9])?)")
_STYLED = re.compile(rf"{FONT.pattern}\s*\{{([^{{}}]*)\}}")
_SYMBOL = re.compile(rf"(?!{FONT.pattern}|\\(?:[dt]?frac|sqrt)(?![a-zA-Z]))\\([a-zA-Z]{{2,}})")
_DEPTH = 5  # of nested braces that are resolved
# Characters and spaces, in order: pattern, and what the text has in its place.
_CHARACTERS = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"\^\s*(?:\{\s*)?\\circ(?![a-zA-Z])\s*\}?|\\degree(?![a-zA-Z])", "°"),
        (r"\\(?:left|right)(?![a-zA-Z])|\\[!()\[\]]", ""),
        (r"\\(?:qquad|quad)(?![a-zA-Z])|\\[,;:\s]|(?<=[\w)\]}.,;:!?%$])~(?=[\w\\{$])", " "),  # but "~P" is "not P"
        (r"\{([,.:])\}", r"\1"),
    )
)
_ESCAPED = re.compile(r"\\([%$#&_{}])")
_INDEX = re.compile(r"(?:(?<=[A-Z])|(?<=[A-Z][a-z]))_(?=[0-9]{1,3}(?![0-9a-z_]))")  # as of H_2O, not of IMG_2031
# Blanks that mean nothing: beside marks, and before a unit. "3, 4" stays another text than the number "3,4", and "1 -2"
# another than "1-2".
_BLANK = re.compile(
    r"(?<=[^\w,]) |(?<=\D,) |(?<![0-9]) (?=\W)|(?<=[0-9]) (?=[^\w\s])(?![-+−]?\.?[0-9])|(?<=[0-9]) (?=[^\W\d_])"
)


def as_text(text: str) -> str:
    r"""Return a text as `in_one_line` does, without blanks that mean nothing: those beside marks, and those between a
    digit and a letter. ``12\,\text{cm}`` gives "12cm", as does "12 cm"."""
    return _BLANK.sub("", in_one_line(text))


def in_one_line(text: str) -> str:
    r"""Return a text with single blanks and without LaTeX's markup.

    - Commands for fonts and spaces are dropped: ``12\,\text{cm}`` gives "12 cm".
    - Fractions, roots, raised and lowered text are written in one line: ``\frac{\pi}{4}`` gives "pi/4",
      ``\sqrt{2}`` gives "sqrt(2)", ``x^{n+1}`` gives "x^(n+1)", ``H_2O`` gives "H2O", ``90^\circ`` gives "90°".
    - Other commands of two letters or more give their names: ``\ln 2`` gives "ln 2".
    """
    for pattern, instead in _CHARACTERS:
        text = pattern.sub(instead, text)
    text = _SYMBOL.sub(r" \1 ", text)
    for _ in range(_DEPTH):
        before = text
        text = _STYLED.sub(r"\1", text)
        text = _RAISED.sub(lambda found: found[1] + _grouped(found[2]) + " " * bool(found[3]), text)
        text = _ROOT.sub(lambda found: f" sqrt({_arguments(found)[0].strip()})", text)
        text = _FRACTION.sub(_fraction, text)
        if text == before:
            break
    text = _INDEX.sub("", _ESCAPED.sub(r"\1", text))
    return " ".join(text.split())


def _arguments(found: re.Match[str]) -> list[str]:
    return [argument for argument in found.groups() if argument is not None]


def _fraction(found: re.Match[str]) -> str:
    above, below = map(str.strip, _arguments(found))
    product = re.fullmatch(r"[\w\s.^()]*", above)  # a product needs no parentheses
    return f" {above if product else f'({above})'}/{_grouped(below)} "


def _grouped(argument: str) -> str:
    """Return an argument as it stands in one line: in parentheses, unless it is a number, a word or a root."""
    argument = argument.strip()
    return argument if re.fullmatch(r"[0-9.]+|[^\W\d_]*(\([^()]*\))?", argument) else f"({argument})"
