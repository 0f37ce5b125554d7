"""Registries of methods, tasks and training recipes, and hints for mistyped names."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import pkgutil
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvbench.console.faults import words
from kvbench.errors import UserError, joined, quote

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*", re.ASCII)


def near(name: str, known: Sequence[str], limit: int = 3) -> list[str]:
    """Return up to `limit` known names that the user probably meant by a mistyped `name`, nearest first."""
    plain = unicodedata.normalize("NFKC", name).strip().lower()
    if plain in known:
        return [plain]
    prefixed = [k for k in known if len(plain) >= 3 and (k.startswith(plain) or plain.startswith(k))]
    likeness = {k: difflib.SequenceMatcher(None, plain, k).ratio() for k in known}
    least = max(0.6, max(likeness.values(), default=0.0) - 0.2)  # drop names that are much less similar than the best
    close = sorted((k for k in known if likeness[k] >= least), key=lambda k: -likeness[k])[:limit]
    return list(dict.fromkeys([*close, *prefixed]))[:limit]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the hint `` Did you mean 'a' or 'b'?``, which begins with a blank; "" if no known name is near."""
    names = [quote(n) for n in near(name, known)]
    return f" Did you mean {joined(names, 'or')}?" if names else ""


class NameTaken(UserError):
    """Two modules register the same name; the message names both."""


class Registry(Generic[T]):
    """Maps names to members, which are methods, tasks or recipes. `kind`: the word for a member in messages.

    Members come from `package` and from the entry points of `group`, through which other distributions add members.
    `package` names a package or a single module. When the registry is first used, it imports this package with all its
    modules, or this module.

    families: {prefix: module}. The name ``prefix:NAME`` stands for a member that the module makes; the module is
    imported when such a name is used. The module has two functions. `canonical(NAME)` returns the usual spelling of
    NAME, or raises UserError for an unknown NAME. `member(NAME)` takes the usual spelling and returns the member. The
    registry's `names` and `items` do not list such members.
    """

    def __init__(self, kind: str, package: str, group: str, families: Mapping[str, str] | None = None) -> None:
        self.kind, self.package, self.group, self.families = kind, package, group, dict(families or {})
        self._members: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._origin: dict[str, str] = {}
        self._discovered = False

    def register(self, name: str, *, aliases: Sequence[str] = (), origin: str = "") -> Callable[[T], T]:
        """Return a decorator that registers a member, such as a class, under a name and its aliases.

        origin: where the member is defined, for messages; default: the member's module. The decorator raises UserError
        for an invalid name, NameTaken for a name that is registered already.
        """

        def add(member: T) -> T:
            place = origin or getattr(member, "__module__", "?")
            for n in (name, *aliases):
                if not _NAME.fullmatch(n):
                    raise UserError(
                        f"{self.kind} {quote(n)}: a name may have only lower-case letters, digits, '-', '_' and '.', "
                        "and must begin with a letter or a digit."
                    )
                taken = self._origin.get(n)
                if taken is not None:
                    raise NameTaken(f"{self.kind} {quote(n)} is defined twice: in {taken} and in {place}.")
            self._members[name] = member
            for n in (name, *aliases):
                self._origin[n] = place
            self._aliases.update(dict.fromkeys(aliases, name))
            return member

        return add

    def save(self) -> tuple[dict[str, T], dict[str, str], dict[str, str]]:
        """Return a copy of the registry's content, for `restore`."""
        self._discover()
        return dict(self._members), dict(self._aliases), dict(self._origin)

    def restore(self, saved: tuple[dict[str, T], dict[str, str], dict[str, str]]) -> None:
        members, aliases, origin = saved
        self._members, self._aliases, self._origin = dict(members), dict(aliases), dict(origin)

    def names(self) -> list[str]:
        """Return the registered names without aliases, sorted."""
        self._discover()
        return sorted(self._members)

    def canonical(self, name: str) -> str:
        """Return the registered name that a name or alias stands for; case and surrounding blanks do not matter. Raises
        UserError for an unknown name."""
        prefix, colon, own = name.strip().partition(":")
        if colon and (prefix := prefix.lower()) in self.families:
            return f"{prefix}:{self._family(prefix).canonical(own)}"
        self._discover()
        plain = name.strip().lower()
        plain = self._aliases.get(plain, plain)
        if plain in self._members:
            return plain
        command = f"'kvbench list {self.kind}s'"
        foreign = "" if name.isascii() else " (has non-ASCII characters)"
        hint = did_you_mean(name, [*self._members, *self._aliases])
        if hint:
            raise UserError(
                f"unknown {self.kind} {quote(name)}{foreign}.{hint} {command} shows all {len(self._members)}."
            )
        raise UserError(f"unknown {self.kind} {quote(name)}{foreign}. Known: {', '.join(self.names())} ({command}).")

    def get(self, name: str) -> T:
        """Return the member registered under a name or alias. Raises UserError for an unknown name."""
        prefix, colon, own = self.canonical(name).partition(":")
        return self._family(prefix).member(own) if colon else self._members[prefix]

    def _family(self, prefix: str) -> Any:
        return importlib.import_module(self.families[prefix])

    def items(self) -> Iterator[tuple[str, T]]:
        for name in self.names():
            yield name, self._members[name]

    def modules(self) -> set[str]:
        """Return the names of the modules in which the members known so far are defined."""
        return {getattr(member, "__module__", None) or "" for member in self._members.values()} - {""}

    def aliases(self, name: str) -> list[str]:
        return sorted(a for a, n in self._aliases.items() if n == name)

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
            importlib.import_module(f"{self.package}.{module.name}")
        for entry in importlib.metadata.entry_points(group=self.group):
            try:
                entry.load()
            except UserError:
                raise
            except Exception as error:  # another distribution's code can fail in any way
                owner = entry.dist.name if entry.dist else "an unknown distribution"
                raise UserError(
                    f"{self.kind} {quote(entry.name)} of the installed package {quote(owner)} cannot be loaded: "
                    f"{type(error).__name__}: {words(error)}. Repair or uninstall this package."
                ) from error


FAMILIES = {"kvpress": "kvbench.integrations.kvpress.family"}

methods: Registry[type] = Registry("method", "kvbench.methods", "kvbench.methods", FAMILIES)
tasks: Registry[type] = Registry("task", "kvbench.tasks", "kvbench.tasks")
# `kvbench.train.catalogue` declares and thereby registers the built-in recipes; it imports no torch.
recipes: Registry[Any] = Registry("recipe", "kvbench.train.catalogue", "kvbench.recipes")
