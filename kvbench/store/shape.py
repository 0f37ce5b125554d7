"""Checks the types and forms of those parts of a run.json that kvbench uses. Later code can then rely on these types,
even if someone edited the file.

`_CONTENT` lists these parts. A part whose name ends with a question mark may be absent.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from kvbench.store.names import is_run_name
from kvbench.store.schema import is_text

ANY = "any name"  # the key that stands for every other key of an object
LONGEST = 4096  # characters of a path, an address or a name
_SCALAR = (str, int, float, bool, type(None))


def _given(value: Any) -> bool:
    """Return whether a value is a text that a user may give, such as a path: short, without NUL and unpaired
    surrogates."""
    return is_text(value) and len(value) <= LONGEST and "\0" not in value


def _text(value: Any) -> bool:
    """Return whether a value is a text that kvbench may write, such as a hash or a version: short, without NUL,
    unpaired surrogates and control characters."""
    return _given(value) and not any(unicodedata.category(character) == "Cc" for character in value)


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40


def _size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _setting(value: Any) -> bool:
    """Return whether UTF-8 can hold every text among the values of a setting. value: the setting, any JSON value."""
    if isinstance(value, dict):
        return all(map(_setting, value.values()))
    if isinstance(value, list):
        return all(map(_setting, value))
    return not isinstance(value, str) or is_text(value)


_perhaps, _perhaps_given = _or_null(_text), _or_null(_given)
_HASH = {"name": _text, "hash": _text}
_GIVEN_HASH = {"name": _given, "hash": _text}  # of a file whose path a user gave
_METHOD = {"name": _text, "options": {ANY: lambda v: isinstance(v, _SCALAR)}}
_GRID = {
    "methods": [_METHOD],
    "budgets": [lambda v: _count(v) or _text(v)],
    "tasks": [_given],
    "limit?": _or_null(_count),
}
_LAYER = {"kv_heads": _size, "head_dim": _size, "value_dim": _count, "window": _or_null(_size)}
_TASK = {
    "version": _text,
    "data": {"sha256?": _perhaps, "revision?": _perhaps},
    "prompts?": _text,
    "headline?": _text,
    "needs?": [_text],
}
_ENVIRONMENT = {
    "kvbench_version?": _perhaps,
    "torch_version?": _perhaps,
    "transformers_version?": _perhaps,
    "versions?": {ANY: _text},
    "git?": _perhaps,
    "shard?": _text,
    "rows_of_all_shards?": _count,
    "device?": _perhaps,
    "plugin?": [_given],
    "plugins?": [{"path": _given, "sha256": _text}],
    "tasks?": {ANY: _TASK},
    "data?": _perhaps_given,
    "data_variable?": _perhaps_given,
    "data_revision?": _perhaps_given,
    "chat_template?": {"path": _given, "sha256": _text},
    "dtype?": _perhaps,
    "model?": {"model": _given, "model_revision": _perhaps_given, "adapter?": _given},
    "model_files?": [_HASH],
    "adapter_files?": [_HASH],
    "methods?": [
        {"method": _given, "version": _text, "source": _text, "files": [_given], "artefacts": [_GIVEN_HASH]},
    ],
    "method_files?": [_GIVEN_HASH],
    "judge?": _perhaps_given,
    "judge_model?": _perhaps_given,
    "judge_key_env?": _perhaps_given,
    "judge_mode?": _perhaps,
    "plans?": [{"cell": _given, "rows?": _count, "hash?": _text}],
    "kv_cache?": {"element_bytes": _size, "layers": [_LAYER]},
}
_CONTENT = {
    "format": lambda v: type(v) is int,
    "name": is_run_name,
    "created": _text,
    "config": {
        "grids?": [_GRID],
        "model?": _given,
        "revision?": _perhaps_given,
        "adapter?": _perhaps_given,
        "chat_template?": _perhaps_given,
        "task_file?": _perhaps_given,
        ANY: _setting,
    },
    "planned?": _or_null(_count),
    "environment": _ENVIRONMENT,
    "command?": [lambda v: isinstance(v, str)],
    "hashes": {ANY: _text},
    "hash": _text,
}
_MAY_BE_NULL = {("environment", part) for part in ("kv_cache", "plugins", "plugin", "chat_template")}


def wrong_part(content: Any) -> tuple[str, Any] | None:
    """Return the dotted name and the value of the first wrong part of a run.json; None if all parts are right. A part
    is wrong if it fails its check in `_CONTENT`, or if it is an object that lacks a required part. content: what the
    file holds."""
    return _wrong(content, _CONTENT, ())


def _wrong(value: Any, shape: Any, place: tuple[str, ...]) -> tuple[str, Any] | None:
    if value is None and place in _MAY_BE_NULL:
        return None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _name(place), value
        return next((wrong for v in value if (wrong := _wrong(v, shape[0], place))), None)
    if isinstance(shape, Mapping):
        return _wrong_table(value, shape, place)
    return None if shape(value) else (_name(place), value)


def _wrong_table(value: Any, shape: Mapping[str, Any], place: tuple[str, ...]) -> tuple[str, Any] | None:
    if not isinstance(value, dict) or any(k not in value for k in shape if k != ANY and not k.endswith("?")):
        return _name(place), value
    for key, inner in value.items():
        part = next((k for k in (key, f"{key}?", ANY) if k in shape), None)
        if part and (wrong := _wrong(inner, shape[part], (*place, key))):
            return wrong
    return None


def _name(place: tuple[str, ...]) -> str:
    return ".".join(place) or "the whole"
