"""Task names: spelling, variants, hints, and what the command line refuses."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from kvbench.errors import UserError, quote
from kvbench.taskkit.names import collapsed, expand, get_task, task_names


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
        ("aime24/x", "task 'aime24' has no variant 'x'. It has no variants."),
        ("file", "task 'file' needs a file: --task-file FILE."),
        ("walk@4k", "task 'walk' takes no length; write it without '@4k'."),
        ("walk@abc", "task 'walk' takes no length; write it without '@abc'."),
        ("ruler/vt@*", "'ruler/vt@*' names several lengths; give one, such as @4096."),
        ("zzzz@abc", "unknown task 'zzzz'. Known: aime24, aime25"),
    ],
)
def test_unknown(name: str, text: str):
    with pytest.raises(UserError) as caught:
        get_task(name)
    assert text in str(caught.value)


@pytest.mark.parametrize("name", ["walk*", "wal*/orbit-100", "*", "ruler*@4k", "*/*"])
def test_a_pattern_stands_behind_the_name_only(name: str):
    text = (
        f"{quote(name)}: write '*' only after '/', where it means any text, or after '@', where it means every length: "
        "ruler/niah_*@*."
    )
    for use in (expand, get_task):
        with pytest.raises(UserError, match=f"^{re.escape(text)}"):
            use(name)


@pytest.mark.parametrize("length", ["abc", "0", "4kk", "", "-1", "4.5k", "8*", "1234567890"])
def test_what_is_no_length_says_what_is_one(length: str):
    text = (
        f"'ruler/vt@{length}': '{length}' is no length. Give a number of tokens, such as @4096 or @4k (k means "
        "1,024), or @* for all lengths of the task."
    )
    for use in (expand, get_task):
        with pytest.raises(UserError, match=f"^{re.escape(text)}$"):
            use(f"ruler/vt@{length}")


def test_patterns_that_fit_nothing():
    for name, text in (
        ("ruler/a*b@4k", "task 'ruler' has no variant like 'a*b'. It has niah_single_1, "),
        ("aime24/*", "task 'aime24' has no variant like '*'. It has no variants."),
        ("walk@*", "task 'walk' takes no length; write it without '@*'."),
    ):
        with pytest.raises(UserError, match=f"^{re.escape(text)}"):
            expand(name)


def test_names_of_whole_groups_are_collapsed():
    longbench = expand("longbench")
    assert collapsed(["walk", *longbench, "aime24"]) == ["walk", "longbench", "aime24"]
    assert collapsed(longbench[1:]) == longbench[1:]
    ruler = [*expand("ruler_offline@4k"), *expand("ruler_offline@8k")[1:]]
    assert collapsed(ruler) == ["ruler_offline@4096", *expand("ruler_offline@8k")[1:]]
    assert collapsed(["walk/orbit-100", "lm_eval:gsm8k"]) == ["walk/orbit-100", "lm_eval:gsm8k"]
    assert collapsed(["livecodebench/v1"]) == ["livecodebench/v1"]
    variants = ["longproc_html_to_tsv", "longproc_html_to_tsv/2k"]
    assert collapsed(variants) == variants


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
        "import sys\n"
        "from kvbench.taskkit.names import task_names, get_task; [get_task(n) for n in task_names() if n != 'file']\n"
        "heavy = {'torch', 'numpy', 'pandas', 'scipy', 'sympy', 'math_verify', 'datasets', 'transformers', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
