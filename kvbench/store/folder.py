"""Opens a run's folder, checks and locks it, and gives access to its journal and tables.

`RunFolder.open` and `RunFolder.resume` check names, folders, settings and versions before any work. The run is locked
until the folder is closed. A folder that has files but no run is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import NEW_RUN, UserError, bare, joined, quote
from kvbench.store import manifest, tables
from kvbench.store.again import resume_command
from kvbench.store.files import is_leftover, probe, reason, remove_leftovers, sync_folder, unwritable
from kvbench.store.journal import Journal
from kvbench.store.lock import RunLock
from kvbench.store.names import check_run_name
from kvbench.store.recovery import JournalContent, read_journal, segments_on_disk

LOCK = "lock"


class RunFolder:
    """A run's folder, opened and locked by `open` or `resume`. `notices`: warnings to the user. `info`: the content of
    run.json. `settings`: the settings that `resume_command` repeats; None: the recorded settings that the user must
    give again (`again.used`)."""

    def __init__(self, path: Path, lock: RunLock, notices: list[str], info: dict[str, Any]) -> None:
        self.path, self.name = path, path.name
        self.notices, self.info = notices, info
        self.planned: int | None = info.get("planned")
        self.settings: Mapping[str, Any] | None = None
        self._lock = lock
        self._done_before: int | None = None
        self._content: JournalContent | None = None

    @classmethod
    def open(
        cls,
        out: str | Path,
        name: str,
        config: Mapping[str, Any],
        *,
        environment: Mapping[str, Any],
        command: Sequence[str] = (),
        planned: int | None = None,
        anew: bool = False,
        take_over: bool = False,
        allow_version_change: bool = False,
    ) -> RunFolder:
        """Make a new run, or continue the run of that name if its configuration equals `config`.

        anew: if the run has no rows, replace its record. If a run ended because its model could not be loaded, it can
        thus begin again with the repaired model.

        environment: the record of versions, devices and inputs, in JSON types. planned: how many rows the run will
        have. take_over: take the lock also if this host cannot tell whether the lock's owner still runs.
        allow_version_change: continue the run although versions in `manifest.VERSIONS` have changed. Raises UserError,
        SetupError, RunInUseError.
        """
        check_run_name(name)
        path = check_out(out) / name
        _check_ours(path)
        try:
            path.mkdir(exist_ok=True)
            sync_folder(path.parent)
            probe(path)
        except OSError as error:
            raise unwritable(path, error) from error
        lock = RunLock(path / LOCK, name)
        notices = lock.acquire(take_over=take_over)
        try:
            remove_leftovers(path)
            info = manifest.read(path) if os.path.lexists(path / manifest.NAME) else None
            if info is not None:
                _check_config(path, manifest.compare(info, config))
                tables.check_journal_complete(path)
                if not anew or has_rows(path):
                    notices += check_versions(name, info, environment, allowed=allow_version_change)
                    return cls(path, lock, notices, info)
                command = command or info.get("command", ())
            info = manifest.build(name, config, environment, command, planned)
            manifest.write(path, info)
            return cls(path, lock, notices, info)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, out: str | Path, name: str, **how: Any) -> RunFolder:
        """Continue an existing run with the settings in its record. how: further arguments of `open`."""
        info = manifest.read(existing(out, check_run_name(name, "--resume")))
        return cls.open(out, name, info["config"], **how)

    def content(self) -> JournalContent:
        """Return the journal's content. Each further call reads only the records added since the call before."""
        self._content = read_journal(self.path, self._content)
        return self._content

    def forget(self) -> None:
        """Free the memory of the journal's content, some kilobytes per row. The next call of `content` reads the whole
        journal again."""
        self._content = None

    def done_keys(self) -> set[str]:
        """Return the keys of the rows that need not be generated again. Also adds the journal's notices, such as those
        about dropped records, to `self.notices`, each once."""
        state = self.content()
        self.notices += [n for n in state.notices if n not in self.notices]
        done = state.done
        self._done_before = len(done)
        return done

    def journal(self, *, again: str | None = None) -> Journal:
        """Return a journal that writes to a new segment, a file that only this process writes. again: as for `Journal`;
        None: with `resume_command`."""
        before = len(self.done_keys()) if self._done_before is None else self._done_before
        return Journal(self.path, rows_before=before, again=again or f"continue with {self.resume_command()}")

    def resume_command(self) -> str:
        """Return the command that continues the run."""
        return resume_command(self.path, self.settings)

    def seal(self) -> dict[str, Any]:
        """Make rows.parquet, texts.parquet and seal.json from the journal. Returns the content of seal.json."""
        return tables.seal(self.path, self.content())

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_out(out: str | Path) -> Path:
    """Make the results folder if it does not exist, test it by writing a file, and return its path. A link to a folder
    is followed. Raises UserError, SetupError."""
    path = Path(out)
    _there(out)
    try:
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            sync_folder(path.parent)
        probe(path)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def check_writable(out: str | Path) -> None:
    """Test by writing a file whether the results folder can be written. Raises UserError, SetupError. If the folder
    does not exist, its nearest existing parent is tested."""
    path = _there(out)
    try:
        probe(path)
    except OSError as error:
        raise unwritable(Path(out), error) from error


def check_same(out: str | Path, name: str, config: Mapping[str, Any]) -> None:
    """Check that the run `name` can be started or continued with this configuration.

    Raises UserError in these cases: the run's path is a file or a broken link; the folder holds a run with another
    configuration, or files but no run; its run.json was changed by hand or has another format. Raises SetupError if its
    run.json is damaged or cannot be read.
    """
    path = Path(out) / name
    _check_ours(path)
    if os.path.lexists(path / manifest.NAME):
        _check_config(path, manifest.compare(manifest.read(path), config))


def _there(out: str | Path) -> Path:
    """Return the folder `out` or, if `out` does not exist, its nearest parent that exists. Raises UserError if the path
    found is not a folder, or if `out` is empty, invalid or leads through a broken link."""
    if not str(out).strip():
        raise UserError("--out is empty; give a folder.")
    for part in (Path(out), *Path(out).parents):
        try:
            kind = part.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if part.is_symlink():
                raise UserError(f"--out {quote(out)} leads through a broken link; give a folder.") from None
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise UserError(f"--out {quote(out)} cannot be used ({why}); give another folder.") from None
        else:
            if not stat.S_ISDIR(kind):
                raise UserError(f"--out {quote(part)} is a file; give a folder.")
            return part
    return Path()


def existing(out: str | Path, name: str) -> Path:
    """Return the folder of a run. Raises UserError if there is no such run."""
    path = Path(out) / name
    if not os.path.lexists(path / manifest.NAME):
        names = list_runs(out)
        known = f"Runs there: {', '.join(map(bare, names))}." if names else "There are no runs there."
        raise UserError(f"no run {quote(name)} in {bare(out)}. {known}")
    return path


def has_rows(path: Path) -> bool:
    """Return whether a run has rows, in its journal or in tables that were copied without the journal. path: the run's
    folder. Raises SetupError if seal.json is damaged."""
    if segments_on_disk(path):
        return True
    sealed = tables.read_seal(path)
    return bool(sealed["segments"]) if sealed else any(os.path.lexists(path / n) for n in (tables.ROWS, tables.TEXTS))


def list_runs(out: str | Path) -> list[str]:
    """Return the names of the runs in a results folder, sorted; none if the folder cannot be read."""
    try:
        return sorted(p.name for p in Path(out).iterdir() if (p / manifest.NAME).is_file())
    except OSError:
        return []


def _check_ours(path: Path) -> None:
    """Raise UserError if a run cannot use this path: it is a file or a broken link, or a folder with files but no run.
    A folder with only a lock file and kvbench's temporary files is accepted, because a run that is killed before it
    writes run.json leaves them."""
    if path.is_symlink() and not path.exists():
        raise UserError(f"{quote(path)} is a broken link. Give another --run-name.")
    if path.exists() and not path.is_dir():
        raise UserError(f"{quote(path)} is a file. Give another --run-name.")
    if not path.is_dir() or os.path.lexists(path / manifest.NAME):
        return
    foreign = sorted(p.name for p in path.iterdir() if p.name != LOCK and not is_leftover(p.name))
    if foreign:
        raise UserError(
            f"{quote(path)} has files but no kvbench run (it holds {quote(foreign[0])}). Give another --run-name."
        )


def _check_config(path: Path, differing: manifest.Differences) -> None:
    if not differing:
        return
    changes = [(bare(name), *map(manifest.value, pair)) for name, pair in sorted(differing.items())]
    if len(changes) == 1:
        ((name, run, this),) = changes
        listed = f"{name} {run}; you asked for {this}"
    else:
        listed = "other settings: " + "; ".join(f"{name} {run}, now {this}" for name, run, this in changes[:4])
        listed += f" ({len(changes) - 4} more differ)" if len(changes) > 4 else ""
    raise UserError(f"{quote(path)} holds a run with {listed}. Give another --run-name.")


def check_versions(name: str, info: Mapping[str, Any], environment: Mapping[str, Any], *, allowed: bool) -> list[str]:
    """Compare the versions of kvbench and its libraries with those in a run's record, and return notices. info: the
    content of run.json. allowed: whether the versions may differ; if not, a difference raises UserError."""
    changed = manifest.differences(
        {n: info["environment"].get(n) for n in manifest.VERSIONS}, {n: environment.get(n) for n in manifest.VERSIONS}
    )
    if not changed:
        return []
    packages = sorted(changed)
    run = joined([f"{n.removesuffix('_version')} {bare(changed[n][0])}" for n in packages], "and")
    this = joined([bare(changed[n][1]) for n in packages], "and")
    text = f"run '{name}' was made with {run}; installed: {this}."
    if not allowed:
        raise UserError(
            f"{text} Rows of different versions may not be comparable: give --allow-version-change, or {NEW_RUN}."
        )
    return [f"{text} Every row states its versions."]
