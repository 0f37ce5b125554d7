"""The facts about a cell, such as versions and settings, and the consequences for a comparison if two cells differ in a
fact.

A fact belongs to one of three classes:

- `SUBJECT`: a regression run is meant to test the fact's effect. The comparison lists differences.
- `SURROUNDINGS`: the fact may change the last bits of logits, and so the answers. The comparison lists differences in a
  separate note.
- `REFUSED`: the fact must be equal. If both sides know it and it differs, the comparison ends with an error. `MAPPED`
  lists the facts of this class that may differ between two models that --map pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.compare.cell import Cell
from kvbench.errors import UserError, bare, quote
from kvbench.report.agree import NOTED, SAME, json_object
from kvbench.store.identity import canonical_json
from kvbench.store.schema import natural

OF_CELL = ("model", "interval", "seed")  # parts of a cell's name
SUBJECT = {
    "kvbench_version": "kvbench",
    "git": "commit",
    "torch_version": "torch",
    "transformers_version": "transformers",
    "libraries": "other libraries",
    "method_version": "version of the method",
    "method_source": "source of the method",
    "artefacts": "tables, drafts or plug-in",
}
SURROUNDINGS = {
    "device": "device",
    "dtype": "dtype",
    "attention": "attention",
    "slots": "slots",
    "decoding": "way of decoding",
    "threads": "threads",
    "processor": "processor",
    "chunk": "prompt tokens read at once",
}
REFUSED = {name: word for name, word in SAME.items() if name not in (*OF_CELL, *SURROUNDINGS)} | {
    "data": "data",
    "judge": "judge",
    "python_version": "Python that runs the programs",
}
WORDS = SUBJECT | SURROUNDINGS | REFUSED
FACTS = tuple(WORDS)
DECIDING = tuple(name for name in FACTS if name not in ("judge", "python_version"))  # facts that may change a token
# If one of these facts is unknown, the answers of two cells need not be equal: without the commit, the code may have
# changed under the same version; without another fact, the last bits of logits may have changed.
KNOWN = (
    *("git", "kvbench_version", "torch_version", "transformers_version", "method_source"),
    *("device", "slots", "threads", "chunk"),
)
OBJECTS = ("libraries", "artefacts")  # facts that are JSON objects
FILLED = {"stop": "[]", "adapter": "none"}  # for these facts: the text in place of a missing value
MAPPED = ("model_revision", "adapter")  # facts that may differ if --map pairs two models
assert {name for name, _, _ in NOTED} <= {*FACTS}


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact in which two cells differ. kind: the fact's class, "subject", "surroundings" or "refused"."""

    name: str
    kind: str
    base: str | None
    new: str | None

    @property
    def word(self) -> str:
        return WORDS[self.name]

    @property
    def values(self) -> str:
        """Both values, as in "2.12.0 > 2.13.0"; for two JSON objects, only the keys whose values differ, as in "triton
        none > 3.9.0"."""
        if self.name not in OBJECTS:
            return f"{_shown(self.base)} > {_shown(self.new)}"
        (base, no_base), (new, no_new) = self._entries(self.base), self._entries(self.new)
        names = [name for name in sorted(base | new) if base.get(name) != new.get(name)]
        return ", ".join(bare(f"{name} {base.get(name, no_base)} > {new.get(name, no_new)}") for name in names)

    def _entries(self, value: str | None) -> tuple[dict[str, Any], str]:
        """Return the JSON object in this fact's value, and the word that is shown for a key that the object lacks.

        The word is "none", with one exception: it is "unknown" if the fact is `libraries` and the run recorded no
        versions of libraries (value None).
        """
        return json_object(value or "{}"), "unknown" if value is None and self.name != "artefacts" else "none"


def of_record(name: str, record: Mapping[str, Any], task: str) -> str | None:
    """Return the value of the fact `name` in a run's run.json; None if run.json lacks the fact. record: the environment
    in run.json, to which the run's setting `chunk` was added. task: the task of the cell, for facts about the task's
    data."""
    match name:
        case "git" | "threads" | "chunk":
            value = record.get(name)
        case "processor":
            value = (record.get("machine") or {}).get("processor")
        case "data":
            known = (record.get("tasks") or {}).get(task, {}).get("data", {})
            value = " ".join(str(known[part]) for part in ("revision", "sha256") if known.get(part)) or None
        case "libraries":
            own = ("kvbench", "python", "torch", "transformers")
            value = canonical_json({k: v for k, v in (record.get("versions") or {}).items() if k not in own})
            value = None if value == "{}" else value
        case _:
            value = None
    return None if value is None else str(value)


def differences(base: Cell, new: Cell, *, mapped: bool = False) -> list[Difference]:
    """Return the facts in which two cells differ. If one value is unknown, a fact that must be equal (`REFUSED`)
    counts as equal, and any other fact counts as different. mapped: the user compares two models (or two revisions of
    one model) on purpose. Then a difference in a fact of `MAPPED` (the model's revision, the adapter) has the class
    "subject" and is no error."""
    found = []
    for name in FACTS:
        mine, theirs = base.facts.get(name), new.facts.get(name)
        if mine == theirs or ((mine is None or theirs is None) and name in REFUSED):
            continue
        kind = "surroundings" if name in SURROUNDINGS else "refused" if name in REFUSED else "subject"
        found.append(Difference(name, "subject" if mapped and name in MAPPED else kind, mine, theirs))
    return found


def refuse(base: Cell, new: Cell, found: list[Difference]) -> None:
    """Raise UserError if two cells cannot be compared, because they differ in a fact that must be equal (class
    "refused"), in the name of the compared score, or in the prompt or sampling of a question. A prompt or sampling that
    is unknown on one side is not compared. found: the result of `differences`."""
    for difference in found:
        if difference.kind == "refused":
            mine, theirs = _shown(difference.base), _shown(difference.new)
            raise UserError(not_comparable(base, new, difference.word, mine, theirs))
    if base.headline != new.headline:
        raise UserError(not_comparable(base, new, "score", base.headline, new.headline))
    for name in sorted(base.questions.keys() & new.questions.keys(), key=natural):
        asked, now = base.questions[name].asked, new.questions[name].asked
        if asked is not None and now is not None and asked != now:
            word = f"the hash of prompt and sampling of question {quote(name)}"
            raise UserError(not_comparable(base, new, word, asked, now))


def not_comparable(base: Cell, new: Cell, word: str, mine: str, theirs: str) -> str:
    both = (base.run, new.run) if base.run != new.run else (f"base {base.run}", f"new {new.run}")
    return (
        f"{bare(base.key.cell)}: {word} is {mine} in {bare(both[0])} and {theirs} in {bare(both[1])}; "
        "scores are not comparable. Compare runs without this difference."
    )


def same_tokens(base: Cell, new: Cell) -> bool:
    """Return whether the answers of two cells must be equal. They must be if four conditions hold: all facts that may
    change a token (`DECIDING`) are equal; all facts in `KNOWN` are known; the code had no uncommitted changes; both
    cells have the same questions, with equally many samples of each."""
    if any(base.facts.get(name) != new.facts.get(name) for name in DECIDING):
        return False
    if any(base.facts.get(name) is None for name in KNOWN) or "+changes" in (base.facts.get("git") or ""):
        return False
    asked = ({q: len(of.scores) for q, of in cell.questions.items()} for cell in (base, new))
    return next(asked) == next(asked)  # other batches may change bits of logits


def _shown(value: str | None) -> str:
    return "unknown" if value is None else bare(value)
