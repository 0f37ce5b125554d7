"""Words, essays and documents from a data folder, and what is said when they are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.ruler import MadeUp, room

from kvbench.errors import SetupError
from kvbench.sources.data import Data
from kvbench.taskkit.ruler import material
from kvbench.taskkit.ruler.make import make_rows
from kvbench.taskkit.ruler.material import Sources


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(material, "_words", material._words.__wrapped__)
    monkeypatch.setattr(material, "_splitter", material._splitter.__wrapped__)


def folder(tmp_path: Path, **texts: object) -> Sources:
    (tmp_path / "ruler").mkdir()
    for name, content in texts.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "ruler" / f"{name}.json").write_text(text, encoding="utf-8")
    return Sources(Data(tmp_path, allow_mismatch=True, env={}), "ruler/x")


def test_from_a_folder(tmp_path: Path):
    made = MadeUp()
    sources = folder(
        tmp_path,
        PaulGrahamEssays={"text": made.essays()},
        squad=made.squad(),
        hotpotqa=made.hotpotqa(),
        english_words={"1": "ant", "2": "bee"},
    )
    assert sources.essays() == made.essays()
    assert sources.squad() == made.squad()
    assert sources.hotpotqa() == made.hotpotqa()
    assert sources.english_words() == ["ant", "bee"]
    assert sources.source.used["ruler/x"].sha256
    for subtask in ("qa_1", "qa_2"):
        assert make_rows(subtask, room(subtask, 2048), sources, 2) == make_rows(subtask, room(subtask, 2048), made, 2)


def test_several_essays_are_one_text(tmp_path: Path):
    (tmp_path / "ruler").mkdir()
    lines = "\n".join(json.dumps({"text": text}) for text in ("One.", "Two."))
    (tmp_path / "ruler" / "PaulGrahamEssays.json").write_text(lines, encoding="utf-8")
    assert Sources(Data(tmp_path, env={}), "ruler/x").essays() == "One. Two."


@pytest.mark.parametrize("part", ["essays", "squad", "hotpotqa", "english_words"])
def test_missing_in_the_folder(tmp_path: Path, part: str):
    with pytest.raises(SetupError, match=r"has no data for task 'ruler/x': looked for .*ruler"):
        getattr(folder(tmp_path), part)()


def test_damaged(tmp_path: Path):
    sources = folder(tmp_path, squad="{", english_words="[1]", PaulGrahamEssays={"words": "no text"})
    with pytest.raises(SetupError, match=r"squad\.json' cannot be read"):
        sources.squad()
    with pytest.raises(SetupError, match=r"english_words\.json' must be one JSON object"):
        sources.english_words()
    with pytest.raises(SetupError, match="the essays of task 'ruler/x' must be objects with a 'text'"):
        sources.essays()


@pytest.mark.parametrize(("package", "call"), [("wonderwords.assets", "words"), ("nltk.tokenize.punkt", "sentences")])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str, call: str):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        SetupError, match=rf"{package.split('.')[0]}, which is missing. .*pip install \"kvbench\[ruler\]\""
    ):
        getattr(Sources(Data(env={}), "ruler/x"), call)("nounlist")


def test_other_word_lists_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(material.WORD_LISTS, "nounlist", "0" * 64)
    with pytest.raises(SetupError, match=r"'nounlist' differs from that of wonderwords 3\.0\.1"):
        Sources(Data(env={}), "ruler/x").words("nounlist")


def test_the_splitter_without_its_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(SetupError, match=r"python -m nltk\.downloader punkt_tab"):
        Sources(Data(env={}), "ruler/x").sentences("One. Two.")


def test_the_splitter_with_its_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import nltk

    model = tmp_path / "tokenizers" / "punkt_tab" / "english"
    model.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (model / name).write_text("")
    (model / "abbrev_types.txt").write_text("dr\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert Sources(Data(env={}), "ruler/x").sentences("Ask Dr. No. He knows.") == ["Ask Dr. No.", "He knows."]
