"""The last balanced box, and what follows the thinking block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.scoring.boxed import after_thinking, last_box


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1 \boxed{2}", "2"),
        (r"} \boxed{1} } {", "1"),
        (r"\boxed{1} {\boxed{2", "1"),
        (r"\\boxed{1}", "1"),
        ("\\boxed{" * 50_000, None),  # in one pass
        (r"\boxed{}", ""),
        (r"\boxed 204", None),
        (r"\boxed{204", None),
        ("no box", None),
        ("", None),
        ("\\boxed{1\\", None),
    ],
)
def test_last_box(text: str, box: str | None):
    assert last_box(text) == box


@given(st.recursive(st.text("ab\\ ").map(lambda s: s.replace("\\", "\\\\")), lambda inner: inner.map("{{{0}}}".format)))
def test_any_balanced_content_comes_back(content: str):
    assert last_box("x \\boxed{" + content + "} y") == content


@given(st.text("\\boxed{}f ", max_size=40))
def test_never_raises_and_is_inside_the_text(text: str):
    box = last_box(text)
    assert box is None or box in text


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>a</think>b", True, "b"),
        ("a</think>b", True, "b"),  # the prompt opened the block
        ("a</think>b</think>c", True, "c"),
        ("<seed:think>a</seed:think>b", None, "b"),
        ("<seed:think>a", None, ""),
        ("still thinking", True, ""),
        ("<think>still thinking", None, ""),
        ("plain", None, "plain"),
        ("plain", False, "plain"),
        ("a</think>b", False, "b"),
    ],
)
def test_after_thinking(text: str, thinking: bool | None, answer: str):
    assert after_thinking(text, thinking) == answer
