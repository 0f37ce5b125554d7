"""The download cache, and downloads from web addresses.

The cache is the folder ``kvbench`` in ``XDG_CACHE_HOME`` (default: ``~/.cache``). The hub's library has its own cache.
Downloads use https, or http to localhost. A downloaded file that is too large or has another hash than expected is not
kept.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from kvbench.console.faults import words
from kvbench.errors import SetupError, quote
from kvbench.store.files import replacing

LIMIT = 2 * 1024**3  # most bytes of a download; the largest download of kvbench's own tasks has 21 MB
SECONDS = 30.0  # a download fails after this time without a byte
CHUNK = 1 << 20
HERE = ("localhost", "127.0.0.1", "::1")


class Unreachable(SetupError):
    """The error for a download whose host cannot be reached, or whose connection breaks or times out."""


Bar = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in total


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvbench"


@contextlib.contextmanager
def keeping(file: Path) -> Iterator[BinaryIO]:
    """Yield a stream for the new content of `file`. When the `with` block ends without an error, this content replaces
    the old content. Raises SetupError if the file cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            yield stream
    except OSError as error:
        raise SetupError(f"cannot write {quote(file)}: {error.strerror or error}.") from None


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield a temporary path at which the `with` block makes and fills a folder.

    If the block ends without an error, the filled folder is renamed to `folder`, unless `folder` has files already.
    Raises SetupError if the filled folder cannot be written or renamed.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            yield (fresh := Path(temporary) / "files")
            fresh.mkdir(exist_ok=True)
            try:
                fresh.rename(folder)
            except OSError as error:  # another process may have filled it meanwhile
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not folder.is_dir():
                    raise
    except OSError as error:
        raise SetupError(f"cannot write {quote(folder)}: {error.strerror or error}.") from None


def place(url: str) -> Path:
    """Return the path in the cache at which the file from a web address is or will be stored."""
    name = Path(urlsplit(url).path).name or "file"
    return folder() / "files" / hashlib.sha256(url.encode()).hexdigest()[:16] / name


def download(url: str, *, sha256: str = "", limit: int = LIMIT, bar: Bar | None = None) -> Path:
    """Download the file at a web address unless the cache has it; return its path in the cache. Raises SetupError.

    sha256: the hash that a newly downloaded file must have; "": not checked. limit: most bytes of the file. bar: called
    with the file name, the bytes so far and the bytes in total (None: unknown).
    """
    target = place(url)
    if target.is_file():
        return target
    if not _may(url):
        raise SetupError(f"{quote(url)} is not https; data are downloaded over https only.")
    import httpx

    digest, size = hashlib.sha256(), 0
    try:
        with (
            httpx.Client(follow_redirects=True, timeout=SECONDS, event_hooks={"request": [_check_request]}) as client,
            client.stream("GET", url) as answer,
        ):
            answer.raise_for_status()
            total = int(answer.headers.get("Content-Length", 0)) or None
            with keeping(target) as file:
                for block in answer.iter_bytes(CHUNK):
                    size += len(block)
                    if size > limit:
                        raise SetupError(
                            f"{quote(url)} is larger than {limit:,} bytes, the limit of a download; it was not kept."
                        )
                    digest.update(block)
                    file.write(block)
                    if bar is not None:
                        bar(target.name, size, total)
                if sha256 and digest.hexdigest() != sha256:
                    raise SetupError(
                        f"{quote(url)} is not the expected file (sha256 {digest.hexdigest()[:12]}, expected "
                        f"{sha256[:12]}); the download was not kept."
                    )
    except httpx.HTTPStatusError as error:
        raise SetupError(
            f"{quote(url)} cannot be downloaded: the server answers with HTTP status {error.response.status_code}."
        ) from None
    except httpx.TransportError as error:
        raise Unreachable(f"{quote(url)} cannot be reached: {quote(words(error))}.") from None
    except httpx.HTTPError as error:
        raise SetupError(f"{quote(url)} cannot be downloaded: {type(error).__name__} {quote(words(error))}.") from None
    return target


def _check_request(request: object) -> None:
    url = str(getattr(request, "url", ""))
    if not _may(url):
        raise SetupError(f"the server redirects the download to {quote(url)}, which is not https.")


def _may(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in HERE)
