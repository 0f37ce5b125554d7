"""Where task data come from: a folder, the bundled files or the hub, never silently another source.

    data = Data("my-data")                 # Data(): KVBENCH_DATA, then bundled, then the hub at the pinned revision
    rows = data.rows("aime24", manifest)
    data.used["aime24"]                    # what was read: source, place, revision, hashes; for the run's record

Order: ``--data``, ``KVBENCH_DATA``, bundled, hub. The first that is *given* is the one that counts: a folder without
the task's file is an error, not a reason to look further. Row count and ids are compared with the task's manifest.

Only JSON-lines files and the hub's own parquet/JSON/arrow files are read. Loading scripts of data sets are refused. The
`datasets` library does the download and its cache; it is imported when the hub is really needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import SetupError, UserError, show
from kvbench.models import UNREACHABLE
from kvbench.task import Manifest

BUNDLED = Path(__file__).parent / "bundled"
FILE_LIMIT = 512 * 1024 * 1024  # bytes; the largest offline file of a native task has 4 MB

Source = Literal["--data", "KVBENCH_DATA", "bundled", "hub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUsed:
    """What a task's rows were read from. `mismatch` says how they differ from the manifest, when that was allowed."""

    task: str
    source: Source
    location: str  # file, or the hub's name of the data set
    revision: str | None  # commit on the hub
    sha256: str | None  # of the file
    ids_sha256: str | None  # of the sorted ids, one per line
    rows: int
    mismatch: str = ""


class Data:
    """The data source of a run.

    Args:
        path: ``--data``, a folder laid out like the manifests' paths, or the file of the only task.
        revision: overrides the pinned hub revision.
        allow_mismatch: record a different row count or other ids instead of raising.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        revision: str | None = None,
        allow_mismatch: bool = False,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.revision, self.allow_mismatch = revision, allow_mismatch
        self.env_path = Path(env["KVBENCH_DATA"]) if env.get("KVBENCH_DATA") else None
        self.used: dict[str, DataUsed] = {}

    def rows(self, task: str, manifest: Manifest) -> list[dict[str, Any]]:
        """The rows of a task in the source's order, with the offline file's column names. Raises SetupError."""
        source, file = self._locate(task, manifest)
        if file is None:
            rows, revision = _from_hub(task, manifest, self.revision or manifest.revision)
            location, sha256 = manifest.hub, None
        else:
            rows, location, revision = _from_file(file), str(file), None
            sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        ids = [str(row["id"]) for row in rows if "id" in row]
        ids_sha256 = _hash_ids(ids) if rows and len(ids) == len(rows) else None
        mismatch = _mismatch(manifest, len(rows), ids, ids_sha256)
        if mismatch and not self.allow_mismatch:
            where = f"{show(location)} ({source}{f', revision {revision}' if revision else ''})"
            raise SetupError(
                f"data of task {show(task)} in {where} are not the expected ones: {mismatch}. "
                "Point --data or KVBENCH_DATA to the right file."
            )
        self.used[task] = DataUsed(
            task=task,
            source=source,
            location=location,
            revision=revision,
            sha256=sha256,
            ids_sha256=ids_sha256,
            rows=len(rows),
            mismatch=mismatch,
        )
        return rows

    def _locate(self, task: str, manifest: Manifest) -> tuple[Source, Path | None]:
        """Which source counts, and its file (None for the hub)."""
        given: tuple[tuple[Source, Path | None], ...] = (("--data", self.path), ("KVBENCH_DATA", self.env_path))
        for source, folder in given:
            if folder is None:
                continue
            if not folder.exists():
                raise SetupError(f"{source} {show(folder)} does not exist.")
            file = folder if folder.is_file() else folder / manifest.path
            if not file.is_file():
                raise SetupError(f"{source} has no data for task {show(task)}: looked for {show(file)}.")
            return source, file
        bundled = BUNDLED / manifest.path
        return ("bundled", bundled) if bundled.is_file() else ("hub", None)


def _from_file(file: Path) -> list[dict[str, Any]]:
    try:
        return [row for _, row in read_jsonl(file, str(file))]
    except UserError as error:
        raise SetupError(str(error)) from None
    except OSError as error:
        raise SetupError(f"cannot read {show(file)}: {error.strerror}.") from None


def _hash_ids(ids: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{i}\n" for i in sorted(ids)).encode()).hexdigest()


def _mismatch(manifest: Manifest, count: int, ids: Sequence[str], ids_sha256: str | None) -> str:
    if count != manifest.rows:
        return f"{count} rows instead of {manifest.rows}"
    if len(set(ids)) < len(ids):
        return "some ids occur twice"
    if manifest.ids_sha256 and ids_sha256 is None:
        return "rows without an id"
    return "other ids" if manifest.ids_sha256 and ids_sha256 != manifest.ids_sha256 else ""


# --- the hub ----------------------------------------------------------------------------------------------------------


def _from_hub(task: str, manifest: Manifest, revision: str | None) -> tuple[list[dict[str, Any]], str | None]:
    import datasets
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # it tells of every retry; `hub_error` tells the outcome
    try:
        table = datasets.load_dataset(manifest.hub, manifest.config, split=manifest.split, revision=revision)
    except Exception as error:
        raise hub_error(error, task, manifest) from None
    sources = table.info.download_checksums or {}
    commit = next((m[1] for url in sources if (m := re.search(r"@([0-9a-f]{40})/", str(url)))), revision)
    rows = []
    for index, hub_row in enumerate(table):
        row = {manifest.rename.get(column, column): value for column, value in dict(hub_row).items()}
        if manifest.hub_id is not None:
            row["id"] = manifest.hub_id(index, hub_row)
        rows.append(row)
    return rows, commit


def hub_error(error: Exception, task: str, manifest: Manifest) -> SetupError:
    """The line for a failed download. The libraries tell the reasons apart by class names and texts only."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = {base.__name__ for e in chain for base in type(e).__mro__}
    text = " ".join(str(e) for e in chain)
    if "loading script" in text or "Dataset scripts are no longer supported" in text or "trust_remote_code" in text:
        return SetupError(
            f"data set {show(manifest.hub)} ships a loading script; kvbench reads only parquet/JSON/arrow files."
        )
    if "GatedRepoError" in kinds or re.search(r"\bgated\b", text):
        return SetupError(f"data set {show(manifest.hub)} is gated: accept the terms on its page and set HF_TOKEN.")
    if kinds & UNREACHABLE:
        return SetupError(
            f"task {show(task)} is not on this machine and the hub is unreachable. Run it once on a connected machine "
            f"(HF_HUB_OFFLINE=1 then uses what is cached), or give a folder that holds {manifest.path} with --data or "
            "KVBENCH_DATA."
        )
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError", "RevisionNotFoundError"}:
        return SetupError(
            f"the hub has no data set {show(manifest.hub)} at revision {show(manifest.revision or 'main')} "
            "(or it is private and HF_TOKEN is not set)."
        )
    first = (str(error).splitlines() or [""])[0]
    return SetupError(f"data set {show(manifest.hub)} cannot be loaded: {type(error).__name__}: {show(first)}.")


# --- JSON lines -------------------------------------------------------------------------------------------------------


def read_jsonl(file: Path, label: str, *, problems: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSON-lines file. Blank lines are skipped; a byte-order mark and CRLF are accepted.

    `label` is how messages name the file. Raises UserError for what is not a plain file, not UTF-8 or not JSON
    objects; with a list of `problems`, bad lines are added to it and skipped.
    """
    name = show(label)[1:-1]
    raw = read_plain(file, name, FILE_LIMIT)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8 (byte 0x{raw[error.start]:02x} at offset {error.start}). Save it as UTF-8."
        ) from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, _parse_line(line.rstrip("\r"), f"{name}:{number}")
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))


def read_plain(file: Path, name: str, limit: int) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; anything without an end is refused before it is opened."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{name} does not exist.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    kind = next((noun for test, noun in kinds.items() if test(status.st_mode)), None)
    if kind is None and not stat.S_ISREG(status.st_mode):
        kind = "a device"
    if kind:
        raise UserError(f"{name} is {kind}.")
    if status.st_size > limit:
        raise UserError(f"{name} has {status.st_size / 1e9:.1f} GB; the limit is {limit / 1e9:.1f} GB.")
    try:
        with file.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None


def _parse_line(line: str, where: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not allowed")

    try:
        row = json.loads(line, parse_constant=refuse, parse_float=_finite)
    except json.JSONDecodeError as error:
        what = error.msg[0].lower() + error.msg[1:].removesuffix(" delimiter")
        raise UserError(
            f"{where}: not JSON ({what.replace('expecting', 'expected')} at column {error.colno})."
        ) from None
    except RecursionError:
        raise UserError(f"{where}: not JSON (nested too deeply).") from None
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({str(error).split(':')[0].split(';')[0]}).") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object {{...}}; got {json_type(row)}.")
    return row


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is too large")
    return value


def json_type(value: object) -> str:
    """What JSON calls the type of a parsed value."""
    names = {
        dict: "object",
        list: "list",
        str: "text",
        bool: "true/false",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
