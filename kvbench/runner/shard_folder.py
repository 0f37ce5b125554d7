"""Reads the folders of shards that are to be joined, and checks that they are shards of one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import NEW_RUN, SetupError, UserError, bare, few, quote
from kvbench.runner import same_run
from kvbench.runner.shard import Shard, recorded
from kvbench.store import manifest
from kvbench.store.tables import check_journal_complete

NEEDED = ("model", "dtype", "device", "tasks", "plugins", "methods")  # parts of a record that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFolder:
    """The folder of a shard, with the content of its run.json."""

    path: Path
    shard: Shard
    info: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ShardFolder:
        """Read the record of a shard. Raises UserError if the run is no shard, SetupError if its folder is damaged."""
        info = manifest.read(path)
        check_complete(path, info["environment"])
        shard = recorded(path.name, info["environment"])
        if shard is None:
            raise UserError(
                f"{quote(path.name)} is not a shard of a run; name folders that 'kvbench run --shard I/N' made."
            )
        check_journal_complete(path)
        return cls(path=path, shard=shard, info=info)

    @property
    def environment(self) -> dict[str, Any]:
        """The part `environment` of the shard's run.json: its versions, device and inputs."""
        return {"chat_template": None, **self.info["environment"]}

    @property
    def planned(self) -> int:
        """The number of rows that the finished shard has."""
        return int(self.info.get("planned") or 0)

    @property
    def rows_of_all_shards(self) -> int:
        """The number of rows that all shards have together."""
        return int(self.environment.get("rows_of_all_shards") or 0)


def read_shards(paths: Iterable[Path], *, allow_version_change: bool = False) -> list[ShardFolder]:
    """Read the records of shards, and return the shards in the order of their numbers. Raises UserError if they are not
    shards of one run, or if one is given twice."""
    folders = [ShardFolder.read(path) for path in paths]
    first = folders[0]
    places: dict[Shard, Path] = {}
    for folder in folders:
        if folder.shard.of != first.shard.of:
            raise UserError(
                f"run {quote(folder.path.name)} is shard {folder.shard} and {quote(first.path.name)} is shard "
                f"{first.shard}; join shards of one run, which all have the same N in I/N."
            )
        if folder.shard in places:
            raise UserError(
                f"shard {folder.shard} is given twice: {quote(places[folder.shard])} and {quote(folder.path)}. "
                "Name only one of them."
            )
        places[folder.shard] = folder.path
        _check_same(first, folder, allow_version_change)
    return sorted(folders, key=lambda folder: folder.shard)


def common_name(shards: Sequence[ShardFolder]) -> str:
    """Return the run's name: the shards' names without their suffixes (`Shard.suffix`). Raises UserError if the names
    without suffixes differ, or if the shards' names do not end with their suffixes."""
    names = {shard.path.name.removesuffix(shard.shard.suffix) for shard in shards}
    if len(names) > 1 or names == {shards[0].path.name}:
        raise UserError(
            f"the names of the shards do not give one name for the joined run ({few(sorted(map(quote, names)), 3)}); "
            "give --run-name NAME."
        )
    return names.pop()


def check_complete(path: Path, environment: Mapping[str, Any]) -> None:
    """Raise SetupError if a run's record lacks a part in `NEEDED`, or the hash of a task's prompts."""
    lacking = [part for part in NEEDED if environment.get(part) is None]
    lacking += [
        f"prompts of task {name}" for name, task in environment.get("tasks", {}).items() if "prompts" not in task
    ]
    if lacking:
        raise SetupError(
            f"{quote(path / manifest.NAME)} is damaged (it lacks {bare(lacking[0])}). Put back a copy of it, or "
            f"{NEW_RUN}."
        )


def _check_same(first: ShardFolder, other: ShardFolder, allowed: bool) -> None:
    """Raise UserError if two shards differ in settings, model, data, methods, prompts or versions. If `allowed`, the
    sources of methods and the versions of packages may differ."""
    both = f"{quote(other.path.name)} and {quote(first.path.name)} are not shards of one run"
    if differing := manifest.compare(first.info, other.info["config"]):
        listed = [f"{bare(name)} {manifest.value(b)} and {manifest.value(a)}" for name, (a, b) in differing.items()]
        raise UserError(f"{both}: they have {few(sorted(listed), 4)}. Join shards of one configuration.")
    if first.rows_of_all_shards != other.rows_of_all_shards:
        counts = f"{other.rows_of_all_shards} and {first.rows_of_all_shards} rows"
        raise UserError(f"{both}: their runs have {counts}. Join shards of one configuration.")
    try:
        same_run.check(first.path.name, first.environment, other.environment, allow_version_change=allowed)
    except UserError as error:
        raise UserError(f"{both}: {error}") from None
    versions = [{name: one.environment.get(name) for name in manifest.VERSIONS} for one in (first, other)]
    changed = manifest.differences(*versions)
    if changed and not allowed:
        listed = [f"{n.removesuffix('_version')} {bare(b)} and {bare(a)}" for n, (a, b) in sorted(changed.items())]
        names = f"{quote(other.path.name)} and {quote(first.path.name)}"
        raise UserError(
            f"{names} were made with different versions ({', '.join(listed)}). Their rows may not be comparable: "
            "give --allow-version-change to join them."
        )
