"""SCBench's rules against recorded results of the official ones, and functions repeated from a repository."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.scoring.scbench import packages, repoqa, rules

ROWS = (DATA / "scored" / "scbench.jsonl").read_text(encoding="utf-8").splitlines()
ADD = 'def add(a, b):\n    """Sum."""\n    return a + b'
MUL = "def mul(a, b):\n    total = 0\n    for _ in range(b):\n        total += a\n    return total"
NEEDLES = [("add", ADD), ("mul", MUL)]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in map(json.loads, ROWS)])
def test_goldens(row: dict):
    answer = tuple(row["answer"]) if row["rule"] == "option" else row["answer"]
    assert getattr(rules, row["rule"])(row["prediction"], answer) == pytest.approx(row["expected"], abs=1e-12)


def test_rules_that_compare_with_the_whole_reference():
    assert (rules.f1_zh("北京", "北京"), rules.f1_of_characters("北京", "北京")) == (1.0, pytest.approx(2 / 3))
    assert (rules.whole_word("(B)", "(A)"), rules.any_character("(B)", "(A)")) == (0.0, 1.0)
    assert [rules.whole_word(text, "B") for text in ("b", "So (B).", "Bath")] == [1.0, 1.0, 0.0]


def test_a_number_too_large_for_a_float_is_wrong():
    assert [rules.first_number("9" * 400, answer) for answer in (9, 9.0)] == [0.0, 0.0]


def test_a_missing_package_gets_a_line():
    with pytest.raises(SetupError, match=r"needs the package 'kvbench_absent': pip install \"kvbench\[scbench\]\"\.$"):
        packages.require(["json", "kvbench_absent.part"])


def test_the_likest_function_must_be_the_wanted_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repoqa, "first_function", lambda output, language: output)
    assert repoqa.score_function(ADD, "python", "add", NEEDLES) == 1.0
    assert repoqa.score_function(ADD, "python", "mul", NEEDLES) == 0.0
    assert repoqa.similarity(ADD.replace("a + b", "b"), ADD) < repoqa.THRESHOLD
    assert repoqa.score_function(ADD.replace("a + b", "b"), "python", "add", NEEDLES) == 0.0
    assert repoqa.score_function("", "python", "add", NEEDLES) == 0.0


CPP = "int twice(int n) {\n    return 2 * n;\n}"


@pytest.mark.parametrize(
    ("language", "output", "function"),
    [
        ("python", f"Here:\n```python\nimport os\n\n{ADD}\n\n\n{MUL}\n```\nDone.", ADD),
        ("python", f"class A:\n{ADD}", f"class A:\n{ADD}"),  # no block: the whole output
        ("python", "```\nx = 1\n```\n```python\n" + MUL + "\n```", MUL),
        ("python", "```\nx = 1\n```", "x = 1\n"),
        ("cpp", f"```cpp\nint A::f(int n) {{ return n; }}\n{CPP}\n```", CPP),
        ("java", "```java\nclass A {\n    int f() { return 1; }\n}\n```", "int f() { return 1; }"),
        ("typescript", "```ts\nconst x = 1;\nfunction f() { return 1; }\n```", "function f() { return 1; }"),
        ("rust", "```rust\nuse a;\nfn f() -> i32 { 1 }\n```", "fn f() -> i32 { 1 }"),
        ("go", "```go\npackage a\nfunc f() int { return 1 }\n```", "func f() int { return 1 }"),
    ],
)
def test_the_first_function_of_a_block_counts(language: str, output: str, function: str):
    for name in repoqa.PACKAGES:
        pytest.importorskip(name)
    assert repoqa.first_function(output, language) == function
