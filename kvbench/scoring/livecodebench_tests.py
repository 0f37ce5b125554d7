"""Read the tests of a LiveCodeBench problem from its data.

Public tests are JSON. Private tests are JSON, or base64 of zlib of a pickle of JSON. A pickle can call any function, so
this module's unpickler refuses every class and function, and `unpack` refuses everything but a text.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from dataclasses import dataclass
from typing import Any, NoReturn

LARGEST = 512 << 20  # bytes of a problem's unpacked tests


class TestDataError(ValueError):
    """A problem's tests are malformed."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class Test:
    """One test: text for standard input and output, or a function's arguments (JSON, one per line) and value."""

    input: str
    output: str

    __test__ = False


def read_tests(data: str) -> list[Test]:
    """Return the tests in `data`, the content of a problem's column of public or private tests. Raises TestDataError if
    the data are malformed or too large."""
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = _json(unpack(data))
    except RecursionError:
        raise TestDataError("the question's tests are nested too deeply") from None
    if not isinstance(parsed, list):
        raise TestDataError("the question's tests are not a JSON list")
    tests = []
    for entry in parsed:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("input", "output")):
            raise TestDataError("a test of the question has no text in its field 'input' or 'output'")
        tests.append(Test(entry["input"], entry["output"]))
    return tests


def unpack(data: str, largest: int = LARGEST) -> str:
    """Return the text that `data` holds. `data` is base64 of a zlib-compressed pickle of the text. Raises TestDataError
    for other data, or if the text unpacks to more than `largest` bytes."""
    try:
        stream = zlib.decompressobj()
        raw = stream.decompress(base64.b64decode(data, validate=True), largest)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise TestDataError(f"the question's tests are neither JSON nor base64 of zlib data: {error}") from None
    if stream.unconsumed_tail or not stream.eof:
        raise TestDataError(f"the question's tests are cut off, or exceed the limit of {largest:,} bytes when unpacked")
    try:
        text = _TextOnly(io.BytesIO(raw)).load()
    except Exception as error:  # a broken pickle may raise anything
        raise TestDataError(f"the question's tests are not a pickled text: {error}") from None
    if type(text) is not str:
        raise TestDataError(
            f"the question's tests are a pickled {type(text).__name__}; LiveCodeBench's are a pickled text"
        )
    return text


class _TextOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}; only a text is accepted")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("the pickle refers to an object by a persistent id; only a text is accepted")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TestDataError(f"the question's tests are not JSON after unpacking: {error}") from None
