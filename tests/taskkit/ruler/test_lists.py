"""vt, cwe and fwe: what a reader of the prompt would count or follow."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.ruler import MadeUp, room

from kvbench.errors import UserError
from kvbench.taskkit.ruler.cwe import CommonWords
from kvbench.taskkit.ruler.make import make_rows


@pytest.mark.parametrize(("length", "repeats", "example"), [(4096, (30, 3), (10, 3)), (1024, (6, 1), (3, 1))])
def test_common_words(length: int, repeats: tuple[int, int], example: tuple[int, int]):
    for row in make_rows("cwe", room("cwe", length), MadeUp(), 3):
        lists = re.findall(r"appear most often\.\n(.*)\nQuestion", row.prompt.user)
        numbered = [re.findall(r"(\d+)\. (.*?)(?= \d+\. |$)", text) for text in lists]
        for items, (often, seldom) in zip(numbered, (example, repeats), strict=True):
            assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
            assert set(Counter(word for _, word in items).values()) == {often, seldom}
        counts = Counter(word for _, word in numbered[1])
        assert {word for word, n in counts.items() if n == repeats[0]} == set(row.prompt.outputs)
        solved = row.prompt.context.split("in the list are:")[1].split("\n")[0]
        counts = Counter(word for _, word in numbered[0])
        assert {word for word, n in counts.items() if n == example[0]} == set(re.split(r" ?\d+\. ", solved)[1:])


def test_words_beyond_wonderwords():
    lists = CommonWords(room=room("cwe", 4096), material=MadeUp())
    assert not any(word.startswith("word") and word[4:].isdigit() for word in lists.draw(8166).outputs)
    assert all(word[:4] == "word" and word[4:].isdigit() for word in lists.draw(8167).outputs)


def test_frequent_words():
    rows = make_rows("fwe", room("fwe", 4096), MadeUp(), 3)
    for row in rows:
        text = row.prompt.context.removesuffix("\n").split("coded words. ")[1]
        counts = Counter(text.split())
        assert [word for word, _ in counts.most_common(4)] == ["...", *row.prompt.outputs]
    assert len({row.prompt.outputs for row in rows}) == 3


def test_variable_tracking():
    for row in make_rows("vt", room("vt", 4096), MadeUp(), 3):
        example, _, text = row.prompt.context.rpartition("Memorize and track")
        value = re.search(r"assigned the value (\d+)", row.prompt.question)
        assert value
        held = {value[1]}
        for line in text.splitlines():
            if match := re.fullmatch(r"VAR (\w+) = (?:VAR )?(\w+)", line.strip()):
                assert match[2] in held
                held.add(match[1])
        assert held == {value[1], *row.prompt.outputs}
        assert len(row.prompt.outputs) == 5
        assert "12345" not in example  # the example's own value and names are drawn anew
        solved = example.split("they are: ")[1].split()
        assert len(solved) == 5
        assert all(len(name) == 3 and f"VAR {name} = " in example for name in solved)


def test_variable_tracking_with_a_tokenizer_of_bytes():
    with pytest.raises(UserError, match="task 'vt' needs an example of at most 500 tokens; with this tokenizer"):
        make_rows("vt", room("vt", 65536, count=len), MadeUp(), 1)
