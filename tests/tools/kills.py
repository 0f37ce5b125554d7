"""Kills kvbench with kill -9 at random moments and checks what is left.

Killed are a run, its continuation, 'kvbench score', 'kvbench score --all', and the seal phase of a finished run, at
every step of its writes and at random moments between them. After each kill every row that the killed process had
acknowledged (its record was written and fdatasync had returned) must be readable, with the same output. In the end each
run is finished, and rows.parquet and texts.parquet must equal those of a run that was never disturbed: bit by bit and
in the same order, apart from the columns that state time.

The killed processes are real ones with the real command line, forked from this one so that kills fall into the work and
not into the imports. They commit every 0.05 s instead of every 2 s, so that a run of seconds has many commits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.commands import Command, Tell, at_steps, end_all, watch
from support.final_tables import TIMING, differences

from kvbench.errors import UserError
from kvbench.store import read_run, read_texts
from kvbench.taskkit.synthetic_task import SyntheticTask

KINDS = {  # what is killed, and its share of the kills in percent
    "run": 26,
    "run --resume": 22,
    "score": 13,
    "score --all": 13,
    "sealing": 26,
}
SEALING = (  # the steps of sealing; a kill falls on each in turn, then between each and the next
    *("rows.parquet opened", "texts.parquet opened", "rows written", "texts written", "tables verified"),
    *("seal removed", "texts.parquet written", "texts.parquet replaced", "rows.parquet written"),
    *("rows.parquet replaced", "seal.json opened", "seal.json written", "seal.json replaced"),
)
COMMIT_SECONDS = 0.05
DELAY = 0.03  # seconds at most from the event that was drawn to the kill
EPILOG = """examples:
  python tests/tools/kills.py                          # 100 kills
  python tests/tools/kills.py --kills 10 --seed 7
  python tests/tools/kills.py --folder /disk/to/try    # on another file system
"""


@dataclass
class Tally:
    """What kills of one kind came to. Rows count once for each kill that they had to survive."""

    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    torn: int = 0  # records that a kill cut in the middle
    tables: int = 0  # final tables compared
    different: list[str] = field(default_factory=list)


class Campaign:
    """Kills of every kind on runs in a folder until each kind has its share."""

    def __init__(self, folder: Path, *, kills: int, seed: int, limit: int = 12, samples: int = 8) -> None:
        self.folder, self.dice = folder, random.Random(seed)
        self.line = (
            f"run --method full,gkv,knorm --budget 32 --task walk/orbit-100 --limit {limit} --samples {samples} "
            "--temperature 1 --interval 8 --max-new-tokens 24 --slots 16 -q --run-name"
        )
        self.rows = 3 * limit * samples
        self.tallies = {kind: Tally() for kind in KINDS}
        self.left = _shares(kills)
        self.acknowledged: dict[str, dict[str, tuple[int, str]]] = {}  # of each run: key -> (pass, hash of the output)

    def run(self) -> dict[str, Tally]:
        self._prepare()
        turn = 0
        while any(self.left.values()):
            self._generating(f"run{turn}")
            self._sealing(f"run{turn}")
            self._scoring(f"scored{turn}", "score", "ungraded", apart_from=TIMING)
            again = (*TIMING, "score_pass")  # counts how often a row was scored: more often after a kill
            self._scoring(f"all{turn}", "score --all", "undisturbed", apart_from=again)
            for made in (f"run{turn}", f"scored{turn}", f"all{turn}"):
                shutil.rmtree(self._path(made), ignore_errors=True)
            turn += 1
            print(f"{sum(self.left.values())} kills to go", file=sys.stderr, flush=True)
        return self.tallies

    def _prepare(self) -> None:
        """The undisturbed runs, and how many events each command has."""
        self.events = {"run": self._finish(f"{self.line} undisturbed")}
        self._finish(f"{self.line} ungraded", before=_broken_grader, code=4)
        for kind, base in (("score", "ungraded"), ("score --all", "undisturbed")):
            expected = f"expected {kind}".replace(" ", "_").replace("--", "")
            shutil.copytree(self._path(base), self._path(expected))
            self.events[kind] = self._finish(f"{kind.replace('score', f'score {expected}')} -q")

    def _generating(self, name: str) -> None:
        """Two kills of the command that starts the run, two of the one that resumes it, then its end."""
        lines = {"run": f"{self.line} {name}", "run --resume": f"run --resume {name} -q"}
        for kind, line in lines.items():
            for _ in range(2):
                if self.left[kind] and (kind == "run" or (self._path(name) / "run.json").exists()):
                    done = len(self.acknowledged.get(name, {}))
                    events = max(20, int(self.events["run"] * (1 - done / self.rows)))
                    self._kill_between(kind, name, line, events)
        self._finish(lines["run"])
        self._compare("run", name, "undisturbed", TIMING)

    def _scoring(self, name: str, kind: str, base: str, *, apart_from: tuple[str, ...]) -> None:
        if not self.left[kind]:
            return
        shutil.copytree(self._path(base), self._path(name))
        line = f"{kind.replace('score', f'score {name}')} -q"
        for _ in range(2):
            if self.left[kind]:
                self._kill_between(kind, name, line, self.events[kind])
        self._finish(line)
        self._compare(kind, name, f"expected_{kind}".replace(" ", "_").replace("--", ""), apart_from)

    def _sealing(self, name: str) -> None:
        """Three kills while the tables of a finished run are made again."""
        for _ in range(min(3, self.left["sealing"])):
            number = self.tallies["sealing"].kills
            step, delay = SEALING[number % len(SEALING)], number // len(SEALING) % 2 * self.dice.random() * DELAY
            line = f"run --resume {name} -q" if self.dice.random() < 0.5 else f"repair {name}"
            command = Command(line, cwd=self.folder, before=_standing(step))
            command.wait_for(f"step {step}")
            if delay:
                command.send(signal.SIGCONT)
                time.sleep(delay)
            self._killed("sealing", name, command)
        self._finish(f"repair {name}")
        self._compare("sealing", name, "undisturbed", TIMING)

    def _kill_between(self, kind: str, name: str, line: str, events: int) -> None:
        """Kill a command some milliseconds after one of its events."""
        command = Command(line, cwd=self.folder, before=_watched)
        stop, told = self.dice.randrange(events), self._telling(name, command)
        for _ in zip(range(stop), told):
            pass
        time.sleep(self.dice.random() * DELAY)
        self._killed(kind, name, command, told)

    def _telling(self, name: str, command: Command) -> Iterator[str]:
        """The command's events, with the rows that it acknowledges kept."""
        for event in command.events():
            word, _, rest = event.partition(" ")
            if word == "saved":
                key, score_pass, digest = rest.split()
                self.acknowledged.setdefault(name, {})[key] = (int(score_pass), digest)
            yield event

    def _killed(self, kind: str, name: str, command: Command, told: Iterator[str] | None = None) -> None:
        """Kill the command, take what it had told until then, and look for every acknowledged row."""
        ended = command.kill()
        for _ in told or self._telling(name, command):
            pass
        command.close()
        if ended.code != -signal.SIGKILL:  # it was faster
            assert ended.code == 0, ended
            return
        tally = self.tallies[kind]
        self.left[kind] -= 1
        tally.kills += 1
        kept = self.acknowledged.get(name, {})
        lost, torn = missing(self._path(name), kept)
        tally.acknowledged += len(kept)
        tally.lost += lost
        tally.torn += torn

    def _finish(self, line: str, *, before: Callable[[Tell], None] | None = None, code: int = 0) -> int:
        """Run a command to its end. Returns the number of its events."""
        command = Command(line, cwd=self.folder, before=before or _watched)
        events = sum(1 for _ in command.events())
        ended = command.end()
        command.close()
        if ended.code != code:
            raise SystemExit(f"'kvbench {line}' ended with {ended.code}: {ended.err}")
        return events

    def _compare(self, kind: str, name: str, other: str, apart_from: tuple[str, ...]) -> None:
        tally = self.tallies[kind]
        tally.tables += 1
        found = differences(self._path(name), self._path(other), apart_from=apart_from)
        tally.different += [f"{name}: {what}" for what in found]
        tally.lost += missing(self._path(name), self.acknowledged.get(name, {}))[0]

    def _path(self, name: str) -> Path:
        return self.folder / "results" / name


def missing(run: Path, acknowledged: dict[str, tuple[int, str]]) -> tuple[int, int]:
    """How many acknowledged rows a run lacks or has with another output or an older score, and its torn records."""
    try:
        snapshot, texts = read_run(run), read_texts(run)
    except UserError:  # killed before it was a run
        return len(acknowledged), 0
    passes = dict(zip(snapshot.rows["row_key"], snapshot.rows["score_pass"]))
    outputs = dict(zip(texts["row_key"], texts["output"]))
    lost = sum(
        key not in passes
        or passes[key] < score_pass
        or hashlib.sha256(str(outputs[key]).encode()).hexdigest() != digest
        for key, (score_pass, digest) in acknowledged.items()
    )
    return lost, sum("unfinished record" in notice for notice in snapshot.notices)


def _shares(kills: int) -> dict[str, int]:
    """Every kind's number of kills, which add up to all of them."""
    left = {kind: kills * share // 100 for kind, share in KINDS.items()}
    by_remainder = sorted(KINDS, key=lambda kind: -(kills * KINDS[kind] % 100))
    for kind in by_remainder[: kills - sum(left.values())]:
        left[kind] += 1
    return left


def _watched(tell: Tell) -> None:
    watch(tell, commit_seconds=COMMIT_SECONDS)


def _standing(step: str) -> Callable[[Tell], None]:
    """Stop at a step of sealing until the parent kills, or lets go on and kills a moment later."""

    def before(tell: Tell) -> None:
        def at(name: str) -> None:
            tell(f"step {name}")
            if name == step:
                os.kill(os.getpid(), signal.SIGSTOP)

        at_steps(at)

    return before


def _broken_grader(tell: Tell) -> None:
    """No row gets a score: 'kvbench score' has them all to do."""

    def score(self: SyntheticTask, doc: object, output: object) -> None:
        raise RuntimeError("the grader is broken")

    SyntheticTask.score = score  # type: ignore[assignment,method-assign]


def table(tallies: dict[str, Tally], campaign: Campaign) -> str:
    """The result in Markdown."""
    head = (
        "| killed | kills | rows acknowledged | lost | torn records | final tables | not equal |\n" + "| --- " * 7 + "|"
    )
    rows = {kind: (t.kills, t.acknowledged, t.lost, t.torn, t.tables, len(t.different)) for kind, t in tallies.items()}
    rows["all"] = tuple(map(sum, zip(*rows.values())))  # type: ignore[assignment]
    lines = [f"| {kind} | {' | '.join(map(str, numbers))} |" for kind, numbers in rows.items()]
    return "\n".join([head, *lines])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="how many (100)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (0)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where runs are made and removed (a temporary one)")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="kills-", dir=given.folder) as folder:
        campaign = Campaign(Path(folder), kills=given.kills, seed=given.seed)
        try:
            tallies = campaign.run()
        finally:
            end_all()
    print(f"{given.kills} kills, seed {given.seed}, runs of {campaign.rows} rows\n\n{table(tallies, campaign)}\n")
    print(f"Compared bit by bit: every column of rows.parquet but {', '.join(TIMING)}; every column of texts.parquet.")
    print("After 'score --all' also but score_pass, the number of times that a row was scored.")
    different = [what for tally in tallies.values() for what in tally.different]
    for what in different:
        print(f"NOT EQUAL: {what}")
    return 1 if different or any(tally.lost for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
