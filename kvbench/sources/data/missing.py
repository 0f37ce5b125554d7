"""Errors for data that are not on this machine.

`together` combines several errors into one, whose text names the command that fetches the data of all tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import SetupError, bare, quote
from kvbench.task import Manifest


class DataMissing(SetupError):
    """The error for missing data of a task. Either the user's data folder lacks them, or the user gave no
    folder and kvbench cannot or may not download them.

    where: the reason in words, such as "--data has no data" or "the hub is unreachable". folder: the user's data folder
    that lacks the data; None: the user gave no folder.
    """

    def __init__(self, text: str, *, task: str, manifest: Manifest, where: str, folder: Path | None = None) -> None:
        super().__init__(f"{text} {terms([task])}" if manifest.gated and folder is None else text)
        self.task, self.gated, self.where, self.folder = task, manifest.gated, where, folder


def together(errors: Sequence[DataMissing], names: Sequence[str]) -> SetupError:
    """Return one error for several. `names`: the tasks' names for `kvbench data fetch`."""
    first = errors[0]
    if len(errors) == 1:
        return first
    fetch = f"kvbench data fetch {' '.join(names)}"
    if first.folder is not None:
        out = bare(first.folder)
        text = f"{first.where} for {len(errors)} tasks. '{fetch} --out {out}' on a connected machine adds them."
    else:
        text = f"the data of {len(errors)} tasks are not on this machine and {first.where}. '{fetch}' on a connected "
        text += "machine makes a folder with them for --data or KVBENCH_DATA."
    gated = [error.task for error in errors if error.gated]
    return SetupError(f"{text} {terms(gated)}" if gated else text)


def terms(tasks: Sequence[str]) -> str:
    """Return a sentence on how to get access to the gated data of tasks."""
    which = f"{' and '.join(map(quote, tasks))} {'is' if len(tasks) == 1 else 'are'} gated"
    return f"{which}: accept the terms on the hub's page and set HF_TOKEN on the connected machine."
