"""The words of the synthetic tasks, and the order in which the tokenizer numbers them.

`TOKENS[i]` is the text of token `256 + i`; ids 0..255 are the single bytes, so any UTF-8 text can be written.
`ids(pieces)` numbers the pieces of a problem. A blank belongs to the word behind it, and a digit with a blank before it
is another token than one without: tens and units have different tokens, so that a model gets place value for free.

This module does not split free text; the tokenizer that ships with the model does, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable

END, PAD = "<|end|>", "<|pad|>"

REGISTER = "asp"  # the name that `lines` accumulates into; never the name of a fact there
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
OPENING = (ADJECTIVES, NOUNS, VERBS, PREPOSITIONS)  # of a filler sentence: a word of each, then "the", a place, a stop
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
    """Token ids of pieces that are one token each; KeyError names a piece that is not."""
    return [_ID[piece] for piece in pieces]
