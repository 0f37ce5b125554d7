"""MathVista's scoring: an answer is extracted from the model's text, brought into a common form, and compared as text.

In the official pipeline, GPT extracts the answer from every text that is not a bare answer already; `direct` decides
whether a text is a bare answer. `by_rule` is kvbench's own extraction, which needs no judge. `normalise` follows the
official rules with their peculiarities: for a text that names no option, `normalise` takes the option with the smallest
edit distance; where an integer is asked for, it cuts 3.7 to 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from kvbench.scoring.boxed import last_box
from kvbench.scoring.latex import as_text, in_one_line
from kvbench.scoring.literals import literals

KINDS = ("text", "integer", "float", "list")
_QUOTED = re.compile(r'The answer is "(.*)"\.')
_INTRODUCED = re.compile(
    r"(?:answer|option|choice|答案)(?:\s+letter)?\W{0,3}(?:(?:would|should|must|will)\s+be|is|are|为|是|[:：])"
    r"|\bI(?:\s+would|'d)?\s+choose(?=\W{1,4}(?:(?:option|choice)\W{1,4})?(?-i:[A-Z])\b)",
    re.IGNORECASE,
)
_IS = r"\W{1,4}(?:is|must\s+be)\s+"
_IS_RIGHT = rf"{_IS}(?:the\s+)?(?:correct|right|answer)\b"
_IS_ANSWER = (  # not "A is right angled"
    rf"{_IS}(?:(?:(?:the\s+)?correct|the\s+(?:[a-z]+\s+)?(?:answer|option|choice))\b|right\b(?=\s*(?:[.!,;*)]|$)))"
)
_RIGHT_OPTION = re.compile(  # "option B is correct", "Thus, B is correct", "Therefore, B."
    rf"\b(?:(?i:option|choice)\W{{1,4}}(?P<named>[A-Z]){_IS_RIGHT}"
    r"|(?i:hence|thus|therefore|so)\W{1,4}(?i:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\W{1,4})?"
    rf"(?P<concluded>[A-Z])(?:{_IS_ANSWER}|[.!*)\s]*$))",
    re.MULTILINE,
)
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(  # a fraction or a number, but no digits of a word such as CO2
    rf"((?<![\w)])[-−])?(?:\\[dt]?frac\s*\{{\s*({_PLAIN})\s*\}}\s*\{{\s*({_PLAIN})\s*\}}"
    rf"|(?<![\w^])(?<![0-9]\.)({_PLAIN})(?:/({_PLAIN}))?)"
)
_DECIMAL = re.compile(r"-?[0-9]{1,12}(?:\.[0-9]{1,12})?")
_EXPONENT = re.compile(r"\^\s*(?:\{\s*[-−+]?[0-9]+\s*\}|[-−+]?[0-9]+)")
_STYLED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\\?\$|\*|\\[()\[\]]")
_CLAUSE_END = re.compile(r"[,;.]\s|[(\n]")
_LETTER = re.compile(r"\(([A-Za-z])\)")
_LEAD = r"[\s:(]*(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\b[\s:(]*)?"
_FIRST_LETTER = re.compile(rf"(?i:{_LEAD})([A-Z])\s*(?:[).:,]|$)")
_LONE_LETTER = re.compile(rf"(?i:{_LEAD})([A-Z])\s")
# An option does not count where the text goes on as a longer word, number or formula. The second pattern holds only for
# options that end in a digit, a bracket or a single letter (`_FORMULA`).
_ENDS = r"(?!\w|\.[0-9]|\s*(?:[\^√×·⋅π]|sqrt\())"
_FORMULA_ENDS = r"(?!\s*(?:/|\\(?!\\?\s*$)))"
_FORMULA = re.compile(r"(?:[0-9]|[)\]}]|(?<![^\W\d_])[^\W\d_])$")
_FACTOR = re.compile(r"\\(times|cdot|div|pi|alpha|beta|gamma|theta|lambda|omega|phi)(?![a-zA-Z])")
_LIST = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The right answer to a question, and its form.

    kind: one of `KINDS`. precision: decimals of a float. choices: the options of a multiple-choice question, otherwise
    empty.
    """

    answer: str
    kind: str
    precision: int | None
    choices: tuple[str, ...]


def direct(text: str, wanted: Wanted, *, quoted: bool = False) -> str | None:
    """Return a text's answer if no extraction is needed; otherwise return None.

    No extraction is needed if the text is an option, or if the wanted kind is integer or float and the text is a number
    of this kind. The rules are the official ones. quoted: also accept the quoted part of ``The answer is "...".``, as
    the official script does with its option --quick_extract.
    """
    if wanted.choices and text in wanted.choices:
        return text
    if wanted.kind in ("integer", "float"):
        try:
            return str((int if wanted.kind == "integer" else float)(text))
        except ValueError:
            pass
    found = _QUOTED.search(text) if quoted else None
    return found[1] if found else None


def by_rule(text: str, wanted: Wanted) -> str | None:
    """Return the answer in a text: from its last box, else from the text behind its last "answer is" or a similar
    phrase, else the letter in its last "option B is correct" or "Therefore, B.", else from its last line. If none of
    them holds an answer, a box with a digit counts as the nearest option (`_nearest`); otherwise the result is None."""
    for part, introduced in _places(text, wanted.choices):
        if (answer := _read(part, wanted, introduced)) is not None:
            return answer
    box = last_box(text) or ""
    return _nearest(box, wanted.choices) if re.search("[0-9]", box) else None


def normalise(extraction: str, wanted: Wanted) -> str | None:
    """Convert an extracted answer to the form of the right answers; None if it cannot be converted."""
    if wanted.choices:
        return _choice(extraction.strip(), wanted.choices)
    try:
        if wanted.kind == "integer":
            return str(int(float(extraction)))
        if wanted.kind == "float":
            return None if wanted.precision is None else str(round(float(extraction), wanted.precision))
    except (ValueError, OverflowError):
        return None
    return extraction


def is_right(extraction: str | None, wanted: Wanted) -> bool:
    return extraction is not None and normalise(extraction, wanted) == wanted.answer


def distance(a: str, b: str) -> int:
    """Return the edit distance (Levenshtein) of two texts."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]


def _choice(extraction: str, choices: Sequence[str]) -> str:
    if letters := _LETTER.findall(extraction):
        extraction = letters[0].upper()
    index = ord(extraction) - ord("A") if len(extraction) == 1 else -1
    if 0 <= index < len(choices):
        return choices[index]
    return min(choices, key=lambda choice: distance(extraction, choice))


def _places(text: str, choices: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield pairs: a part of a text that may hold the answer, and whether the answer begins that part. The likeliest
    part comes first."""
    if box := last_box(text):
        yield box, True
    if ends := [match.end() for match in _INTRODUCED.finditer(text)]:
        yield text[ends[-1] :].split("\n\n")[0], True
    if named := [name for match in _RIGHT_OPTION.finditer(text) if (name := _letter(match, choices, match.lastgroup))]:
        yield named[-1], True
    if lines := text.strip().splitlines():
        yield lines[-1], False


def _read(part: str, wanted: Wanted, introduced: bool) -> str | None:
    if wanted.kind == "list":
        return _listed(part)
    plain = _plain(part)
    return _option(plain, wanted.choices, introduced) if wanted.choices else _number(plain, introduced)


def _plain(text: str) -> str:
    """Return a text without the marks of LaTeX and Markdown around words and formulas."""
    return _MARKS.sub(" ", _STYLED.sub(r"\1", text.replace("{,}", ",").replace("\\!", "")))


def _number(part: str, introduced: bool) -> str | None:
    """Return the number that counts as the answer in a part of a model's text; None if the part has no number.

    If the answer begins the part (`introduced`), the first number behind the last "=" of the part's first clause
    counts; if there is no such number, the first number of the part counts. If the answer does not begin the part, the
    last number of the part counts. Exponents are ignored.
    """
    part = _EXPONENT.sub("", part)
    if not introduced:
        return _value(_NUMBER.findall(part)[-1:])
    clause = _CLAUSE_END.split(part, maxsplit=1)[0].rpartition("=")[2]
    return _value(_NUMBER.findall(clause)[:1]) or _value(_NUMBER.findall(part)[:1])


def _value(found: Sequence[tuple[str, ...]]) -> str | None:
    """Return the number in the first match of `_NUMBER`, without commas; None without a match. A fraction is divided
    out, except by 0, which leaves the numerator. found: the groups of each match."""
    for sign, *numbers in found:
        above, *below = (number.replace(",", "") for number in numbers if number)
        value = str(float(above) / float(below[0])) if below and float(below[0]) else above
        return "-" + value if sign else value
    return None


def _option(part: str, choices: Sequence[str], introduced: bool) -> str | None:
    """Return the letter or the option that a text chooses; None without one. The first rule that finds one decides:

    - a letter at the beginning with a mark behind it, such as "B)", or with nothing behind it;
    - if the answer begins the text (`introduced`): the longest option at the beginning, else a letter there;
    - the last letter in parentheses;
    - the longest option.
    """
    if named := _letter(_FIRST_LETTER.match(part), choices):
        return named
    if introduced:
        first = _longest(choices, part, r"\W*", re.match) or _letter(_LONE_LETTER.match(part), choices)
        if first:
            return first
    named = next(filter(None, (_letter(found, choices) for found in reversed(list(_LETTER.finditer(part))))), None)
    return named or _longest(choices, part, r"(?<![\w^√])(?<![0-9][./])(?<!sqrt\()", re.search)


def _letter(found: re.Match[str] | None, choices: Sequence[str], group: str | int | None = 1) -> str | None:
    """Return the letter in a group of a match, as a capital; None without a match or without an option of this
    letter."""
    letter = found[group or 1].upper() if found else ""
    return letter if letter and ord(letter) - ord("A") < len(choices) else None


def _longest(choices: Sequence[str], part: str, before: str, look: Callable[..., object]) -> str | None:
    """Return the longest option that occurs in a text; None without one. before: a regular expression that must match
    just before the option. look: `re.match` (at the beginning of the text) or `re.search` (anywhere)."""
    line = in_one_line(part)
    factors = "|".join(sorted(set(_FACTOR.findall(part))))  # the words "5 times" are no formula
    ends = _ENDS + (rf"(?!\s*(?:{factors})\b)" if factors else "")
    there = [
        choice
        for choice in choices
        if look(before + _pattern(choice) + ends + _FORMULA_ENDS * bool(_FORMULA.search(choice)), line, re.IGNORECASE)
    ]
    return max(there, key=len, default=None)


def _pattern(choice: str) -> str:
    """Return a regular expression for an option in the form of `in_one_line`. Blanks and the degree sign may differ,
    but numbers and words stay apart."""
    pieces = re.findall(r"[^\W\d_]+|[0-9]+|\S", in_one_line(_plain(choice)) or choice)
    pattern = ""
    for last, piece in zip(["", *pieces], pieces):
        apart = r"\s+" if (last.isalpha() and piece.isalpha()) or (last.isdigit() and piece.isdigit()) else r"\s*"
        pattern += (apart if last else "") + re.escape(piece) + "?" * (piece == "°" and len(pieces) > 1)
    return pattern


def _nearest(formula: str, choices: Sequence[str]) -> str | None:
    """Return the option with the smallest edit distance from a formula, both in one line. The result is None if no
    option has a digit, or if this option is a part of the formula, unless the formula is a number that rounds to the
    option, or the rest is a unit such as "cm" or "\\text{m}^2"."""
    if not any(re.search("[0-9]", choice) for choice in choices):
        return None
    plain = _plain(formula)
    line, lines = as_text(plain), [as_text(_plain(choice)) for choice in choices]
    nearest = min(range(len(lines)), key=lambda index: distance(line, lines[index]))
    option = re.escape(lines[nearest])
    unit = re.fullmatch(rf"\s*{option}[^\W\d_]{{2,}}\s*", plain) or re.fullmatch(
        rf"\W*{option}\W*{_STYLED.pattern}(?:{_EXPONENT.pattern})?\W*", formula
    )
    fits = unit or lines[nearest] not in line or _rounds(line, lines[nearest])
    return choices[nearest] if fits else None


def _rounds(number: str, option: str) -> bool:
    """Return whether both texts are decimal numbers, and `number` rounds to `option` at the option's precision."""
    if not (_DECIMAL.fullmatch(number) and _DECIMAL.fullmatch(option)):
        return False
    return Decimal(number).quantize(Decimal(option), ROUND_HALF_UP) == Decimal(option)


def _listed(part: str) -> str | None:
    """Return the last list in a text, spelled as Python prints it ("[1,2]" gives "[1, 2]"); None without a list."""
    return next(map(str, literals(reversed(_LIST.findall(part)))), None)
