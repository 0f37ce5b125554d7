"""What a scenario works with: a folder with runs of the built-in model in it, and command lines in processes to break.

    @scenario("F06")
    def torn_record(stage: Stage) -> None: ...

Every fault of data/faults.csv has one scenario; test_faults.py calls them by id.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.commands import Before, Command, Ended
from support.final_tables import TIMING, differences
from support.folders import DATA

from kvbench.store import read_run

# Twelve rows: two methods, three questions, two samples each.
GRID = "--method full,knorm --budget 32 --task walk/orbit-100 --limit 3 --samples 2 --temperature 1 --interval 8"
RUN = f"run {GRID} --max-new-tokens 24 --slots 2 -q --run-name r1"
ROWS = 12
FULL = os.environ.get("FAULTS") == "full"  # as many repetitions as data/faults.csv asks for

FAULTS = list(csv.DictReader((DATA / "faults.csv").open(encoding="utf-8", newline="")))

Scenario = Callable[["Stage"], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(fault: str) -> Callable[[Scenario], Scenario]:
    """Register the scenario of a fault."""

    def add(function: Scenario) -> Scenario:
        assert fault not in SCENARIOS, f"{fault} has two scenarios"
        SCENARIOS[fault] = function
        return function

    return add


@dataclass
class Stage:
    """Where a scenario plays.

    Attributes:
        folder: its working directory; runs are below ``results``.
        undisturbed: a finished run of `RUN` that nothing disturbed. Not to be changed.
        fault: the row of data/faults.csv.
    """

    folder: Path
    undisturbed: Path
    fault: Mapping[str, str]
    request: pytest.FixtureRequest

    @property
    def run_dir(self) -> Path:
        return self.folder / "results" / "r1"

    def repetitions(self, few: int) -> int:
        """`few` in everyday tests, the number in the fault's text with FAULTS=full."""
        return int(max(re.findall(r"\d+", self.fault["fault"]), key=int)) if FULL else few

    def fixture(self, name: str) -> Any:
        return self.request.getfixturevalue(name)

    def start(self, line: str, before: Before | None = None, **options: Any) -> Command:
        return Command(line, cwd=self.folder, before=before, **options)

    def call(self, line: str, before: Before | None = None, **options: Any) -> Ended:
        """A command to its end. No command may ever show a traceback."""
        ended = self.start(line, before, **options).end()
        assert "Traceback" not in ended.err, ended.err
        return ended

    def done(self, line: str, before: Before | None = None, **options: Any) -> Ended:
        """A command that must end with exit code 0."""
        ended = self.call(line, before, **options)
        assert ended.code == 0, ended
        return ended

    def typed(self, text: str, command: str) -> str:
        """The command of kvbench that a message tells to type, without its first word."""
        found = re.search(rf"kvbench ({command}\b[^'\n]*)", text)
        assert found, f"no 'kvbench {command}' in {text!r}"
        return found[1].rstrip(".")

    def finished(self, folder: Path | None = None) -> Path:
        """A copy of the undisturbed run."""
        return Path(shutil.copytree(self.undisturbed, (folder or self.folder / "results") / "r1"))

    def interrupted(self) -> Path:
        """A run whose tables were not made yet."""
        run = self.finished()
        for name in ("rows.parquet", "texts.parquet", "seal.json"):
            (run / name).unlink()
        return run

    def rows(self, run: Path | None = None) -> pd.DataFrame:
        return read_run(run or self.run_dir).rows

    def check_final(self, run: Path | None = None, apart_from: tuple[str, ...] = ()) -> None:
        """The run is finished and its tables are those of the undisturbed run."""
        assert read_run(run or self.run_dir).sealed
        assert differences(run or self.run_dir, self.undisturbed, apart_from=(*TIMING, *apart_from)) == []


def segment_of(run: Path) -> Path:
    """The only segment of a run's journal."""
    (segment,) = (run / "journal").iterdir()
    return segment


def failing(error: Exception) -> Before:
    """A process in which loading the model's weights is an error."""

    def before(tell: Callable[[str], None]) -> None:
        import transformers

        def load(*arguments: Any, **options: Any) -> None:
            raise error

        transformers.AutoModelForCausalLM.from_pretrained = load

    return before


NO_WEIGHTS = failing(AssertionError("the model was loaded"))
