"""The Hugging Face hub, asked briefly: is it there, which commit is it, what files has it?

    answer = ask("model", "Qwen/Qwen3-4B", None)      # Answer(commit="1cfa...", files=("config.json", ...))
    why(error)                                         # "gated", "missing", ... for what its libraries raise
    with only({"org/model"}): ...                      # nobody is asked for anything else

Its libraries repeat a refused connection for half a minute per file and then say so in many words. One question that is
put at most `TRIES` times comes first, so that a wrong name or a missing network is told in seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["model", "dataset"]
Why = Literal["unreachable", "unnamed", "missing", "revision", "gated", "token", "script", "code", "other"]

TRIES = 3
SECONDS = 10.0  # for each
PAUSE = 1.0  # before the second; doubled for the third
_UNREACHABLE = {
    "ConnectionError",
    "OfflineModeIsEnabled",
    "ConnectError",
    "TimeoutException",
    "TransportError",
    "LocalEntryNotFoundError",
    "gaierror",
}
LONGEST = 96  # characters of a repository's name
_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"  # begins and ends with neither '-' nor '.'
_NAME = re.compile(rf"{_PART}(?:/{_PART})?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a repository on the hub is at a revision."""

    commit: str
    files: tuple[str, ...]


class HubError(Exception):
    """The hub gave no answer, or a bad one."""

    def __init__(self, why: Why, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.why = why


_named: Collection[str] | None = None  # models and tasks that may be asked for; None: all


@contextlib.contextmanager
def only(names: Collection[str] | None) -> Iterator[None]:
    """Within the block nobody is asked for other models than these, nor for the data of other tasks; None: no limit.

    For what only a run's folder names: a folder from elsewhere must not reach the network. With no names at all the
    hub's libraries are in their offline mode too, in this process and those that it starts.
    """
    global _named
    before, _named = _named, names
    try:
        with _offline() if names is not None and not names else contextlib.nullcontext():
            yield
    finally:
        _named = before


def may_ask(name: str) -> bool:
    """Whether the network may be asked for a model or for the data of a task."""
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
    """Commit and files of a repository. Raises HubError."""
    if kind == "model" and not may_ask(name):
        raise HubError("unnamed", PermissionError(f"only a run's folder names {name}"))
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
    """Ask for the head of one file: a gated repository tells its list of files to everyone. Raises HubError."""
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(name, file, repo_type=kind, revision=commit)
    try:
        huggingface_hub.get_hf_file_metadata(url, timeout=SECONDS)
    except Exception as error:
        if (reason := why(error)) in ("gated", "token"):
            raise HubError(reason, error) from None


def hush() -> None:
    """Its libraries tell of every retry, and draw bars where nobody sees them; the outcome is told by us."""
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()
    if os.environ.get("KVBENCH_NO_PROGRESS") or not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()


def is_name(name: str) -> bool:
    """Whether a repository can have this name, as huggingface_hub sees it."""
    return len(name) <= LONGEST and _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def is_offline() -> bool:
    """Whether the user has forbidden the network (HF_HUB_OFFLINE)."""
    import huggingface_hub

    return bool(huggingface_hub.is_offline_mode())


def is_commit(revision: str | None) -> bool:
    """Whether a revision names one state for good, rather than a branch or a tag."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def why(error: Exception) -> Why:
    """The reason behind an exception of huggingface_hub, datasets or transformers.

    They tell reasons apart by class names, status codes and texts only, and wrap one another's.
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
    if "GatedRepoError" in kinds or "is a gated" in text:  # "private or gated" stands in the text of a plain 404 too
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
