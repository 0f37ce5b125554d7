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
from kvbench.report.page import figures, write
from kvbench.report.plots import svg
from kvbench.report.scores import ScoreReport
from kvbench.store import Journal

FILE = Path(__file__).parents[2] / "data" / "xss_cases.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().split("\n") if line]
PAGES: list[Path] = []  # the hostile page, once a test of this process wrote it
ASK_ALL = """
let shown = "";
const select = document.getElementById("question");
for (const option of select.options) {
  select.value = option.value;
  select.dispatchEvent(new Event("change", { bubbles: true }));
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
        self.texts = ""  # of the figures
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

    def handle_data(self, data: str) -> None:
        self.texts += data if self._inside else ""

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture
def written(
    make_run: Callable[..., Path],
    rows: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[list[str]], Path]:
    """written(texts): a page with a question for each text.

    The text stands in the question's prompt, output, extracted answer, id and note, in the names of model and method,
    and in an option.
    """
    append = Journal.append
    asked: dict[str, str] = {}

    def with_prompt(journal: Journal, row: Any, *, prompt: str, **other: Any) -> Any:
        return append(journal, row, prompt=asked.get(row["doc_id"], prompt), **other)

    monkeypatch.setattr(Journal, "append", with_prompt)

    def write_page(texts: list[str]) -> Path:
        made: list[list[dict[str, Any]]] = []
        for place, text in enumerate(texts):
            task = ("walk", "chain", "lookup")[place % 3]
            name = f"{text} {place}"  # distinct
            asked[name] = text
            [full] = rows("full", None, [1.0], task=task, extracted=text)
            [evicted] = rows(name, 48, [0.0], task=task, extracted=text, options={"kernel": text})
            [failed] = rows(name, 64, [0.0], task=task, status="grader_error", note=text)
            failed |= {"score": None, "score_partial": None}
            for number, row in enumerate((full, evicted, failed)):
                row |= {"doc_id": name, "model": name, "output": text, "row_key": f"{3 * place + number:064x}"}
                row["image_list"] = [{"name": text, "width": 1, "height": 1, "tokens": 1, "turn": 1}]
            made.append([full, evicted, failed])
        run = make_run(f"r{len(texts[0])}", *made)
        return write(ScoreReport.make(load([run], ["model"])), tmp_path / f"{run.name}.html")

    return write_page


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def test_all_28_cases_are_tried() -> None:
    assert len(CASES) == 28


def test_hostile_text_adds_no_element_and_no_attribute(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, str] = {}
    monkeypatch.setattr(figures, "MOST_BYTES", 10**9)  # no figure is left out
    monkeypatch.setattr(  # a figure has the same texts on both grounds; to draw it takes a second
        figures, "svg", lambda figure, _: drawn.get(figure.name) or drawn.setdefault(figure.name, svg(figure, "light"))
    )
    PAGES.append(written([case["text"] for case in CASES]))
    hostile = Marks(PAGES[0].read_text(encoding="utf-8"))
    monkeypatch.setattr(figures, "svg", lambda *_, **__: "<svg></svg>")  # nothing looks at those of the harmless page
    plain = Marks(written([f"harmless {number}" for number in range(28)]).read_text(encoding="utf-8"))
    assert hostile.found == plain.found
    assert hostile.comments == plain.comments == []
    assert all(text in hostile.texts for text in ("onerror", "javascript:", "{{7*7}}"))  # figures have the names too
    for tag, *attributes in hostile.drawn:
        assert tag in SVG
        assert not [name for name in attributes if name.startswith(NEVER)]


def test_hostile_text_never_runs(written: Callable[..., Path], window: Browser) -> None:
    """In Chromium: every question is shown, no script of the text runs, and the policy has nothing to forbid."""
    window.open(PAGES[0] if PAGES else written([case["text"] for case in CASES]))
    seen = window.run(ASK_ALL)
    assert seen["questions"] == 28
    assert seen["global"] == "undefined"
    assert all(text in seen["shown"] for text in ("onerror", "javascript:", "{{7*7}}"))
    assert window.complaints() == []
