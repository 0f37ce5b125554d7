"""Check a run's judge settings and make its judge.

Every request to an address reads the key from the environment variable `Services.judge_key_env`; kvbench never stores
the key. The judge's address must be https, except on this machine. An error message that shows a refused address hides
possible secrets in it.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import threading
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kvbench.console.redact import redact_text
from kvbench.errors import SetupError, UserError, quote
from kvbench.scoring.judge.api import Judge
from kvbench.task import Services, Task

LOCAL = "local:"
NO_ARGV = (
    "keys are not taken from the command line (they show in process lists). Put it in an environment variable and "
    "pass --judge-key-env NAME."
)
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_WORD = re.compile(r"[\x21-\x7e]+")  # printable ASCII without blanks

_judges: dict[tuple[str, str | None, str], Judge] = {}
_lock = threading.Lock()


def check(services: Services, task: Task) -> None:
    """Check the judge's settings in `services` without a request. task: a task that needs the judge. Raises UserError
    for invalid settings, SetupError if httpx, tenacity or the folder of a local judge is missing."""
    if services.judge is None:
        raise UserError(
            f"task {quote(task.name)} needs a judge: --judge URL --judge-model NAME with its key in an environment "
            "variable (--judge-key-env), or --judge none to store answers only."
        )
    if "images" in task.needs and services.judge.startswith(LOCAL):
        raise UserError(
            f"task {quote(task.name)} sends images to the judge, and a local judge reads none; give --judge URL with a "
            "judge that reads images."
        )
    if not _is_none(services.judge):
        _check_judge(services, services.judge)


def _check_judge(services: Services, judge: str) -> None:
    if judge.startswith(LOCAL):
        _check_folder(judge.removeprefix(LOCAL))
        return
    address = _address(judge)
    if not services.judge_model:
        raise UserError(f"--judge {quote(judge)} needs --judge-model NAME: the model that judges at this address.")
    _check_key(services.judge_key_env, _is_loopback(address))
    missing = [name for name in ("httpx", "tenacity") if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(f"asking a judge needs {' and '.join(missing)}: pip install 'kvbench[judge]'.")


def connect(services: Services) -> Judge | None:
    """Return the judge that the settings name; None if they name no judge. Equal settings always give the same object.
    If this call makes the judge, it checks the settings and raises as `check` does."""
    if services.judge is None or _is_none(services.judge):
        return None
    with _lock:
        settings = services.judge, services.judge_model, services.judge_key_env
        if settings not in _judges:
            _check_judge(services, services.judge)
            _judges[settings] = _make(services.judge, services)
        return _judges[settings]


def _make(judge: str, services: Services) -> Judge:
    if judge.startswith(LOCAL):
        from kvbench.scoring.judge.local import LocalJudge

        return LocalJudge(Path(judge.removeprefix(LOCAL)).expanduser())
    from kvbench.scoring.judge.endpoint import Endpoint  # imports asyncio and httpx: only for runs that ask a judge

    return Endpoint(
        url=judge,
        model=services.judge_model or "",
        key_env=services.judge_key_env,
        through_proxy=not _is_loopback(_address(judge)),
    )


def _is_none(judge: str) -> bool:
    return judge.strip().lower() == "none"


def _address(judge: str) -> SplitResult:
    """Return the parts of a judge's URL. Raises UserError for an invalid or unsafe URL."""
    shown = quote(redact_text(judge))
    try:
        parts = urlsplit(judge)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not _WORD.fullmatch(judge):
        raise UserError(
            f"--judge {shown} is not an address: give local:FOLDER, the word 'none' for no judge, or the base URL of "
            "an OpenAI-compatible endpoint such as https://api.openai.com/v1."
        )
    if "@" in parts.netloc:
        raise UserError(NO_ARGV)
    if "?" in judge or "#" in judge:
        raise UserError("--judge takes a base URL without '?' and '#', because secrets often follow them.")
    if parts.scheme == "http" and not _is_loopback(parts):
        raise UserError(
            f"--judge {shown} would send key and answers unencrypted; give an address that begins with https://."
        )
    return parts


def _is_loopback(parts: SplitResult) -> bool:
    host = parts.hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_key(name: str, loopback: bool) -> None:
    """Raise UserError for a missing or malformed key.

    name: the value of --judge-key-env, the name of the key's environment variable. If the variable is not set and
    `name` looks like a key, the user gave the key itself, which is also an error. loopback: whether the judge runs on
    this machine; the key may then be missing if --judge-key-env has its default value.
    """
    key = os.environ.get(name, "").strip()
    if key:
        if not _WORD.fullmatch(key):
            raise UserError(
                f"the key in the environment variable {quote(name)} has characters that cannot be part of a key. "
                "Set the variable to the key alone."
            )
        return
    if not _VARIABLE.fullmatch(name) or redact_text(name) != name:
        raise UserError(NO_ARGV)  # the setting holds a key instead of a variable's name
    if not loopback or name != Services().judge_key_env:
        raise UserError(f"the environment variable {quote(name)} is empty; it must hold the judge's key.")


def _check_folder(name: str) -> None:
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise SetupError(
            f"--judge {quote(LOCAL + name)}: there is no model in that folder (no config.json); give a chat model."
        )
    settings = folder / "tokenizer_config.json"
    text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    if '"chat_template"' not in text and not (folder / "chat_template.jinja").is_file():
        raise UserError(f"--judge {quote(LOCAL + name)}: the tokenizer has no chat template; give a chat model.")
