"""Asks the Hugging Face hub whether a repository exists, at which commit, and with which files.

The hub's libraries retry a refused connection for half a minute per file. Before kvbench calls these libraries, it
sends a request of its own, with at most `TRIES` attempts. The user therefore learns of a wrong name or a missing
network within seconds. If the hub does not answer at all, all attempts together take about half a minute.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]
Why = Literal["unreachable", "unnamed", "missing", "revision", "gated", "token", "script", "code", "other"]

TRIES = 3
SECONDS = 10.0  # per attempt
PAUSE = 1.0  # seconds before the second attempt; doubled for the third
_UNREACHABLE = {
    *("ConnectionError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException", "TransportError"),
    *("LocalEntryNotFoundError", "gaierror"),
}
LONGEST = 96  # characters of a repository's name
_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"  # '-' and '.' only inside
_NAME = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The hub's reply about a repository at a revision: the commit and the file names."""

    commit: str
    files: tuple[str, ...]


class HubError(Exception):
    """The error for a request to which the hub gave no usable reply; `why` is the reason."""

    def __init__(self, why: Why, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.why = why


_named: Collection[str] | None = None  # models and tasks that kvbench may download; None: all


@contextlib.contextmanager
def only(names: Collection[str] | None) -> Iterator[None]:
    """Inside this `with` block, let kvbench download only the models and the data of the tasks in `names`; None: all.

    This protects users who continue someone else's run. The run's folder may name any model, which kvbench must not
    download unless the user names it too. If `names` is empty, the hub's libraries are also put into offline mode, in
    this process and its children.
    """
    global _named
    before, _named = _named, names
    try:
        with _offline() if names is not None and not names else contextlib.nullcontext():
            yield
    finally:
        _named = before


def allowed() -> tuple[str, ...] | None:
    """Return the models and tasks that kvbench may download; None: all."""
    return None if _named is None else tuple(sorted(_named))


def may_ask(name: str) -> bool:
    """Return whether the `with only(...)` block around this call lets kvbench download this model, or the data of this
    task. True outside such a block."""
    return _named is None or name in _named


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    import huggingface_hub.constants

    variable, constant = os.environ.get("HF_HUB_OFFLINE"), huggingface_hub.constants.HF_HUB_OFFLINE
    os.environ["HF_HUB_OFFLINE"], huggingface_hub.constants.HF_HUB_OFFLINE = "1", True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = constant
        if variable is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = variable


def ask(kind: Kind, name: str, revision: str | None) -> Answer:
    """Return the commit and the file names that a repository has at a revision. Raises HubError."""
    if kind == "model" and not may_ask(name):
        raise HubError(
            "unnamed", PermissionError(f"{name} is not downloaded, because only a run's folder names it, not the user")
        )
    import huggingface_hub

    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            info = huggingface_hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=SECONDS)
        except Exception as error:
            reason = why(error)
            if reason != "unreachable" or attempt == TRIES - 1 or is_offline():
                raise HubError(reason, error) from None
        else:
            files = tuple(sibling.rfilename for sibling in getattr(info, "siblings", None) or ())
            return Answer(str(info.sha), files)
    raise AssertionError  # the last attempt has returned or raised


def may_read(kind: Kind, name: str, file: str, commit: str) -> None:
    """Raise HubError if the hub refuses a file because the repository is gated or the token is wrong. `ask` does not
    notice a gated repository, because the hub lists the files of such a repository to everyone."""
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(name, file, repo_type=kind, revision=commit)
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=SECONDS)
    except Exception as error:
        if (reason := why(error)) in ("gated", "token"):
            raise HubError(reason, error) from None


def kept(kind: Kind, name: str, file: str, revision: str | None) -> Path | None:
    """Return the path of a repository's file in the local cache of the hub's library; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file, repo_type=kind, revision=revision)
    return Path(found) if isinstance(found, str) else None


def hush() -> None:
    """Silence the hub client's retry log; kvbench reports the outcome. The client's progress bars are silenced too if
    stderr is no terminal or `KVBENCH_NO_PROGRESS` is set."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    if os.environ.get("KVBENCH_NO_PROGRESS") or not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()


def is_name(name: str) -> bool:
    """Return whether huggingface_hub accepts `name` as the name of a repository."""
    return len(name) <= LONGEST and _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def is_offline() -> bool:
    """Return whether the hub's libraries may not use the network: the user (HF_HUB_OFFLINE) or `only` forbids it."""
    import huggingface_hub

    return bool(huggingface_hub.is_offline_mode())


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a commit rather than a branch or a tag."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def why(error: Exception) -> Why:
    """Return the reason for an exception of huggingface_hub, datasets or transformers.

    These libraries wrap each other's exceptions. The function therefore reads class names, status codes and messages of
    the whole exception chain.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:
        chain.append(link)
        link = link.__cause__ or link.__context__
    kinds = {base.__name__ for e in chain for base in type(e).__mro__}
    text = " ".join(str(e) for e in chain)
    codes = {getattr(getattr(e, "response", None), "status_code", None) for e in chain}
    if "loading script" in text or "Dataset scripts are no longer supported" in text:
        return "script"
    if "trust_remote_code" in text:
        return "code"
    if "GatedRepoError" in kinds or "is a gated" in text:  # the message of a plain 404 also says "private or gated"
        return "gated"
    if "RevisionNotFoundError" in kinds:
        return "revision"
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        return "missing"
    if 401 in codes:
        return "token"
    if kinds & _UNREACHABLE or any(code == 429 or (code or 0) >= 500 for code in codes) or "connect to" in text:
        return "unreachable"
    return "other"
