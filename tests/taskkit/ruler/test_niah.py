from __future__ import annotations

import numpy as np
import pytest
from support.ruler import MadeUp, count, room

from kvbench.taskkit.ruler.make import make_rows
from kvbench.taskkit.ruler.niah import DEPTHS, Needles, _Pairs
from kvbench.taskkit.ruler.recipes import SUBTASKS


def test_pairs_are_sorted_as_if_they_were_all_made():
    adjectives = ["old", "blue", "blue-eyed", "bluer", "blue", "old-fashioned", "old-fashioned-ish", "a b", "Zany"]
    nouns = ["eyed-cat", "dog", "fashioned-ish-x", "Ant", "eyelid", "dog"]
    expected = sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    pairs = _Pairs(adjectives, nouns)
    assert list(pairs) == expected
    assert (pairs[-1], len(pairs)) == (expected[-1], len(expected))
    with pytest.raises(IndexError):
        pairs[len(expected)]


def test_pairs_of_wonderwords():
    needles = Needles(room=room("vt", 4096), material=MadeUp(), haystack="noise")
    words = needles._words
    assert len(words) == 6171620
    some = [words[i] for i in range(0, len(words), 1009)]
    assert some == sorted(some)
    blue = [words[i] for i in range(612_000, 640_000)]  # where "blue-eyed-..." lies among "blue-..."
    assert blue == sorted(set(blue))
    assert "blue-eyed-aardvark" in blue


def test_depths_are_numpys():
    assert list(np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int)) == DEPTHS


@pytest.mark.parametrize("subtask", [name for name, s in SUBTASKS.items() if s.settings.get("haystack") == "essay"])
def test_needles_lie_between_sentences_of_the_essays(subtask: str):
    material = MadeUp()
    hay = material.sentences(" ".join(material.essays().split()))
    hidden = 1 if "single" in subtask else 4
    for row in make_rows(subtask, room(subtask, 2048), material, 4):
        body = row.prompt.context.split("\n", 1)[1]
        sentences = material.sentences(body.strip())
        needles = [s for s in sentences if s.startswith("One of the special magic ")]
        rest = [s for s in sentences if s not in needles]
        assert len(needles) == hidden
        assert rest[:-1] == hay[: len(rest) - 1]  # the last sentence is cut at a word
        assert all(any(s.endswith(f" is: {value}.") for s in needles) for value in row.prompt.outputs)
        first = row.prompt.outputs[0]
        assert row.needle_at == count(row.prompt.user[: row.prompt.user.index(first)])


def test_essays_begin_anew_where_they_end():
    material = MadeUp()
    material.text = "One two. Three four five."
    needles = Needles(room=room("vt", 4096), material=material, haystack="essay")
    assert needles.sentences(7) == ["One two.", "Three four five.", "One two."]
    assert needles.sentences(4) == ["One two.", "Three four."]


def test_wording():
    def texts(subtask: str) -> tuple[str, str, tuple[str, ...]]:
        prompt = make_rows(subtask, room(subtask, 2048), MadeUp(), 1)[0].prompt
        return prompt.user, prompt.answer_prefix, prompt.outputs

    user, prefix, outputs = texts("niah_multiquery")
    assert user.startswith("Some special magic numbers are hidden within the following text.")
    asked = user.rpartition("for ")[2].removesuffix(" mentioned in the provided text?")
    first, second, third, fourth = asked.replace(", and ", ", ").split(", ")
    assert asked == f"{first}, {second}, {third}, and {fourth}"
    assert prefix == f" The special magic numbers for {asked} mentioned in the provided text are"
    for key, value in zip((first, second, third, fourth), outputs, strict=True):
        assert f"One of the special magic numbers for {key} is: {value}." in user
    user, prefix, outputs = texts("niah_multivalue")
    assert "What are all the special magic numbers for " in user
    assert len(set(outputs)) == 4
    user, prefix, outputs = texts("niah_single_3")
    assert user.startswith("A special magic uuid is hidden within the following text.")
    assert "What is the special magic uuid for " in user
    assert prefix.endswith(" mentioned in the provided text is")
    assert len(outputs[0]) == 36
