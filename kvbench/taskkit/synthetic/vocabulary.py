"""The words of the synthetic tasks and their token ids.

`TOKENS[i]` is the text of token `256 + i`; ids 0..255 are the single bytes, so any UTF-8 text can be encoded.
`ids(pieces)` returns the ids of a problem's pieces, the texts of single tokens. A blank belongs to the token of the
word after it. A digit after a blank is another token than a digit without a blank. So tens and units have different
tokens, and the model need not learn place value.

This module does not split free text; the tokenizer that ships with the model does, and a test checks that both agree.
"""

from __future__ import annotations

from collections.abc import Iterable

END, PAD = "<|end|>", "<|pad|>"

REGISTER = "asp"  # the name of the register in `walk.Lines`; no fact has this name
NAMES = (
    *("ant", "ape", "arm", "axe", "bag", "bat", "bay", "bed", "bee", "bin", "bow", "box", "bud", "bus", "cab", "can"),
    *("cap", "cat", "cod", "cow", "cub", "cup", "doe", "dog", "ear", "eel", "egg", "elk", "elm", "ewe", "fan", "fig"),
    *("fin", "fox", "gem", "hat", "hen", "hub", "ivy", "jar", "jug", "key", "kit", "lid", "log", "map", "mug", "net"),
    *("nut", "oak", "owl", "pan", "pen", "pie", "pig", "pot", "ram", "rug", "rye", "tub", "urn", "van", "vat", "yak"),
)
ADJECTIVES = ("cold", "warm", "old", "quiet", "bright", "slow", "grey", "small", "late", "wild", "soft")
NOUNS = ("wind", "rain", "smoke", "music", "light", "snow", "fog", "laughter", "dust", "thunder", "water")
VERBS = ("came", "went", "drifted", "rose", "fell", "moved", "spread", "rolled", "passed")
PREPOSITIONS = ("from", "over", "behind", "across", "near")
PLACES = (
    *("sea", "hill", "town", "river", "forest", "bridge", "market"),
    *("harbour", "valley", "garden", "tower", "field", "road", "island"),
)
OPENING = (ADJECTIVES, NOUNS, VERBS, PREPOSITIONS)  # a filler sentence: one word of each, "the", a place, a full stop
FILLER = (*(word for choices in OPENING for word in choices), "the", *PLACES)

LABELS = tuple(f" S{n}" for n in range(1, 100))
TENS = tuple(f" {digit}" for digit in range(10))
TEMPLATE = (" Facts", "Plan", "Ask", "Think", " Answer", " +", " =", " \\", "boxed")

_NAMES, _FILLER = ([f" {word}" for word in words] for words in ((REGISTER, *NAMES), FILLER))
TOKENS = (END, PAD, *TENS, *_NAMES, *LABELS, *TEMPLATE, *_FILLER)
SIZE = 256 + len(TOKENS)

_ID = {chr(byte): byte for byte in range(128)} | {text: 256 + i for i, text in enumerate(TOKENS)}
END_ID, PAD_ID = _ID[END], _ID[PAD]


def ids(pieces: Iterable[str]) -> list[int]:
    """Return the token ids of pieces. Raises KeyError, with the piece, if a piece is not the text of one token."""
    return [_ID[piece] for piece in pieces]
