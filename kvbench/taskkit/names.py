"""Read names of tasks: ``base[/variant][@length]`` such as ``ruler/vt@8k``, patterns (``ruler/niah_*@4k``) and groups.

Case and surrounding blanks do not matter, except for the case of the name after ``lm_eval:``. A length is a
number of tokens; ``k`` stands for 1024.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import KVBenchError, UserError, quote
from kvbench.registry import did_you_mean, tasks
from kvbench.task import Manifest, Task

LM_EVAL = "lm_eval:"  # prefix of the names of lm-eval's tasks
_NAME = re.compile(r"[^\W.][\w.-]{0,63}")
_LENGTH = re.compile(r"([1-9][0-9]{0,8})(k?)")
_ALLOWED = "letters, digits, '-', '_', '.', up to 64"


@dataclass(frozen=True, slots=True)
class _Parts:
    base: str  # registered name
    variant: str
    length: str


def is_gated(name: str) -> bool:
    """Return whether the owner of a task's data forbids showing these data; False if the task cannot be loaded."""
    try:
        return get_task(name).gated
    except KVBenchError:
        return False


def gated_data() -> set[str]:
    """Return the hub names of the data sets that must not be shown, because their owners forbid it."""
    manifests = (getattr(cls, "manifest", None) for _, cls in tasks.items())
    return {one.hub for one in manifests if isinstance(one, Manifest) and one.gated and one.hub}


def get_task(name: str) -> Task:
    """Make the task with this name. Raises UserError for an unknown or invalid name; a name after ``lm_eval:`` is
    checked only when the task is used."""
    if name.strip().lower().startswith(LM_EVAL):
        from kvbench.taskkit.lm_eval_task import LMEvalTask

        return LMEvalTask(name.strip()[len(LM_EVAL) :])
    parts = _split(name)
    cls = tasks.get(parts.base)
    known: tuple[str, ...] = getattr(cls, "variants", ())
    if parts.variant and parts.variant not in known:
        hint = did_you_mean(parts.variant, known)
        raise UserError(f"task {quote(parts.base)} has no variant {quote(parts.variant)}.{hint} {_listed(known)}")
    lengths: tuple[int, ...] = getattr(cls, "lengths", ())
    length = _tokens(parts, name) if parts.length else 0
    task: Task = cls(parts.variant, length) if lengths else cls(parts.variant) if known else cls()
    shown = parts.base
    if parts.variant and (parts.variant != known[0] or getattr(cls, "group", False)):
        shown += f"/{parts.variant}"
    task.name = f"{shown}@{task.length}" if lengths else shown
    return task


def expand(name: str) -> list[str]:
    """Return the names of the tasks that ``--task NAME`` means.

    These are a single task, all tasks of a group, or all tasks that fit a pattern. Raises UserError for an unknown or
    invalid name, and for a pattern that no task fits; it does not check a name after ``lm_eval:``.
    """
    if name.strip().lower().startswith(LM_EVAL):
        return [LM_EVAL + name.strip()[len(LM_EVAL) :]]
    parts = _split(name)
    cls = tasks.get(parts.base)
    known: tuple[str, ...] = getattr(cls, "variants", ())
    lengths: tuple[int, ...] = getattr(cls, "lengths", ())
    group = not parts.variant and getattr(cls, "group", False)
    variants = [parts.variant]
    if group or "*" in parts.variant:
        variants = [v for v in known if fnmatch.fnmatchcase(v, parts.variant or "*")]
        if not variants:
            raise UserError(f"task {quote(parts.base)} has no variant like {quote(parts.variant)}. {_listed(known)}")
    sizes = [f"@{length}" for length in lengths] if parts.length == "*" else [f"@{parts.length}"]
    return [
        get_task(f"{parts.base}{variant and '/' + variant}{size if parts.length else ''}").name
        for size in sizes
        for variant in variants
    ]


def collapsed(names: Sequence[str]) -> list[str]:
    """Return names of tasks, with a group's name in place of its tasks if all tasks of the group are listed."""
    shorter = []
    for name in names:
        base, at, length = base_name(name), *name.partition("@")[1:]
        group = f"{base}{at}{length}"
        members = set() if name.startswith(LM_EVAL) else set(expand(group))
        whole = name in members and members <= set(names)
        shorter.append(group if whole else name)
    return list(dict.fromkeys(shorter))


def task_names() -> list[str]:
    """Return the names of all tasks and variants, as `kvbench list tasks` shows them."""
    names: list[str] = []
    for base, cls in tasks.items():
        group = getattr(cls, "group", False)
        names += [base, *(f"{base}/{variant}" for variant in getattr(cls, "variants", ())[0 if group else 1 :])]
    return names


def base_name(name: str) -> str:
    """Return the part of a task's name under which the task is registered: ``ruler`` for ``ruler/vt@8192``. A name that
    begins with ``lm_eval:`` is returned whole."""
    return name if name.startswith(LM_EVAL) else re.split("[/@]", name, maxsplit=1)[0]


def _split(name: str) -> _Parts:
    """Split a task's name into base (as registered), variant and length. Raises UserError for an invalid name."""
    path, at, length = (part.strip() for part in name.strip().lower().partition("@"))
    base, slash, variant = (part.strip() for part in path.partition("/"))
    if "*" in base and _NAME.fullmatch(base.replace("*", "x")):
        raise UserError(
            f"{quote(name)}: write '*' only after '/', where it means any text, or after '@', where it means every "
            "length: ruler/niah_*@*. 'kvbench list tasks' shows the names."
        )
    if not _NAME.fullmatch(base) or (slash and not _NAME.fullmatch(variant.replace("*", "x"))):
        raise UserError(f"{quote(name)} is not a task name ({_ALLOWED}). A task from a file is given with --task-file.")
    parts = _Parts(tasks.canonical(base) if base.isascii() else tasks.canonical(name), variant, length)
    if at:
        _check_length(parts, name)
    return parts


def _check_length(parts: _Parts, name: str) -> None:
    if not getattr(tasks.get(parts.base), "lengths", ()):
        raise UserError(f"task {quote(parts.base)} takes no length; write it without {quote('@' + parts.length)}.")
    if parts.length != "*" and not _LENGTH.fullmatch(parts.length):
        raise UserError(
            f"{quote(name)}: {quote(parts.length)} is no length. Give a number of tokens, such as @4096 or @4k (k "
            "means 1,024), or @* for all lengths of the task."
        )


def _listed(variants: tuple[str, ...]) -> str:
    return f"It has {', '.join(variants)}." if variants else "It has no variants."


def _tokens(parts: _Parts, name: str) -> int:
    length = _LENGTH.fullmatch(parts.length)
    if length is None:
        raise UserError(f"{quote(name)} names several lengths; give one, such as @4096.")
    return int(length[1]) * (1024 if length[2] else 1)
