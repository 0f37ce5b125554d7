"""Hostile text in every field of a page stays text: it adds neither an element nor an attribute, and nothing runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, browser

from kvbench.report.load import load
from kvbench.report.page import write
from kvbench.report.scores import ScoreReport
from kvbench.store import Journal

FILE = Path(__file__).parents[2] / "data" / "xss_cases.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().split("\n") if line]
FIELDS = ("texts", "methods", "models")  # outputs, prompts, extracted answers, ids and notes; names and options; models
PAGES: dict[str, Path] = {}  # hostile pages that a test of this process wrote
ASK_ALL = """
let shown = "";
const select = document.getElementById("question");
for (const option of select.options) {
  select.value = option.value;
  select.dispatchEvent(new Event("input", { bubbles: true }));
  shown += document.getElementById("asked").textContent;
}
return { questions: select.options.length, global: typeof window.__x, shown };
"""
SVG = {
    "svg",
    "g",
    "path",
    "text",
    "rect",
    "line",
    "circle",
    "defs",
    "clippath",
    "tspan",
    "title",
    "lineargradient",
    "stop",
}
NEVER = ("on", "href", "src", "style", "xlink")


class Marks(HTMLParser):
    """Elements with the names of their attributes; those inside figures apart."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)
        self.found: Counter[tuple[str, ...]] = Counter()
        self.drawn: Counter[tuple[str, ...]] = Counter()
        self.comments: list[str] = []
        self._inside = 0
        self.page = page
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside += tag == "svg"
        (self.drawn if self._inside else self.found)[(tag, *(name for name, _ in attrs))] += 1

    def handle_endtag(self, tag: str) -> None:
        self._inside -= tag == "svg"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        (self.drawn if self._inside else self.found)[(tag, *(name for name, _ in attrs))] += 1

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture
def written(
    make_run: Callable[..., Path],
    rows: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str, list[str]], Path]:
    """written(fields, texts): a page with a question for each text, which stands in all these fields."""
    append = Journal.append
    asked: dict[str, str] = {}

    def with_prompt(journal: Journal, row: Any, *, prompt: str, **other: Any) -> Any:
        return append(journal, row, prompt=asked.get(row["doc_id"], prompt), **other)

    monkeypatch.setattr(Journal, "append", with_prompt)

    def write_page(fields: str, texts: list[str]) -> Path:
        made: list[list[dict[str, Any]]] = []
        for place, text in enumerate(texts):
            task = ("walk", "chain", "lookup")[place % 3]
            [good] = rows("full", None, [1.0], task=task)
            [bad] = rows("gkv", 48, [0.0], task=task)
            name = f"{text} {place}"  # distinct
            if fields == "texts":
                good |= {"doc_id": name, "output": text, "extracted": text}
                bad |= {"doc_id": name, "status": "grader_error", "score": None, "score_partial": None, "note": text}
                asked[name] = text
            elif fields == "methods":
                bad |= {"method": name, "options": {"kernel": text}}
            else:
                good["model"] = bad["model"] = name
            for row in (good, bad):
                row["doc_id"] = row["doc_id"] if fields == "texts" else f"q{place}"
                row["row_key"] = f"{2 * place + (row is bad):064x}"
            made.append([good, bad])
        run = make_run(f"{fields}-{len(texts[0])}", *made)
        report = ScoreReport.make(load([run], ["model"] if fields == "models" else ()))
        return write(report, tmp_path / f"{fields}.html")

    return write_page


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def test_all_28_cases_are_tried() -> None:
    assert len(CASES) == 28


@pytest.mark.parametrize("fields", FIELDS)
def test_hostile_text_adds_no_element_and_no_attribute(fields: str, written: Callable[..., Path]) -> None:
    page = PAGES[fields] = written(fields, [case["text"] for case in CASES])
    hostile = Marks(page.read_text(encoding="utf-8"))
    plain = Marks(written(fields, [f"harmless {number}" for number in range(28)]).read_text(encoding="utf-8"))
    PAGES[fields].write_text(hostile.page, encoding="utf-8")
    assert hostile.found == plain.found
    assert hostile.comments == plain.comments == []
    for tag, *attributes in hostile.drawn:
        assert tag in SVG
        assert not [name for name in attributes if name.startswith(NEVER)]


@pytest.mark.parametrize("fields", FIELDS)
def test_hostile_text_never_runs(fields: str, written: Callable[..., Path], window: Browser) -> None:
    """In Chromium: every question is shown, no script of the text runs, and the policy has nothing to forbid."""
    window.open(PAGES.get(fields) or written(fields, [case["text"] for case in CASES]))
    seen = window.run(ASK_ALL)
    assert seen["questions"] == 28
    assert seen["global"] == "undefined"
    assert all(text in seen["shown"] for text in ("onerror", "javascript:", "{{7*7}}") if fields == "texts")
    assert window.complaints() == []
