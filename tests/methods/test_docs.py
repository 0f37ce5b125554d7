"""docs/methods.md names every method, alias, option and default, and its example is a method."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from kvbench.eviction.options import describe
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods

TEXT = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")


def option_rows():
    """{(method, option): default} from the table of options."""
    rows, method = {}, ""
    for line in TEXT.split("## Options")[1].split("## ")[0].splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 4 and not set(cells[2]) <= set("- ") and cells[1] != "option":
            method = cells[0] or method
            rows[method, cells[1]] = cells[2]
    return rows


@pytest.mark.parametrize("name", methods.names())
def test_every_method_is_described(name):
    assert f"| `{name}` |" in TEXT
    assert all(f"`{alias}`" in TEXT for alias in methods.aliases(name))
    assert sys.modules[methods.get(name).__module__].__doc__


def test_options_and_defaults_are_true():
    real = {(name, info.name): info.default for name, cls in methods.items() for info in describe(cls)}
    written = option_rows()
    assert set(written) == set(real)
    for key, default in real.items():
        if default != "none" or key[1] == "compat":  # the other "none" stand for a default of each variant
            assert written[key].lower() == default.removesuffix(".0")


def test_the_example_works():
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    before = methods.names()
    assert "mine" not in before
    space = {}
    exec(code.group(1).replace('@methods.register("mine")\n', ""), space)  # without leaving it in the registry
    view = make_view(torch.randn(2, 2, 30, 8), torch.randn(2, 4, 8, 8), budget=16)
    keep, _ = decide(space["Mine"](), view)
    assert bool((keep.sum(dim=-1) == 16).all())
