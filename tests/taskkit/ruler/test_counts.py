from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.ruler import tokenizer

from kvbench.taskkit.ruler.counts import TokenCounts, cache_file


def test_counts_are_remembered(tmp_path: Path):
    file = tmp_path / "deep" / "counts.json"
    with TokenCounts(len, file) as count:
        assert [count("abc"), count("abc"), count("")] == [3, 3, 0]
    again = TokenCounts(lambda text: 1 / 0, file)
    assert (again("abc"), again("")) == (3, 0)
    with pytest.raises(ZeroDivisionError):
        again("abcd")
    with TokenCounts(len, file) as count:
        assert count("abcd") == 4
    assert sorted(json.loads(file.read_text()).values()) == [0, 3, 4]
    assert [path.name for path in file.parent.iterdir()] == ["counts.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": "3"}', '{"x": -1}', '{"x": true}', "\xff"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, content: str):
    file = tmp_path / "counts.json"
    file.write_text(content, encoding="latin-1")
    with TokenCounts(len, file) as count:
        assert count("abc") == 3
    assert list(json.loads(file.read_text()).values()) == [3]


def test_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with TokenCounts(len, tmp_path / "file" / "counts.json") as count:
        assert count("abc") == 3
    with TokenCounts(len, None) as count:
        assert count("abc") == 3


def test_what_was_counted_before_an_error_is_kept(tmp_path: Path):
    def broken() -> None:
        with TokenCounts(len, tmp_path / "counts.json") as count:
            count("abc")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert (tmp_path / "counts.json").is_file()


def test_the_file_is_the_tokenizers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoTokenizer

    from kvbench import tiny

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = cache_file(tokenizer(), "vt", 4096)
    other = cache_file(AutoTokenizer.from_pretrained(tiny.path()), "vt", 4096)
    assert file
    assert other
    assert file.is_relative_to(tmp_path / "kvbench")
    assert file.parent != other.parent
    assert file.name != getattr(cache_file(tokenizer(), "vt", 8192), "name", "")
    assert cache_file(object(), "vt", 4096) is None
