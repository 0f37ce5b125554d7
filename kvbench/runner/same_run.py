"""Checks that a continued run still has the model, template, methods and questions that it began with.

A run's record (`environment` in run.json) has hashes or revisions of these. A change is an error: otherwise a report
would average rows of two models, or of two versions of a method. The user may allow one kind of change: a changed
source of a method. Messages escape all text of a record, since a run's folder may come from anyone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.config import plugins
from kvbench.config.run_config import MethodChoice, RunConfig
from kvbench.errors import NEW_RUN, UserError, bare, few, quote
from kvbench.runner.workload import template_hash
from kvbench.sources import hub
from kvbench.sources.adapters import Adapter
from kvbench.sources.model_files import makes_prompts
from kvbench.sources.models import State
from kvbench.store import check_run_name, manifest
from kvbench.store.again import in_force

if TYPE_CHECKING:
    from kvbench.runner.cell import MethodState

MOST = 4  # files or methods that a message lists


def model_record(config: RunConfig, state: State, adapter: Adapter | None = None) -> dict[str, Any]:
    """Return the part of a run's record about the model, its adapter, the files of both, and the chat template."""
    template = config.chat_template
    return {
        "model": {"model": config.model, "model_revision": state.revision or config.revision}
        | ({} if adapter is None else {"adapter": adapter.identity}),
        "model_files": _listed(state.files),
        "adapter_files": [] if adapter is None else _listed(adapter.files),
        "chat_template": None if template is None else {"path": template, "sha256": template_hash(template)},
    }


def method_record(states: Mapping[MethodChoice, MethodState]) -> dict[str, Any]:
    """Return the part of a run's record about the methods: versions, sources and artefacts."""
    files = {file: digest for state in states.values() for file, digest in state.source.files.items()}
    return {
        "methods": [
            {
                "method": choice.label,
                "version": state.version,
                "source": state.source.hash,
                "files": list(state.source.files),
                "artefacts": _listed(state.artefacts or {}),
            }
            for choice, state in states.items()
        ],
        "method_files": _listed(files),
    }


def began(out: Path, name: str, config: RunConfig, *, resume: bool) -> Mapping[str, Any]:
    """Return the record with which the run of this name began; empty if there is no such run to continue. Without
    `resume`, the result is also empty if the run of this name has other settings."""
    folder = out / check_run_name(name)
    if not (folder / manifest.NAME).is_file():
        return {}
    info = manifest.read(folder)
    same = resume or not manifest.compare(info, config.stored())
    return dict(info["environment"]) if same else {}


def check(
    run: str, before: Mapping[str, Any], now: Mapping[str, Any], *, allow_version_change: bool = False
) -> list[str]:
    """Compare the model, data, plug-ins, methods, number type and prompts with the run's record.

    Raises UserError if one of them changed. Returns notices about the changes that are allowed.

    before: the run's record. now: the record that a new run would have. allow_version_change: allow a changed source of
    a method, if the method's version is the same.
    """
    now = manifest.surroundings(now)  # as run.json would give it back
    check_model(run, before, now)
    check_data(run, before.get("tasks", {}), now["tasks"])
    plugins.check_same(now["plugins"], before.get("plugins", []), run)
    notices = _check_methods(run, before, now, allow_version_change)
    _check_dtype(run, before, now)
    _check_prompts(run, before.get("tasks", {}), now["tasks"])
    return notices


def again(info: Mapping[str, Any], config: RunConfig, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a command must give to continue a run as the present command does. info: the content of
    run.json. config: the present settings. record: the record that a new run would have."""
    return in_force(info, config.to_dict() | {"model": config.model_place}, record)


def check_model(
    run: str, before: Mapping[str, Any], now: Mapping[str, Any], wanted: Callable[[str], bool] = lambda file: True
) -> None:
    """Raise UserError if a file of the model, a file of the adapter or the chat template changed.

    If one of the records has no hashes of the model's files, the model's revision is compared instead. wanted: a
    function that returns whether the file of a given name is compared.
    """
    if not before:
        return
    model = quote(now["model"]["model"])
    was, has = (_hashes(record.get("model_files", []), wanted) for record in (before, now))
    if was and has:
        if changes := _changes(was, has):
            raise UserError(f"{_describe(changes, f'of model {model} ', run)}, or {NEW_RUN}.")
    elif (old := before.get("model", {}).get("model_revision")) != (new := now["model"]["model_revision"]):
        former = f", or continue the run with --resume and --revision {old}" if hub.is_commit(old) else ""
        raise UserError(
            f"model {model} is at revision {bare(new)} now; run {quote(run)} began with {bare(old)}. "
            f"{NEW_RUN.capitalize()}{former}."
        )
    was, has = (_hashes(record.get("adapter_files", []), wanted) for record in (before, now))
    if changes := _changes(was, has):
        raise UserError(f"{_describe(changes, 'of the adapter ', run)}, or {NEW_RUN}.")
    _check_template(run, before.get("chat_template"), now["chat_template"])


def check_prompt_files(run: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if the chat template, or a model file that shapes prompts (such as a tokenizer file), changed.

    `kvbench score` calls this instead of `check_model`, because it reads no weights. If one of the two records has no
    hashes of the model's files, only the chat template is compared here; scoring then compares each prompt.
    """
    if now["model_files"] and before.get("model_files"):
        check_model(run, before, now, makes_prompts)
    else:
        _check_template(run, before.get("chat_template"), now["chat_template"])


def check_data(run: str, before: Mapping[str, Any], now: Mapping[str, Any], *, versions: bool = True) -> None:
    """Raise UserError if the run's record lacks the data of a task, or states another hash or revision of these data;
    with `versions`, also if it states another version of the task."""
    for task, has in now.items():
        if (was := before.get(task)) is None:
            raise UserError(
                f"the record of run {quote(run)} lacks the data of task {quote(task)}. {NEW_RUN.capitalize()}."
            )
        for part in ("sha256", "revision"):
            if was["data"].get(part) != has["data"].get(part):
                raise UserError(
                    f"the data of task {quote(task)} changed since run {quote(run)} began "
                    f"({part} {bare(was['data'].get(part))}, now {bare(has['data'].get(part))}). "
                    f"{NEW_RUN.capitalize()}."
                )
        if versions:
            _check_version(run, f"task {quote(task)}", was, has)


def as_recorded(was: Mapping[str, Any], has: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `has`, but with the revision in `was` if both state the same hash of the data.

    was, has: what identifies a task's data in the run's record, and now. Keys of rows contain the revision, and data in
    a folder have none: a run that continues with the same files from a folder needs the recorded revision. A table from
    the hub has no hash, so it is unknown whether a file has the same reference answers: then `has` is returned
    unchanged.
    """
    same = was.get("sha256") is not None and was.get("sha256") == has.get("sha256")
    return {**has, "revision": was.get("revision")} if same else has


def _check_version(run: str, what: str, was: Mapping[str, Any], has: Mapping[str, Any]) -> None:
    if was["version"] != has["version"]:
        raise UserError(
            f"{what} is at version {bare(has['version'])}; run {quote(run)} began with {bare(was['version'])}. "
            f"{NEW_RUN.capitalize()}."
        )


def _check_methods(run: str, before: Mapping[str, Any], now: Mapping[str, Any], allowed: bool) -> list[str]:
    """Raise UserError if a method's version or artefacts changed, or if its source changed and `allowed` is false.
    Returns notices about changed sources."""
    known = {entry["method"]: entry for entry in before.get("methods", [])}
    edited = []
    for entry in now["methods"]:
        label, was = quote(entry["method"]), known.get(entry["method"], entry)
        _check_version(run, f"method {label}", was, entry)
        if changes := _changes(_hashes(was["artefacts"]), _hashes(entry["artefacts"])):
            raise UserError(f"{_describe(changes, f'of method {label} ', run)}, or {NEW_RUN}.")
        if was["source"] != entry["source"]:
            edited.append(entry)
    if not edited:
        return []
    files = _edited_files(before, now, {file for entry in edited for file in entry["files"]})
    methods = few([quote(entry["method"]) for entry in edited], MOST)
    text = f"the source of method{'s' * (len(edited) > 1)} {methods} changed since run {quote(run)} began ({files})"
    if not allowed:
        raise UserError(f"{text}. Put it back, give --allow-version-change, or {NEW_RUN}.")
    return [f"{text}. Every row states its source (column method_source)."]


def _edited_files(before: Mapping[str, Any], now: Mapping[str, Any], own: Iterable[str]) -> str:
    """Return the names of those files in `own` that changed, as text for a message.

    own: all source files of the methods whose source changed, as labels such as ``kvbench/methods/gkv.py``. If no file
    in `own` differs between the two records, the text says that the method imports other files.
    """
    was, has = (_hashes(record.get("method_files", [])) for record in (before, now))
    changed = sorted(bare(file) for file in own if was.get(file) != has.get(file))
    return few(changed, MOST) or "the method imports other files now"


def _check_template(run: str, was: Mapping[str, str] | None, has: Mapping[str, str] | None) -> None:
    """Raise UserError if the content of the --chat-template file changed. Its path is a setting, compared elsewhere."""
    if has and (recorded := (was or {}).get("sha256")) != has["sha256"]:
        changes = {f"chat template {quote(has['path'])}": (recorded, has["sha256"])}
        raise UserError(f"{_describe(changes, '', run)}, or {NEW_RUN}.")


def _check_dtype(run: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if the number type changed. It can change with equal settings, because --dtype auto and --device
    auto depend on the machine."""
    if (was := before.get("dtype", now["dtype"])) != now["dtype"]:
        raise UserError(
            f"run {quote(run)} began with number type {bare(was)} on {bare(before.get('device'))}; on {now['device']} "
            f"it would continue with {now['dtype']}. Continue it on {bare(before.get('device'))}, or {NEW_RUN}."
        )


def _check_prompts(run: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if the prompts changed: with other library versions, equal files may give different prompts."""
    for task, has in now.items():
        if before.get(task, has).get("prompts", has["prompts"]) != has["prompts"]:
            raise UserError(
                f"task {quote(task)} makes other prompts than when run {quote(run)} began: its code, an image, or the "
                f"tokenizer's library has changed. Put it back, or {NEW_RUN}."
            )


def _listed(hashes: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the hashes as a list of {name, hash}. In a dictionary, a hash under the key ``token.json`` would be
    redacted like a secret."""
    return [{"name": name, "hash": digest} for name, digest in sorted(hashes.items())]


def _hashes(listed: Iterable[Mapping[str, str]], wanted: Callable[[str], bool] = lambda name: True) -> dict[str, str]:
    return {entry["name"]: entry["hash"] for entry in listed if wanted(entry["name"])}


Changes = dict[str, tuple[str | None, str | None]]  # escaped name -> (hash when the run began, hash now)


def _changes(was: Mapping[str, str], has: Mapping[str, str]) -> Changes:
    names = sorted(was.keys() | has.keys())
    return {bare(name): (was.get(name), has.get(name)) for name in names if was.get(name) != has.get(name)}


def _describe(changes: Mapping[str, tuple[str | None, str | None]], of: str, run: str) -> str:
    """Return the beginning of a sentence that names the changed files and says how to undo the change.

    The caller adds the end of the sentence. changes: {file name: (old hash, new hash)}; None for a file that is
    missing. of: words that say what the files belong to, such as "of model 'm' ".
    """
    since = f"since run {quote(run)} began"
    if len(changes) > 1:
        listed = [f"{name} ({_fate(*pair)})" for name, pair in changes.items()]
        return f"{len(changes)} files {of}changed {since}: {few(listed, MOST)}. Put them back"
    ((name, (was, has)),) = changes.items()
    if was is None:
        return f"{name} {of}was added {since}. Remove it"
    if has is None:
        return f"{name} {of}was removed {since}. Put it back"
    return f"{name} {of}changed {since} ({_fate(was, has)}). Put it back"


def _fate(was: str | None, has: str | None) -> str:
    return "added" if was is None else "removed" if has is None else f"was {bare(was[:12])}, is {bare(has[:12])}"
