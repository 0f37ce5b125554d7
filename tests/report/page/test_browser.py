"""The page in Chromium: filters, sorting, hints, questions and tokens, in light and dark, on a phone and on paper.

`SHOTS=DIR` keeps the screenshots, for people to look at.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import PHONE, Browser, browser

from kvbench.report.load import load
from kvbench.report.page import write
from kvbench.report.scores import ScoreReport


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def file(run: Path, tmp_path: Path) -> Path:
    return write(ScoreReport.make(load([run])), tmp_path / "page.html")


def shown(window: Browser, selector: str) -> list[str]:
    script = """return [...document.querySelectorAll(arguments[0])].filter(one => one.checkVisibility())
    .map(one => one.textContent.trim())"""
    return list(window.run(script, selector))


def choose(window: Browser, name: str, value: str) -> None:
    """Choose an option as a user does, who gets no event for the option that is chosen already."""
    options = window.driver.find_elements("css selector", f"#{name} option")
    [wanted] = [option for option in options if option.get_attribute("value") == value]
    wanted.click()


def slide(window: Browser, name: str, value: str) -> None:
    script = """const one = document.getElementById(arguments[0]);
    one.value = arguments[1]; one.dispatchEvent(new Event("input", {bubbles: true}))"""
    window.run(script, name, value)


def test_the_whole_page_at_work(window: Browser, file: Path) -> None:
    window.open(file)
    script = "return [...document.querySelectorAll('main > section')].map(s => [s.id, s.innerText.length])"
    sections = window.run(script)
    assert [name for name, _ in sections][:3] == ["overview", "curves", "frontier"]
    assert all(length > 40 for _, length in sections)

    lines = shown(window, "#cells tbody tr")
    choose(window, "by-task", "walk")
    choose(window, "by-method", "gkv")
    fewer = shown(window, "#cells tbody tr")
    assert 0 < len(fewer) < len(lines)
    assert all(line.startswith("gkv") for line in fewer)
    assert shown(window, "#count") == [f"{len(fewer)} of {len(lines)} lines of the tables"]
    assert not [title for title in shown(window, "#pairs h3") if "chain" in title]
    window.driver.find_element("css selector", "#all").click()
    assert shown(window, "#cells tbody tr") == lines
    choose(window, "by-verdict", "worse")
    judged = shown(window, "#cells h3 + .wide tbody tr")
    assert any("worse" in line for line in judged)
    assert all("worse" in line or line.startswith("full") for line in judged)
    choose(window, "by-verdict", "")

    heads = "#cells h3 + .wide thead button"
    buttons = window.driver.find_elements("css selector", heads)
    [score] = [button for button in buttons if button.text == "partial"][:1]
    column = "#cells h3 + .wide tbody tr td:nth-child(3)"
    numbers = [float(text.split()[0]) for text in shown(window, column)]
    window.run("arguments[0].click()", score)
    ascending = [float(text.split()[0]) for text in shown(window, column)]
    window.run("arguments[0].click()", score)
    descending = [float(text.split()[0]) for text in shown(window, column)]
    assert sorted(numbers) != numbers
    first = len(numbers) // 2  # the first of two tasks
    assert ascending[:first] == sorted(numbers[:first])
    assert descending[:first] == sorted(numbers[:first], reverse=True)
    assert score.find_element("xpath", "..").get_attribute("aria-sort") == "descending"

    # Each script reads the tip at once: the page moves under the resting mouse, and that may show another tip later.
    tip = window.run(
        """document.querySelector('[data-tip]').focus();
        return document.getElementById('tip').textContent"""
    )
    assert "full minus gkv" in tip
    assert "20 questions" in tip
    mark = window.run(
        """const mark = document.querySelector('.light [aria-roledescription=point]');
        mark.dispatchEvent(new Event('pointerover', {bubbles: true}));
        const tip = document.getElementById('tip');
        return tip.checkVisibility() ? tip.textContent : 'hidden'"""
    )
    assert mark.startswith("task: chain\ncell: ")
    assert "questions: 20" in mark
    assert not re.search(r"\d\.\d{5}", mark)

    assert window.complaints() == []


def test_a_line_of_the_summary_stays_for_each_verdict_that_it_has(
    window: Browser, make_run: Callable[..., Path], rows: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """gkv is tied on the first task and worse on the second."""
    scores = [1.0, 0.0] * 20
    cells = [rows(method, budget, scores, task="chain") for method, budget in (("full", None), ("gkv", 48))]
    cells += [rows("full", None, scores), rows("gkv", 48, [0.0] * 40)]
    window.open(write(ScoreReport.make(load([make_run("two", *cells)])), tmp_path / "two.html"))
    names = "#overview .wide:nth-of-type(1) tbody th"
    for verdict, methods in (("worse", ["full", "gkv"]), ("tied", ["full", "gkv"]), ("better", ["full"])):
        choose(window, "by-verdict", verdict)
        assert shown(window, names) == methods
    assert window.complaints() == []


def test_answers_that_flip_are_found_and_show_where_they_part(
    window: Browser, make_run: Callable[..., Path], rows: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Of gkv's answers, one is wrong: the filter leaves its question, and marks the character at which it parts."""
    scores = {"full": [1.0] * 4, "gkv": [1.0, 0.0, 1.0, 1.0], "h2o": [0.0] * 4}
    cells = [rows(name, None if name == "full" else 48, of) for name, of in scores.items()]
    texts = {
        "full": "so 3 + 4 = 7",
        "gkv": "so 3 + 4 = 🧩",
        "h2o": "so 3 + 4 = 🧨 and on",
        "same": "so 3 + 4 = 7 again",
    }
    for name, of in zip(scores, cells, strict=True):
        for row in of:
            row["output"] = texts[name if row["score"] < 1 or name == "full" else "same"]
    cells += [rows(name, budget, [0.0], task="gpqa_diamond") for name, budget in (("full", None), ("gkv", 48))]
    window.open(write(ScoreReport.make(load([make_run("flips", *cells)])), tmp_path / "flips.html"))
    listed = "return [...document.querySelectorAll('#question option')].map((one) => one.text)"
    parts = """return [...document.querySelectorAll('#answers article:not([hidden]) pre')]
    .map((pre) => [...pre.childNodes].map((one) => one.textContent))"""

    walk = [f"≠ walk: q{n} – a prompt" for n in (1, 0, 2, 3)]
    assert window.run(listed) == ["gpqa_diamond: q0", *walk]  # its texts are withheld, and its scores are equal
    choose(window, "by-method", "gkv")
    window.run("document.getElementById('differing').click()")
    assert window.run(listed) == walk[:1]
    assert shown(window, "#asked-count") == ["1 of 5"]
    assert window.run(parts) == [["", "", texts["full"]], ["so 3 + 4 = ", "🧩", ""]]
    [label] = [text for text in shown(window, "#answers .label") if "differs" in text]
    assert label == "output, differs from full at character 12"
    assert shown(window, "p.apart") == ["≠ another score than full"]

    choose(window, "against", "h2o at 48")  # the two pictures share their first half
    choose(window, "by-method", "")
    assert window.run(listed) == walk
    choose(window, "question", "1")  # q1: with gkv alone it was not among those that differ from h2o
    assert window.run(parts)[2] == ["so 3 + 4 = ", "🧩", ""]
    window.run("document.getElementById('differing').click()")
    choose(window, "by-task", "gpqa_diamond")
    assert window.run(listed) == ["gpqa_diamond: q0"]
    window.run("document.getElementById('differing').click()")
    assert shown(window, "#asked-count") == ["None of the 5 questions on this page fits."]
    assert not shown(window, "#asked")
    assert window.complaints() == []


def test_answers_are_compared_with_the_full_cache_where_it_was_run(
    window: Browser, make_run: Callable[..., Path], rows: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The first task lacks it, and duo, which has no budget either, is first by its name."""
    cells = [rows("duo", None, [1.0], task="chain"), rows("gkv", 48, [1.0], task="chain")]
    cells += [rows("duo", None, [0.0]), rows("full", None, [1.0]), rows("gkv", 48, [0.0])]
    window.open(write(ScoreReport.make(load([make_run("order", *cells)])), tmp_path / "order.html"))
    assert window.run("return document.getElementById('against').value") == "full"
    choose(window, "question", "1")
    assert shown(window, "#asked-title") == ["walk: q0"]
    assert shown(window, "#answers h4") == ["full", "duo", "gkv at 48"]
    assert shown(window, "p.apart") == ["≠ another score than full"] * 2


def test_questions_and_tokens(window: Browser, file: Path) -> None:
    window.open(file)
    assert shown(window, "#asked-title") == ["walk: q3"] or shown(window, "#asked-title") == ["chain: q3"]
    assert len(shown(window, "#answers article")) == 7
    assert shown(window, "#asked-prompt pre") == ["a prompt"]
    before = shown(window, "#asked-title")
    window.run("document.getElementById('after').click()")
    assert shown(window, "#asked-title") != before
    window.run("document.getElementById('before').click()")
    assert shown(window, "#asked-title") == before
    choose(window, "by-method", "h2o")
    left = [text.split("score")[0] for text in shown(window, "#answers article")]
    assert left == ["full", "h2o at 48", "h2o at 64"]  # the reference stays
    choose(window, "by-method", "")

    window.run("[...document.querySelectorAll('#answers article button')].at(-1).click()")
    assert "at 64" in window.run("return document.getElementById('kept-answer').selectedOptions[0].textContent")
    choose(window, "kept-layer", "3")
    choose(window, "kept-head", "1")
    states = {}
    for place in ("1", "2", "3"):
        slide(window, "eviction", place)
        states[place] = window.run(
            """return [...document.querySelectorAll('#token-text span')].map(s => [s.className, s.textContent])"""
        )
    assert "".join(text for _, text in states["1"]) == "".join(f"w{i} " for i in range(40))
    assert states["1"][0] == ["gone", "w0 w1 "]
    assert ["gone", "w9 "] in states["2"]  # 5 + layer + head
    assert states["2"][0] == ["dropped", "w0 w1 "]
    assert states["1"][-1] == ["unread answer", "".join(f"w{i} " for i in range(20, 40))]
    assert not [kind for kind, _ in states["3"] if kind.startswith("unread")]
    [title] = shown(window, "#looked-title")
    assert title.startswith("at the end, 40 tokens read: 37 held, of them 16 recent; 0 dropped by this eviction, 3 ")
    assert window.complaints() == []


@pytest.mark.parametrize(("name", "size", "scheme"), [("dark", (1280, 900), "dark"), ("phone", PHONE, "light")])
def test_screens(name: str, size: tuple[int, int], scheme: str, window: Browser, file: Path, tmp_path: Path) -> None:
    window.open(file, size, scheme)
    ground = window.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(22, 24, 29)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    pictures = [shown(window, f".picture.{theme} svg") for theme in ("light", "dark")]
    assert [bool(found) for found in pictures] == [scheme == "light", scheme == "dark"]
    folder = Path(os.environ.get("SHOTS") or tmp_path)
    window.screenshot(folder / f"{name}.png", whole=True)
    assert (folder / f"{name}.png").stat().st_size > 50_000


def test_paper_and_a_page_without_its_script(window: Browser, file: Path, tmp_path: Path) -> None:
    folder = Path(os.environ.get("SHOTS") or tmp_path)
    window.open(file)
    window.pdf(folder / "page.pdf")
    assert (folder / "page.pdf").read_bytes().startswith(b"%PDF")
    blocked = tmp_path / "blocked.html"  # another hash: the policy stops the script
    blocked.write_text(file.read_text(encoding="utf-8").replace("sha256-", "sha256-AAAA"), encoding="utf-8")
    window.open(blocked)
    assert window.complains_of("Content Security Policy")
    assert len(shown(window, "#cells tbody tr")) > 20
    assert shown(window, ".picture.light svg")
    assert not shown(window, "form")


def test_a_page_of_many_rows_opens_fast(
    window: Browser, make_run: Callable[..., Path], rows: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """Its size does not grow with the rows: 5,000 here. The browser's own work is measured, not the wall clock."""
    draw = random.Random(1)
    cells = [
        row
        for task in ("walk", "chain", "lookup", "aime24")
        for method in ("gkv", "h2o", "rkv", "tova", "random")
        for row in rows(method, 48, [float(draw.random() < 0.5) for _ in range(250)], task=task)
    ]
    page = write(ScoreReport.make(load([make_run("large", cells)])), tmp_path / "large.html")
    assert page.stat().st_size < 2_000_000
    window.open(page)
    assert 0 < window.seconds() < 3
    assert len(shown(window, "#cells h3 + .wide tbody tr")) == 20


def test_a_key_that_every_object_inherits_is_no_recording(
    window: Browser, run: Path, make_run: Callable, rows: Callable, tmp_path: Path
) -> None:
    """Nor is a list of recordings shown whose questions are not."""
    [row] = rows("gkv", 48, [1.0], task="lookup")
    other = make_run("r2", [row | {"row_key": "constructor"}])
    window.open(write(ScoreReport.make(load([run, other])), tmp_path / "both.html"))
    buttons = "return [...document.querySelectorAll('#answers button')].length"
    places = window.run("return data.questions.map((question) => question.task === 'lookup')")
    choose(window, "question", str(places.index(True)))
    assert window.run(buttons) == 0
    assert window.run("return recorded.length") == 2
    assert shown(window, "#look")
