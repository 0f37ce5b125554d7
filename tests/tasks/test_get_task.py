"""Task names: spelling, variants, hints, and what the command line refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbench.errors import UserError
from kvbench.task_names import get_task, task_names


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("aime24", "aime24"),
        (" AIME24 ", "aime24"),
        ("walk", "walk"),
        ("walk/orbit-300", "walk"),  # the default's short name: rows of both pool
        ("Walk/Orbit-300F", "walk/orbit-300f"),
        ("chain/chain-8", "chain/chain-8"),
    ],
)
def test_names(given: str, name: str):
    assert get_task(given).name == name


@pytest.mark.parametrize(
    "name", ["../../x", "../x", "/etc/passwd", "$(touch x)", "", ".", "a/b/c", "a\0b", "x" * 65, "walk/"]
)
def test_not_a_task_name(name: str):
    with pytest.raises(UserError, match=r"is not a task name \(letters, digits, '-', '_', '\.', up to 64\)"):
        get_task(name)


def test_control_characters_are_shown_escaped():
    with pytest.raises(UserError, match=r"'\\x1b\[2jx' is not"):
        get_task("\x1b[2jx")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aime42", "unknown task 'aime42'. Did you mean"),
        ("zzzz", "unknown task 'zzzz'. Known: aime24, aime25"),
        ("ｗａｌｋ", "has non-ASCII characters). Did you mean 'walk'?"),
        ("walk/orbit-30", "task 'walk' has no variant 'orbit-30'. Did you mean 'orbit-300'"),
        ("aime24/x", "task 'aime24' has no variant 'x'. It has none."),
        ("file", "task 'file' needs a file: --task-file FILE."),
    ],
)
def test_unknown(name: str, text: str):
    with pytest.raises(UserError) as caught:
        get_task(name)
    assert text in str(caught.value)


def test_list_and_interface():
    names = task_names()
    assert {
        "aime24",
        "aime25",
        "amc23",
        "math500",
        "gsm8k",
        "file",
        "walk",
        "chain",
        "lookup",
        "walk/orbit-100",
    } <= set(names)
    for name in names:
        if name != "file":
            task = get_task(name)
            assert task.name.partition("@")[0] == name
            assert task.summary
            assert task.suite
            assert task.headline in ("score", "score_partial")


def test_listing_is_light():
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "from kvbench.task_names import task_names, get_task; [get_task(n) for n in task_names() if n != 'file']\n"
        "print(time.perf_counter() - t)\n"
        "heavy = {'torch', 'numpy', 'pandas', 'scipy', 'sympy', 'math_verify', 'datasets', 'transformers', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2  # 0.1 s on an idle machine
