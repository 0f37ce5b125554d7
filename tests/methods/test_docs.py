"""docs/methods.md names every method, alias, option, choice and default, and its examples work."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from support.folders import ROOT

from kvbench.eviction.options import describe
from kvbench.registry import methods

TEXT = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def section(heading):
    return TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def option_rows():
    """{(method, option): (default, meaning)} from the tables of options; a row may stand for several methods."""
    rows, names = {}, []
    for line in section("Options").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 4 or cells[1] == "option" or set(cells[1]) <= {"-"}:
            continue
        names = re.findall(r"`([^`]+)`", cells[0]) or names
        for name in names:
            assert (name, cells[1].strip("`")) not in rows
            rows[name, cells[1].strip("`")] = cells[2].strip("`"), cells[3]
    return rows


@pytest.mark.parametrize("name", methods.names())
def test_every_method_is_described(name):
    overview = TEXT.split("\n## ")[0]
    assert f"| `{name}` |" in overview or name == "full"
    assert all(f"`{alias}`" in overview for alias in methods.aliases(name))
    assert sys.modules[methods.get(name).__module__].__doc__
    if paper := re.findall(r"\d{4}\.\d{5}", methods.get(name).paper):
        (row,) = (line for line in overview.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"[{paper[0]}](https://arxiv.org/abs/{paper[0]})" in row


def test_methods_stand_under_the_right_kind():
    bounded, prompt_only = TEXT.split("\n## ")[0].split("**They evict the prompt only.**")
    for name, cls in methods.items():
        if cls().evicts:
            assert f"| `{name}` |" in (bounded if cls().decode_bounded else prompt_only)


def test_options_and_defaults_are_true():
    real = {(name, info.name): info for name, cls in methods.items() for info in describe(cls)}
    written = option_rows()
    assert set(written) == set(real)
    for key, info in real.items():
        default, meaning = written[key]
        assert (key, default) == (key, info.default.removesuffix(".0"))
        choices = [choice for choice in re.findall(r"'([^']+)'", info.type) if choice != "none"]
        assert all(f"`{choice}`" in meaning for choice in choices), key


def test_every_method_of_a_paper_has_its_differences():
    differences = section("What differs from the released code")
    simple = {"streaming-llm": "StreamingLLM", "snapkv-decode": "SnapKV while decoding", "rkv": "R-KV", "gkv": "G-KV"}
    for name, cls in methods.items():
        if cls.paper and name not in ("knorm", "tova", "h2o"):  # followed as they are, or told in the text
            assert f"| `{name}` |" in differences or simple[name] in differences


def test_the_examples_work():
    written, tried = re.findall(r"```python\n(.*?)```", section("Writing one"), re.DOTALL)
    before = methods.names()
    assert "mine" not in before
    keys, queries = torch.randn(2, 2, 30, 8), torch.randn(2, 4, 8, 8)
    space = {"keys": keys, "queries": queries}
    exec(written.replace('@methods.register("mine")\n', ""), space)  # without leaving it in the registry
    *lines, last = tried.strip().splitlines()
    exec("\n".join(lines), space)
    keep = eval(last, space)
    assert keep.shape == (2, 2, 30)
    assert bool((keep.sum(dim=-1) == 16).all())
    assert methods.names() == before
