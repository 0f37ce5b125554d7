"""A protection that replaces a method's own (``--protect prompt+sinks=4+recent=64``), the same for all methods.

A table that compares methods as their papers define them mixes two effects: which entries a method protects, and how it
scores the others. One protection for all methods removes the first effect ("Random Attention", arXiv 2609.03430).

    own         what the method protects; the default
    none        no entry
    sinks=N     the first N tokens
    recent=N    the newest N tokens
    prompt      the whole prompt; prompt=N: its first N tokens; prompt=50%: its first tokens, at most 50% of the budget

Terms are joined by + or by commas. If the prompt does not fit into the budget, only its first tokens are protected: as
many as leave room for `recent` and one more entry, as in the code of Random Attention. In a conversation of several
turns, the prompt is the first turn's prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvbench.eviction.declare import Protect

OWN, NONE = "own", "none"
TERMS = "own, none, or some of prompt, prompt=N, prompt=N%, sinks=N and recent=N, joined by '+'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """A protection that replaces a method's own.

    `prompt` says which tokens of the prompt are protected. An integer n: the first n tokens; 0: no token. A float: the
    first tokens, at most this share of the budget. None: the whole prompt.
    """

    sinks: int = 0
    recent: int = 0
    prompt: int | float | None = 0

    def __str__(self) -> str:
        share = f"{self.prompt * 100:.10g}%" if isinstance(self.prompt, float) else str(self.prompt)
        terms = ["prompt"] if self.prompt is None else [f"prompt={share}"] if self.prompt else []
        terms += [f"{name}={n}" for name, n in (("sinks", self.sinks), ("recent", self.recent)) if n]
        return "+".join(terms) or NONE

    def at(self, budget: int) -> Protect:
        """Return which entries are protected at a budget."""
        if self.prompt == 0:
            return Protect(sinks=self.sinks, recent=self.recent)
        wanted = budget if self.prompt is None else self.prompt
        wanted = int(wanted * budget) if isinstance(wanted, float) else wanted
        most = max(0, min(wanted, budget - self.recent - 1))
        return Protect(sinks=self.sinks, recent=self.recent, prompt=True, prompt_most=most)


def parse_protection(text: str) -> Protection | None:
    """Return the protection that a text names; None for `own`. Raises ValueError for a malformed text."""
    if text.strip() == OWN:
        return None
    found: dict[str, int | float | None] = {}
    for term in [] if text.strip() == NONE else re.split(r"[+,]", text):
        name, equals, value = (part.strip() for part in term.partition("="))
        if name in found or name not in ("prompt", "sinks", "recent") or (not equals and name != "prompt"):
            raise ValueError(text)
        found[name] = _amount(value, share=name == "prompt") if equals else None
    return Protection(**found)  # type: ignore[arg-type]  # only the prompt's amount is None or a share


def _amount(text: str, share: bool) -> int | float:
    """Parse a number of tokens, at least 1. If `share` is true, ``50%`` gives the share 0.5; a share is at most 1.
    Raises ValueError for other texts."""
    if share and text.endswith("%") and re.fullmatch(r"[0-9]{1,3}(\.[0-9]+)?%", text):
        number: int | float = float(text[:-1]) / 100
        fits = 0 < number <= 1
    else:
        number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
        fits = number > 0
    if not fits:
        raise ValueError(text)
    return number
