"""Signals to the parents of workers: the actors of Ray, or the tasks of Slurm jobs, in which workers are children."""

from __future__ import annotations

import os
from pathlib import Path

from kvbench.console.progress import Progress


class SignalsParents(Progress):
    """Sends one signal to the parent of each worker that has saved rows first, second and so on.

    journal: of the run. A worker's segment has the worker's process id in its name.
    """

    def __init__(self, journal: Path, *signals: int) -> None:
        super().__init__(quiet=True)
        self.journal, self.left = journal, list(signals)
        self._seen: set[str] = set()

    def update(self, *_: object) -> None:
        for path in self.journal.glob("*.jsonl"):
            if self.left and path.name not in self._seen and path.stat().st_size:
                self._seen.add(path.name)
                child = path.stem.split("-")[-2]
                os.kill(int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1]), self.left.pop(0))
