"""gate.toml: what it sets, and one line for every mistake in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.compare.cell import Key
from kvbench.compare.policy import Policy, read_policy
from kvbench.errors import UserError


def read(folder: Path, text: str) -> Policy:
    (folder / "gate.toml").write_text(text, encoding="utf-8")
    return read_policy(folder / "gate.toml")


def test_the_first_fitting_table_decides(tmp_path: Path) -> None:
    policy = read(
        tmp_path,
        """
        margin = 0.02
        strict = true
        [[cells]]
        task = "walk*"
        budget = 25
        [[cells]]
        method = "gkv*"
        budget = "25%"
        tier = "advisory"
        margin = 0.1
        [limits]
        kv_bytes_peak = 1.1
        """,
    )
    share = Key("tiny", "walk", "gkv(alpha=0.5)", 0.25, 32, "0")
    assert (policy.margin_of(share), policy.critical(share)) == (0.1, False)
    entries = Key("tiny", "walk/orbit-100", "gkv", 25, 32, "0")
    assert (policy.margin_of(entries), policy.critical(entries)) == (0.02, True)
    assert (policy.strict, policy.limits) == (True, {"kv_bytes_peak": 1.1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("margn = 0.1", "unknown key 'margn'. Did you mean 'margin'"),
        ("margin = 2", "margin '2' is not a number from 0 to 1"),
        ("margin = true", "margin 'True' is not a number"),
        ("margin = nan", "margin 'nan' is not a number"),
        ("strict = 1", "strict is '1'; write true or false"),
        ("[cells]\ntask = 'x'", r"cells is not a list of tables; write each table as \[\[cells\]\]"),
        ("[[cells]]\ntier = 'vital'", "cells 1: tier is 'vital'; choose critical or advisory"),
        ("[[cells]]\ntask = ['x']", "cells 1: task .* write a pattern"),
        ("[[cells]]\nmethods = 'x'", "cells 1: unknown key 'methods'. Did you mean 'method'"),
        ("[limits]\nkv_bytes = 1.1", "limits: unknown key 'kv_bytes'. Did you mean 'kv_bytes_"),
        ("[limits]\nkv_bytes_peak = 'x'", "kv_bytes_peak 'x' is not a number"),
        (f"margin = 0x{'f' * 5000}", "a whole number has more than 64 bits"),
        (f"[[cells]]\ntask = 0x{'f' * 5000}", "a whole number has more than 64 bits"),
        ("limits = 1", r"limits is '1' and must be a table; write \[limits\]"),
        ("margin = ", "cannot be read as TOML"),
        ("a." * 40_000 + "b = 1", "gate.toml"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
