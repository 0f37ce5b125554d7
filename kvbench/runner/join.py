"""Joins the folders of a run's shards into one run that has each row once, with its texts. Loads no torch, model or
task.

A shard may be unfinished, or still running: its saved rows are joined, and joining again adds the rows saved since. The
joined run has the settings and the record of the shards, so ``kvbench run --resume`` generates the rows that no shard
had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.errors import UserError, quote
from kvbench.runner import same_run
from kvbench.runner.shard import Shard, recorded
from kvbench.runner.shard_folder import ShardFolder, check_complete
from kvbench.store import Journal, RunFolder
from kvbench.store.recovery import Entry, TextReader, read_journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The outcome of joining one shard.

    rows: how many finished rows the shard has. added: how many of its records were copied into the joined run.
    different: for how many of its rows with status "ok" the joined run has a record of equal rank (`Entry.rank`), but
    with another output or score.
    """

    folder: ShardFolder
    rows: int
    added: int
    different: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A joined run.

    planned: how many rows the complete run has. statuses: how many rows it has now, by status. parts: the outcome for
    each shard that was joined. missing: the shards that the user did not name.
    """

    run_dir: Path
    planned: int
    statuses: Counter[str]
    parts: tuple[Part, ...]
    missing: tuple[Shard, ...]


class _Known(NamedTuple):
    """The joined run's record of a row. rank: of two records of a row, the one with the higher rank counts."""

    rank: tuple[bool, int, bool]
    outcome: tuple[object, ...]
    status: str

    @classmethod
    def of(cls, entry: Entry) -> _Known:
        return cls(entry.rank, entry.outcome, str(entry.row["status"]))


def join(
    shards: Sequence[ShardFolder],
    out: Path,
    name: str,
    *,
    command: Sequence[str],
    say: Callable[[str], object],
    allow_version_change: bool = False,
    take_over: bool = False,
) -> Joined:
    """Write the rows of shards into the run of this name, make its tables, and return how many rows each shard added.

    shards: from `kvbench.runner.shard_folder.read_shards`. say: receives warnings of one line. Raises UserError if the
    run of this name exists but has other settings or inputs. Raises RunInUseError if a process writes to this run.
    Raises SetupError if a disk fails, or if a journal or the run's record is damaged.
    """
    first = shards[0]
    environment = {k: v for k, v in first.environment.items() if k not in first.shard.record(0)}
    with RunFolder.open(
        out,
        name,
        first.info["config"],
        environment=environment,
        command=command,
        planned=first.rows_of_all_shards,
        take_over=take_over,
        allow_version_change=allow_version_change,
    ) as folder:
        notices = _check_target(folder, environment, allow_version_change)
        folder.done_keys()
        for text in (*folder.notices, *notices):
            say(text)
        known = {key: _Known.of(entry) for key, entry in folder.content().entries.items()}
        with folder.journal(again="join again") as journal:
            parts = tuple(_add(shard, known, journal, say) for shard in shards)
        folder.seal()
    here = {shard.shard for shard in shards}
    every = (Shard(first.shard.of, number) for number in range(1, first.shard.of + 1))
    return Joined(
        run_dir=folder.path,
        planned=max(first.rows_of_all_shards, folder.planned or 0),
        statuses=Counter(row.status for row in known.values()),
        parts=parts,
        missing=tuple(shard for shard in every if shard not in here),
    )


def _add(shard: ShardFolder, known: dict[str, _Known], journal: Journal, say: Callable[[str], object]) -> Part:
    """Copy records of a shard into the joined run, and return the outcome.

    A record is copied if the joined run has no record of the same row, or one with a lower `Entry.rank`: its answer
    has no score, was scored again less often, or is missing because generation failed.
    """
    state = read_journal(shard.path)
    for text in state.notices:
        say(f"{shard.path.name}: {text}")
    added = different = 0
    with TextReader(shard.path) as reader:
        for key, entry in state.entries.items():
            has, now = known.get(key), _Known.of(entry)
            if has is None or now.rank > has.rank:
                journal.copy(key, reader.record(entry))
                known[key] = now
                added += 1
            else:
                different += entry.ok and now.rank == has.rank and now.outcome != has.outcome
    return Part(folder=shard, rows=len(state.done), added=added, different=different)


def _check_target(folder: RunFolder, environment: Mapping[str, Any], allowed: bool) -> list[str]:
    """Raise UserError if the run to write to is itself a shard, or began with other inputs than the shards. Raises
    SetupError if its record is damaged. Returns notices about the changes that are allowed."""
    before = folder.info["environment"]
    check_complete(folder.path, before)
    if (shard := recorded(folder.name, before)) is not None:
        raise UserError(f"run {quote(folder.name)} is itself shard {shard} of a run; give another --run-name.")
    return same_run.check(folder.name, before, environment, allow_version_change=allowed)
