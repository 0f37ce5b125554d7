"""Pairs the cells of two sides.

    pairs = match(base, new, mapping)      # UserError if cells are not comparable
    pairs.both, pairs.missing, pairs.extra

Two cells pair if model, task, method with options, budget, interval and seed are equal. A mapping pairs two methods, or
two models, on purpose: with ``--map gkv=mine``, base's cells of gkv pair with new's cells of mine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.compare.cell import Cell, Key, Side
from kvbench.compare.facts import Difference, differences, not_comparable, refuse
from kvbench.errors import UserError, bare, few, quote
from kvbench.eviction import choose
from kvbench.registry import did_you_mean
from kvbench.report.agree import SAME
from kvbench.report.cells import method_label
from kvbench.store.identity import canonical_json


@dataclass(frozen=True, slots=True)
class Pair:
    """Two comparable cells, and the ids of the questions that both have."""

    key: Key
    base: Cell
    new: Cell
    shared: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def renamed(self) -> bool:
        """Whether --map pairs the new cell with a base cell of another method or another model."""
        return (self.base.key.method, self.base.key.model) != (self.new.key.method, self.new.key.model)

    @property
    def decided(self) -> bool:
        """Whether both cells have recorded decisions."""
        return bool(self.base.decisions and self.new.decisions)


@dataclass(frozen=True, slots=True)
class Matched:
    both: list[Pair]
    missing: list[Key]  # cells of base that new lacks
    extra: list[Key]  # cells of new that base lacks
    aside: tuple[list[Key], list[Key]]  # cells of base, and of new, that --map leaves out


def parse_map(texts: Sequence[str]) -> dict[str, str]:
    """Return the mapping from names in new to names in base: ``--map gkv=mine`` gives {"mine": "gkv"}. Raises
    UserError."""
    found: dict[str, str] = {}
    for text in texts:
        old, equals, new = _at_equals(text)
        if not (equals and old.strip() and new.strip()):
            raise UserError(f"--map {quote(text)}: write BASE=NEW, as in --map gkv=mine.")
        old, new = _spelled(old.strip()), _spelled(new.strip())
        if new in found:
            raise UserError(
                f"--map {quote(text)}: an earlier --map pairs {quote(new)} with {quote(found[new])}. Name each NEW "
                "only once."
            )
        found[new] = old
    return found


def _spelled(name: str) -> str:
    """Return a method with options in the spelling that the keys of cells have: ``gkv(lam=0.0)`` for ``gkv(lam=0)``.
    Any other name is returned unchanged."""
    alone, bracket, _ = name.partition("(")
    if not bracket:
        return name
    try:
        canonical, method = choose.canonical(alone), choose.from_label(name)
    except UserError:  # a method of a plug-in that is not loaded, or options that the method no longer has
        return name
    return method_label(canonical, canonical_json(method.options()))


def _at_equals(text: str) -> tuple[str, str, str]:
    """Split like `str.partition`, but at the first "=" outside parentheses. Inside them, "=" belongs to a method's
    options."""
    for place, sign in enumerate(text):
        before = text[:place]
        if sign == "=" and before.count("(") == before.count(")"):
            return before, sign, text[place + 1 :]
    return text, "", ""


def match(base: Side, new: Side, mapping: Mapping[str, str] | None = None) -> Matched:
    """Pair the cells of two sides. mapping: the result of `parse_map`. Raises UserError if cells are not comparable, if
    the sides share no cell, or if the mapping does not fit the sides."""
    mapping = mapping or {}
    olds, news = set(mapping.values()), set(mapping)
    aside = _aside(base, olds, news - olds), _aside(new, news, olds - news)
    old = _renamed(base, {name: name for name in olds}, aside[0])
    now = _renamed(new, mapping, aside[1])
    missing = [key for key in old if key not in now]
    extra = [key for key in now if key not in old]
    for key in missing:
        _refuse_near(old[key], [now[other] for other in extra])
    _refuse_tasks(base, new, old, now)
    both = [
        _pair(key, old[key], now[key], mapped=key.model in mapping.values())
        for key in sorted((key for key in old if key in now), key=Key.order)
    ]
    return Matched(both, sorted(missing, key=Key.order), sorted(extra, key=Key.order), aside)


def _aside(side: Side, mapped: set[str], others: set[str]) -> list[Key]:
    """Return the side's cells that the comparison leaves out because of the mapping. With ``--map gkv=mine`` these are
    base's cells of mine and new's cells of gkv.

    mapped: the names of methods and models that --map gives for this side. others: the names that --map gives only for
    the other side.
    """
    names = {key: _names(side, key) for key in side.cells}
    return sorted((key for key in names if names[key] & others and not names[key] & mapped), key=Key.order)


def _names(side: Side, key: Key) -> set[str]:
    """Return the names by which --map may mean a cell of the side: its model, its method with options, and its method's
    name alone. For a method with other options than its defaults, the name alone is left out if the side also has the
    cell with the default options: it then means only that cell."""
    names = {key.model, key.method}
    return names if replace(key, method=key.name) in side.cells else names | {key.name}


def _renamed(side: Side, mapping: Mapping[str, str], aside: Sequence[Key]) -> dict[Key, Cell]:
    """Return the side's cells by the keys under which they are compared. mapping: for a name of a method or model of
    this side, the name that replaces it in the key. aside: cells to leave out. Raises UserError if two cells get the
    same key, or if `mapping` has a name that no cell has."""
    found: dict[Key, Cell] = {}
    unused = set(mapping)
    for key, cell in side.cells.items():
        if key in aside:
            continue
        names = _names(side, key)
        unused -= names
        model = mapping.get(key.model, key.model)
        method = next((mapping[n] for n in (key.method, key.name) if n in names and n in mapping), key.method)
        known = replace(key, model=model, method=method)
        if known in found:
            raise UserError(
                f"--map gives two cells of {quote(side.name)} the same name, {known.cell}. Map only one of them: name "
                f"the method with its options, as in {quote(key.method)}."
            )
        found[known] = cell
    if unused:
        there = sorted({name for key in side.cells for name in (key.method, key.model)})
        wrong = sorted(unused)[0]
        raise UserError(
            f"--map {quote(wrong)}: {quote(side.name)} has no such method or model.{did_you_mean(wrong, there)} "
            f"It has {', '.join(there)}."
        )
    return found


def _refuse_near(cell: Cell, others: Sequence[Cell]) -> None:
    """Raise UserError if one of the other cells has the same task, method and budget as the cell, and differs in model,
    interval or seed."""
    for other in others:
        mine, theirs = cell.key, other.key
        if (mine.task, mine.method, mine.budget) != (theirs.task, theirs.method, theirs.budget):
            continue
        for name in ("model", "interval", "seed"):
            if (a := getattr(mine, name)) != (b := getattr(theirs, name)):
                remedy = " --map BASE=NEW compares two models on purpose." if name == "model" else ""
                raise UserError(not_comparable(cell, other, SAME[name], quote(a), quote(b)) + remedy)


def _refuse_tasks(base: Side, new: Side, old: Mapping[Key, Cell], now: Mapping[Key, Cell]) -> None:
    """Raise UserError if the sides share no cell, or if they share a task but none of its questions."""
    if not {*old} & {*now}:
        raise UserError(
            f"{quote(base.name)} and {quote(new.name)} share no cell: {_few(old)}, against {_few(now)}. "
            "Cells pair by model, task, method, budget, interval and seed; --map BASE=NEW pairs two methods or models."
        )
    for task in sorted({key.task for key in old if key in now}):
        asked = [{q for key, cell in side.items() if key.task == task for q in cell.questions} for side in (old, now)]
        if not asked[0] & asked[1]:
            raise UserError(
                f"{bare(base.name)} and {bare(new.name)} share no question of task {quote(task)}. Run both sides on "
                "the same questions."
            )


def _pair(key: Key, base: Cell, new: Cell, *, mapped: bool) -> Pair:
    """Return the pair of two cells. mapped: whether --map pairs the cells' models. Raises UserError if the cells are
    not comparable."""
    found = differences(base, new, mapped=mapped)
    refuse(base, new, found)
    shared = tuple(sorted(q for q in base.questions if q in new.questions))
    return Pair(key, base, new, shared, tuple(found))


def _few(keys: Mapping[Key, Cell]) -> str:
    return few([key.cell for key in sorted(keys, key=Key.order)], 3)
