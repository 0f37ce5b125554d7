"""Downloads and caches data from the hub or a web address, at the revision that a manifest pins.

A table on the hub is read once with the `datasets` library, which knows the layout of repositories; kvbench caches the
rows as JSON lines. Raw files from the hub stay in the cache of the hub's library. A data set that needs a loading
script is an error.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath

from kvbench.console.faults import words
from kvbench.errors import SetupError, bare, quote
from kvbench.sources import hub
from kvbench.sources.data import cache, images
from kvbench.sources.data.location import Place
from kvbench.sources.data.missing import DataMissing
from kvbench.sources.refusals import refused
from kvbench.task import Manifest

TABLES = (".parquet", ".jsonl", ".json", ".arrow", ".csv", ".tsv")


def cached(manifest: Manifest, revision: str | None) -> Place | None:
    """Return where the data of a manifest are in the cache, or None if a part is missing. Sends no request.

    revision: the commit, branch or tag to use; None: the default branch. Tables are cached by commit, so the result for
    a table is None unless `revision` is a commit.
    """
    if manifest.url:
        file = cache.place(manifest.url)
        return _from_url(manifest, file) if file.is_file() else None
    if manifest.files:
        files = [kept for name in manifest.files if (kept := hub.kept("dataset", manifest.hub, name, revision))]
        if len(files) < len(manifest.files):
            return None
        place = _from_files(manifest, tuple(files))
        return place if place.images is None or place.images.is_dir() else None
    if revision is not None and hub.is_commit(revision):
        file = _table_file(manifest, revision)
        return _from_table(manifest, file, revision) if file.is_file() else None
    return None


def fetch(task: str, manifest: Manifest, revision: str | None, bar: cache.Bar | None = None) -> Place:
    """Download the parts of the data that the cache lacks, and return where the data are.

    task: the name of the task; "" for data that belong to no task. revision: as for `cached`. bar: called with the file
    name, the bytes so far and the bytes in total. Raises SetupError.
    """
    if (place := cached(manifest, revision)) is not None:
        return place
    if not hub.may_ask(task):
        why = f"only the run's folder names it (give --task {bare(task)} again to let kvbench download it)"
        raise elsewhere(task, manifest, why)
    if manifest.url:
        try:
            return _from_url(manifest, cache.download(manifest.url, sha256=manifest.url_sha256, bar=bar))
        except cache.Unreachable:
            raise elsewhere(task, manifest, f"{quote(manifest.url)} is unreachable") from None
    if not manifest.hub:
        raise SetupError(
            f"data of task {quote(task)} come with kvbench, but {quote(manifest.path)} is missing. Reinstall kvbench."
        )
    commit = _commit(task, manifest, revision)
    try:
        if manifest.files:
            return _with_images(manifest, _from_files(manifest, _download(manifest, manifest.files, revision)))
        return _table(manifest, commit, revision)
    except SetupError:
        raise
    except Exception as error:
        raise hub_error(error, task, manifest, revision) from None


def hub_error(error: Exception, task: str, manifest: Manifest, revision: str | None = None) -> SetupError:
    """Return the error for a failed download."""
    name = f"data set {quote(manifest.hub)}"
    match error.why if isinstance(error, hub.HubError) else hub.why(error):
        case "script" | "code":
            script = re.search(r"found ([\w.-]+\.py)", str(error))
            return _script(manifest, script[1] if script else "")
        case "gated":
            return SetupError(f"{name} is gated: accept the terms on its page and set HF_TOKEN.")
        case "unreachable":
            return elsewhere(task, manifest)
        case reason if sentence := refused(name, reason, revision):
            return SetupError(sentence + " Use --data-revision to choose." * (reason == "revision" and bool(task)))
    kind = "" if isinstance(error, hub.HubError) else f"{type(error).__name__}: "
    return SetupError(f"{name} cannot be loaded: {kind}{quote((words(error).splitlines() or [''])[0])}.")


def elsewhere(task: str, manifest: Manifest, why: str = "the hub is unreachable") -> DataMissing:
    """Return the error for data that are not cached and that kvbench cannot download. why: the reason, as a clause."""
    name, what = bare(task), f"task '{bare(task)}'"
    if not task:
        what, how = f"data set {quote(manifest.hub)}", "run the command once with network access, or give a file"
    elif name.startswith("lm_eval:"):  # lm-eval downloads its own data
        how = f"run it once with network access, or give a folder with {manifest.path}"
        how += " (--data or KVBENCH_DATA); with HF_HUB_OFFLINE=1, lm-eval uses only cached data"
    else:
        how = f"'kvbench data fetch {name}' on a connected machine makes a folder with {manifest.path}"
        how += " for --data or KVBENCH_DATA"
    text = f"{what} is not on this machine and {why}. {how[0].upper()}{how[1:]}."
    return DataMissing(text, task=task, manifest=manifest, where=why)


def _commit(task: str, manifest: Manifest, revision: str | None) -> str | None:
    """Return the commit to read. Offline, this is `revision` itself, which the hub's libraries look up in their
    caches."""
    if hub.is_offline():
        if not manifest.files and not _in_datasets_cache(manifest.hub):
            raise elsewhere(task, manifest)
        return revision
    try:
        answer = hub.ask("dataset", manifest.hub, revision)
        if not manifest.files:
            _check_table(manifest, answer)
        return answer.commit
    except hub.HubError as error:
        if error.why == "revision" and revision == manifest.revision:
            raise _moved(task, manifest) from None
        raise hub_error(error, task, manifest, revision) from None


def _check_table(manifest: Manifest, answer: hub.Answer) -> None:
    """Raise SetupError or HubError for data that the `datasets` library would refuse: data with a loading script, and
    gated data. This check comes first because the import of `datasets` is slow."""
    script = f"{PurePosixPath(manifest.hub).name}.py"
    if script in answer.files:
        raise _script(manifest, script)
    rows = [file for file in answer.files if PurePosixPath(file).suffix in TABLES]
    if rows:
        hub.may_read("dataset", manifest.hub, rows[0], answer.commit)


def _script(manifest: Manifest, file: str) -> SetupError:
    named = f" The script is {quote(file)}." if file else ""
    return SetupError(
        f"data set {quote(manifest.hub)} ships a loading script; kvbench reads only parquet/JSON/arrow files.{named} "
        "With --data, give a folder that has the rows."
    )


def _in_datasets_cache(name: str) -> bool:
    """Return whether the cache of the `datasets` library may hold a data set, so that the library could read it
    offline."""
    from huggingface_hub.constants import HF_HOME

    root = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets").expanduser()
    owner = f"{name.partition('/')[0]}___".lower()
    return root.is_dir() and any(folder.name.lower().startswith(owner) for folder in root.iterdir())


def _moved(task: str, manifest: Manifest) -> SetupError:
    """Return the error for a pinned commit that the hub no longer has. The error names the hub's present commit, if
    the hub answers."""
    try:
        now = hub.ask("dataset", manifest.hub, None).commit
    except hub.HubError as error:
        return hub_error(error, task, manifest)
    return _differs(manifest, now)


def _differs(manifest: Manifest, now: str) -> SetupError:
    pinned = (manifest.revision or "main")[:7]
    return SetupError(
        f"{quote(manifest.hub)} is at revision {now[:7]}, but the task pins {pinned}. Use --data-revision to choose."
    )


# --- raw files --------------------------------------------------------------------------------------------------------


def _download(manifest: Manifest, files: tuple[str, ...], revision: str | None) -> tuple[Path, ...]:
    import huggingface_hub

    hub.hush()
    return tuple(
        Path(huggingface_hub.hf_hub_download(manifest.hub, file, repo_type="dataset", revision=revision))
        for file in files
    )


def _with_images(manifest: Manifest, place: Place) -> Place:
    """Download and unpack the archive with the images of the data at `place`, if the manifest has one; return
    `place`."""
    if place.images is not None and not place.images.is_dir():
        (archive,) = _download(manifest, (manifest.archive,), place.revision)
        wanted = images.every_name(place.rows(place.reading(), manifest), manifest.images)
        with cache.filling(place.images) as folder:
            images.unpack(archive, wanted, folder)
    return place


def _from_files(manifest: Manifest, files: tuple[Path, ...]) -> Place:
    found = re.search(r"/snapshots/([0-9a-f]{40})/", files[0].as_posix())
    commit = found[1] if found else None
    return Place(
        source="hub",
        files=files,
        member=manifest.member,
        raw=True,
        revision=commit,
        name=f"{manifest.hub}: {', '.join(manifest.files)}",
        images=_safe("images", manifest.hub, commit or "main", manifest.archive) if manifest.archive else None,
    )


def _from_url(manifest: Manifest, file: Path) -> Place:
    return Place(source="hub", files=(file,), member=manifest.member, raw=True, name=manifest.url)


# --- tables -----------------------------------------------------------------------------------------------------------


def _table_file(manifest: Manifest, commit: str) -> Path:
    return _safe("tables", manifest.hub, manifest.config or "default", manifest.split, f"{commit}.jsonl")


def _safe(kind: str, hub_name: str, *names: str) -> Path:
    """Return the path in the cache for a file or folder from the hub. Its folder is `kind`; its name consists of the
    repository's name and `names`."""
    parts = (hub_name.replace("/", "--"), *names)
    return cache.folder() / kind / "__".join(re.sub(r"[^\w.-]", "-", part) for part in parts)


def _from_table(manifest: Manifest, file: Path, commit: str) -> Place:
    folder = file.with_suffix("") if manifest.pixels else None
    return Place(source="hub", files=(file,), raw=True, table=True, revision=commit, name=manifest.hub, images=folder)


def _table(manifest: Manifest, commit: str | None, revision: str | None) -> Place:
    """Read a table with `datasets`, write it to the cache as JSON lines, and return where it is.

    commit: the commit to read; None: the commit that the library has cached. revision: the revision that the caller of
    `fetch` wants. Raises SetupError if `revision` is the pinned commit but the library has read another commit, or if
    the commit that the library has read is unknown.
    """
    import datasets

    hub.hush()
    datasets.disable_progress_bars()
    table = datasets.load_dataset(manifest.hub, manifest.config, split=manifest.split, revision=commit)
    sources = table.info.download_checksums or {}
    read = next((m[1] for url in sources if (m := re.search(r"@([0-9a-f]{40})/", str(url)))), commit)
    if revision == manifest.revision and hub.is_commit(revision) and read != revision:
        raise _differs(manifest, str(read))  # read from the library's cache, which may hold another commit
    if read is None:
        raise SetupError(
            f"the revision of data set {quote(manifest.hub)} is unknown. Give a revision "
            "(--data-revision; in kvbench train: hub:OWNER/NAME@REVISION)."
        )
    file = _table_file(manifest, read)
    rows = iter(table)
    if manifest.pixels:  # take the stored bytes, because decoding and encoding would change them
        stored = table.cast_column(manifest.pixels, datasets.Image(decode=False))
        rows = images.encoded(stored, manifest.images, manifest.pixels, file.with_suffix(""))
    with cache.keeping(file) as stream:
        for row in rows:
            stream.write(json.dumps(dict(row), ensure_ascii=False, default=str).encode() + b"\n")
    return _from_table(manifest, file, read)
