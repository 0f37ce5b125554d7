"""`kvpress:NAME` where kvpress is not installed, not complete, or of another version: one line with the cure."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from kvbench.errors import SetupError
from kvbench.integrations.kvpress import load


def raising(error):
    def fail(name):
        raise error

    return fail


MISSING = raising(PackageNotFoundError("kvpress"))
INCOMPLETE = raising(ModuleNotFoundError("No module named 'fire'", name="fire"))


@pytest.mark.parametrize(
    ("version", "import_module", "message"),
    [
        (MISSING, None, "methods kvpress:NAME need kvpress, which is not installed."),
        (lambda name: "0.5.5", INCOMPLETE, "methods kvpress:NAME need fire, which is not installed."),
        (lambda name: "0.4.0", None, "methods kvpress:NAME are made for kvpress 0.5.5, found 0.4.0."),
    ],
    ids=["no kvpress", "not complete", "another version"],
)
def test_the_line_says_what_to_install(monkeypatch, version, import_module, message):
    metadata = SimpleNamespace(version=version)
    monkeypatch.setattr(load, "importlib", SimpleNamespace(metadata=metadata, import_module=import_module))
    with pytest.raises(SetupError) as error:
        load.kvpress.__wrapped__()  # not the result of an earlier call
    assert str(error.value) == f"{message} Install it: {load.INSTALL}"
