"""Run names that would break a file system, a terminal or another computer."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.store import check_run_name


@pytest.mark.parametrize("name", ["r1", "gkv-512_b", "2026.01.02", "-x", "CONsole", "a" * 100])
def test_good_names(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "../../../etc/x",
            "--run-name '../../../etc/x': only letters, digits, '.', '-', '_' are allowed; no '/', no leading '.'.",
        ),
        ("a\x00b", "--run-name has a control character (U+0000) at position 1. Remove it from 'a\\x00b'."),
        ("\x1b[2Jx", "--run-name has a control character (U+001B) at position 0. Remove it from '\\x1b[2Jx'."),
        ("x" * 300, "--run-name is 300 characters long; the limit is 100. Give a shorter name."),
        ("CON", "--run-name 'CON' cannot be a folder's name on Windows; give another name."),
        ("nul.txt", "--run-name 'nul.txt' cannot be a folder's name on Windows; give another name."),
        ("a.", "--run-name 'a.' cannot be a folder's name on Windows; give another name."),
        ("a:b", "--run-name 'a:b': only letters,"),
        (".hidden", "--run-name '.hidden': only letters,"),
        ("ré", "--run-name 'ré': only letters,"),
        ("a\u202eb", "--run-name 'a\\u202eb': only letters,"),
        ("", "--run-name is empty"),
    ],
)
def test_bad_names_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_run_name(name)
    assert str(caught.value).startswith(message)


@given(st.text(st.characters(), max_size=120))
def test_no_name_reaches_the_terminal_raw(name: str) -> None:
    try:
        shown = check_run_name(name)
    except UserError as error:
        shown = str(error)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
