"""The page as a file: complete without its script, without remote resources, small, and it names what it leaves out."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import lxml.html
import pytest

from kvbench.errors import SetupError
from kvbench.report import published as papers
from kvbench.report.load import load
from kvbench.report.overview import overview
from kvbench.report.page import kept, matrix, questions, scored, write
from kvbench.report.plots import figures
from kvbench.report.scores import ScoreReport, block
from kvbench.sources.published import Published
from kvbench.store import read_rows

PANELS = ["overview", "curves", "frontier", "figures", "pairs", "lengths", "cells", "published", "questions", "tokens"]
Page = Callable[..., str]


def tree(page: str) -> Any:
    return lxml.html.document_fromstring(page)


def data(page: str) -> dict[str, Any]:
    return json.loads(tree(page).get_element_by_id("data").text)


def test_every_panel_is_filled_or_says_why_not(run: Path, page: Page) -> None:
    whole = tree(page(run))
    for name in PANELS:
        panel = whole.get_element_by_id(name)
        assert panel.xpath(".//tbody/tr | .//svg | .//form | .//p[@class='missing' and string-length() > 20]"), name


def test_the_filter_lists_budgets_by_size(make_run: Callable, rows: Callable, page: Page) -> None:
    cells = [rows("full", None, [1.0]), rows("gkv", 128, [1.0]), rows("gkv", 64, [1.0], task="chain")]
    cells += [rows("gkv", 30, [1.0], budget_share=0.25, task="lookup")]
    listed = tree(page(make_run("sizes", *cells))).xpath("//*[@id='by-budget']/option/text()")
    assert listed == ["all", "-", "64", "128", "25%"]


def test_the_tables_are_those_of_the_report(run: Path, page: Page) -> None:
    shown = [" ".join(row.text_content().split()) for row in tree(page(run)).xpath("//*[@id='cells']//tbody/tr")]
    report = ScoreReport.make(load([run]))
    meant = [
        " ".join(" ".join(column.text(cell) for column in columns).split())
        for table in report.tables
        for columns in block(table).tables()
        for cell in table.cells
    ]
    squeezed = [text.replace(" ", "") for text in meant]
    assert [text.replace(" ", "") for text in shown] == squeezed
    assert len(shown) > 20


def test_the_policy_names_the_hash_of_the_only_script(run: Path, page: Page) -> None:
    whole = tree(page(run))
    policy = whole.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")[0]
    scripts = [s for s in whole.xpath("//script") if s.get("type") != "application/json"]
    digest = base64.b64encode(hashlib.sha256(scripts[0].text.encode()).digest()).decode()
    assert len(scripts) == 1
    none = [f"{name} 'none'" for name in ("default-src", "base-uri", "form-action")]
    own = ["style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", "img-src data:"]
    assert sorted(policy.split("; ")) == sorted(none + own)
    assert not whole.xpath("//body//*[@style]/@onload | //@onclick | //iframe | //object | //link | //base")


def test_the_page_names_no_remote_resource(run: Path, page: Page) -> None:
    text = page(run)
    whole = tree(text)
    links = whole.xpath("//@src | //@href | //@*[local-name()='xlink:href'] | //@srcset | //@action")
    assert links
    assert all(link.startswith("#") for link in links)
    styles = "".join(whole.xpath("//style/text()"))
    assert "@import" not in styles
    assert not re.search(r"url\(\s*['\"]?(?!#)", styles)


def test_tables_have_heads_and_headings_do_not_jump(run: Path, page: Page) -> None:
    whole = tree(page(run))
    assert not [t for t in whole.xpath("//table") if not t.xpath("./thead//th[@scope='col']")]
    levels = [int(h.tag[1]) for h in whole.xpath("//h1 | //h2 | //h3 | //h4")]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert not whole.xpath("//section[not(@id)] | //select[not(ancestor::label)] | //input[not(ancestor::label)]")
    ids = whole.xpath("//*[not(ancestor-or-self::*[local-name()='svg'])]/@id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in whole.xpath("//a/@href")} <= set(ids)


def test_questions_with_decisions_come_first_then_those_that_differ(run: Path, page: Page) -> None:
    shown = data(page(run))
    walk = [q["id"] for q in shown["questions"] if q["task"] == "walk"]
    assert walk[0] == "q3"
    assert len(walk) == questions.MOST_QUESTIONS
    assert len(shown["questions"][0]["answers"]) == 7
    assert {a["key"] for q in shown["questions"] for a in q["answers"]} >= set(shown["kept"])
    rows = read_rows(run)
    spread = rows[rows["task"] == "walk"].groupby("doc_id")["score_partial"].agg(lambda s: s.max() - s.min())
    assert all(spread[name] == spread.max() for name in walk[1:5])
    assert "24 of 40 questions: at most 12 per task" in page(run)


def test_a_cell_s_only_flip_is_on_the_page(make_run: Callable, rows: Callable, page: Page) -> None:
    """random fails everywhere, so every question differs as much; gkv fails on one of 40, full on another."""
    scores = {"full": [float(n != 33) for n in range(40)], "gkv": [float(n != 31) for n in range(40)]}
    cells = [rows(name, None if name == "full" else 48, of) for name, of in scores.items()]
    run = make_run("r", *cells, rows("random", 48, [0.0] * 40), rows("h2o", 48, scores["full"]))
    shown = [q["id"] for q in data(page(run))["questions"]]
    assert shown[:3] == ["q31", "q0", "q1"]
    assert len(shown) == questions.MOST_QUESTIONS


def test_the_full_cache_is_the_reference_beside_another_method_without_a_budget(
    make_run: Callable, rows: Callable, page: Page
) -> None:
    """duo, first by its name, fails on one of 40 questions and full on another: only with full is q31 duo's flip."""
    duo, full = ([float(n != wrong) for n in range(40)] for wrong in (31, 33))
    run = make_run("r", rows("duo", None, duo), rows("full", None, full), rows("gkv", 48, duo), rows("h2o", 48, full))
    report = ScoreReport.make(load([run]))
    [table] = scored.read(report)
    assert list(table.cells) == [("full", "-"), ("duo", "-"), ("gkv", "48"), ("h2o", "48")]
    answers = data(page(run))["questions"][0]["answers"]
    assert [answer["method"] for answer in answers] == ["full", "duo", "gkv", "h2o"]
    assert [answer["order"] for answer in answers] == [-2, -1, 48, 48]


def sampled(rows: Callable, method: str, budget: int | None, *scores: list[float]) -> list[dict[str, Any]]:
    """A sample of every question for each list of scores, the last sample stored first."""
    parts = [rows(method, budget, of, sample=number, seed=number) for number, of in enumerate(scores)]
    return [row | {"sample": number, "seed": 0} for number, part in reversed([*enumerate(parts)]) for row in part]


def test_questions_are_chosen_by_the_sample_that_is_shown(make_run: Callable, rows: Callable, page: Page) -> None:
    """gkv's second sample fails on 19 of 20 questions, its first on q7, where the second is right: equal means."""
    right = [1.0] * 20
    full = sampled(rows, "full", None, right, [float(n != 7) for n in range(20)])
    gkv = sampled(rows, "gkv", 48, [float(n != 7) for n in range(20)], [float(n == 7) for n in range(20)])
    first = data(page(make_run("r", full, gkv)))["questions"][0]
    assert first["id"] == "q7"
    assert [answer["scores"]["score_partial"] for answer in first["answers"]] == [1.0, 0.0]


def test_every_table_of_a_task_has_its_questions(make_run: Callable, rows: Callable, page: Page) -> None:
    """The first table alone would fill the page; the second one's only flip is on its question 39."""
    runs = [
        make_run(model, rows("full", None, [1.0] * 40, model=model), rows("gkv", 48, scores, model=model))
        for model, scores in (("a", [0.0] * 20 + [1.0] * 20), ("b", [float(n != 39) for n in range(40)]))
    ]
    shown = [question["id"] for question in data(page(*runs, group_by=["model"]))["questions"]]
    assert len(shown) == questions.MOST_QUESTIONS
    assert shown[:2] == ["q0", "q39"]


def test_a_question_opens_with_the_words_that_its_task_s_prompts_do_not_share() -> None:
    prompts = {"walk": ["Find it.\nNow 12 is", "Find it.\nNow 17\n is"], "one": ["Only one"], "same": ["Equal"] * 2}
    asked = [{"task": task, "prompt": (text, "")} for task, texts in prompts.items() for text in texts]
    asked += [{"task": "long", "prompt": (start + "word " * 40, "")} for start in "ab"]
    shared = "次の数を求めよ" * 30
    asked += [{"task": "japanese", "prompt": (f"{shared}{own}", "")} for own in ("十二", "十七")]
    asked += [{"task": "gated", "prompt": ("", "")}]
    questions._open(asked)
    words = [one["opening"] for one in asked]
    assert words[:5] == ["… 12 is", "… 17 is", "Only one", "Equal", "Equal"]
    assert words[5].startswith("aword word ")
    assert words[5].endswith("…")
    assert len(words[5]) <= questions.OPENING
    assert [word[-5:] for word in words[7:9]] == ["求めよ十二", "求めよ十七"]
    assert words[-1] == ""


def test_figures_have_the_captions_of_their_files(run: Path, page: Page) -> None:
    shown = [caption.text_content() for caption in tree(page(run)).xpath("//figcaption")]
    assert sorted(shown) == sorted(figure.caption for figure in figures(ScoreReport.make(load([run]))))


def test_a_long_output_is_cut_and_says_where_the_rest_is(make_run: Callable, rows: Callable, page: Page) -> None:
    cells = rows("full", None, [1.0, 0.0]) + rows("gkv", 48, [1.0, 1.0])
    cells[0]["output"] = "x" * 50_000
    [answer] = [
        a
        for q in data(page(make_run("r", cells)))["questions"]
        for a in q["answers"]
        if a["key"] == cells[0]["row_key"]
    ]
    text, note = answer["output"]
    assert text == "x" * 20_000
    assert note.startswith("[cut: 50000 bytes in all")
    assert cells[0]["row_key"] in note


def test_the_texts_of_a_page_are_capped(make_run: Callable, rows: Callable, page: Page) -> None:
    cells = [c for task in ("walk", "chain", "lookup") for c in rows("gkv", 48, [1.0] * 30, task=task)]
    for cell in cells:
        cell["output"] = "y" * 30_000
    text = page(make_run("r", cells))
    assert len(text) < 1_500_000
    shown = len(data(text)["questions"])
    assert 0 < shown < 36
    assert f"{shown} of 90 questions: at most 12 per task, at most 700 KB of text in all" in text


def test_a_question_names_its_images(make_run: Callable, rows: Callable, page: Page) -> None:
    listed = [{"name": "../a.png\x1b", "width": 4, "height": 2, "tokens": 1, "turn": 1, "at": 0}]
    cells = rows("gkv", 48, [1.0], images=1, image_list=listed, kept_text=1.0, kept_images=0.125)
    [question] = data(page(make_run("s", cells)))["questions"]
    assert question["images"] == ["image 1: ../a.png\\x1b, 4x2 pixels, 1 token, turn 1"]
    assert question["answers"][0]["kept"] == ["100% of text kept", "12% of images kept"]
    [plain] = data(page(make_run("t", rows("gkv", 48, [1.0]))))["questions"]
    assert plain["images"] == plain["answers"][0]["kept"] == []


def test_gated_texts_are_withheld(make_run: Callable, rows: Callable, page: Page) -> None:
    run = make_run("r", rows("full", None, [1.0, 0.0], task="gpqa_diamond", output="secret stem", extracted="B9x"))
    text = page(run)
    assert "secret stem" not in text
    assert "a prompt" not in text
    assert "B9x" not in text
    [first, _] = data(text)["questions"]
    assert first["withheld"].startswith("The task's data are gated")
    assert first["answers"][0]["scores"]["score"] in (0.0, 1.0)
    assert (first["prompt"], first["opening"]) == (["", ""], "")


def test_decisions_on_a_prompt_that_is_not_stored_are_withheld(run: Path, page: Page, monkeypatch) -> None:
    """As of a gated task that is not installed here."""
    assert data(page(run))["kept"]
    texts = kept.read_texts
    monkeypatch.setattr(kept, "read_texts", lambda *args, **keys: texts(*args, **keys).assign(prompt=None))
    text = page(run)
    assert not data(text)["kept"]
    assert "w39" not in text


def test_secrets_are_hidden(make_run: Callable, rows: Callable, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-9f2c-canary"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", canary)
    cells = rows("gkv", 48, [1.0, 0.0], options={"path": canary}, model=f"org/{canary}", note=f"token={canary}")
    cells += rows(
        f"mine {canary}", 48, [1.0, 0.0], output=f"the key is {canary}", extracted=canary, model=f"org/{canary}"
    )
    text = page(make_run("r", cells))
    assert "the key is ***" in text
    assert canary not in text


def test_without_decisions_the_page_names_the_command(make_run: Callable, rows: Callable, page: Page) -> None:
    run = make_run("r", rows("gkv", 48, [1.0, 0.0]))
    assert f"kvbench record {run}" in tree(page(run)).get_element_by_id("tokens").text_content()


def test_a_table_without_its_run_has_no_texts(run: Path, page: Page, tmp_path: Path) -> None:
    copy = tmp_path / "alone.parquet"
    copy.write_bytes((run / "rows.parquet").read_bytes())
    whole = tree(page(copy))
    assert "without a run folder" in whole.get_element_by_id("questions").text_content()
    assert whole.xpath("//*[@id='cells']//tbody/tr")


def test_a_run_beside_a_table_without_one_has_its_own_texts(
    run: Path, make_run: Callable, rows: Callable, page: Page, tmp_path: Path
) -> None:
    other = make_run("r2", rows("gkv", 48, [1.0, 0.0], task="lookup"))
    copy = tmp_path / "alone.parquet"
    copy.write_bytes((other / "rows.parquet").read_bytes())
    text = page(run, copy)
    assert {question["task"] for question in data(text)["questions"]} == {"walk", "chain"}
    assert "24 of 42 questions: at most 12 per task. Questions with" in text


def test_one_entry_is_not_the_whole_prompt(make_run: Callable, rows: Callable) -> None:
    """To Python, 1 equals 1.0."""
    scores = {"gkv": ([0.0, 0.25], [1.0, 0.75]), "h2o": ([0.125, 0.125], [0.75, 0.75])}
    cells = []
    for method, (one, whole) in scores.items():
        cells += rows(method, 1, one) + rows(method, 40, whole, budget_share=1.0)
    report = ScoreReport.make(load([make_run("r", cells)]))
    table, *_ = report.tables
    assert [(best.leader.budget, best.leader.score.mean) for best in table.best] == [(1, 0.125), (1.0, 0.875)]
    assert len(next(overview(report.tables)).lines) == 4
    [walk] = scored.read(report)
    both = matrix.matrices(walk)
    assert [at.budget for at in both] == ["1", "100%"]
    assert [round(abs(at.between("gkv", "h2o").diff), 3) for at in both] == [0.0, 0.125]  # type: ignore[union-attr]


def test_published_scores_stand_beside_equal_cells(make_run: Callable, rows: Callable, page: Page) -> None:
    cells = rows("foresightkv", 1024, [1.0, 0.0] * 15, task="aime24", model="Qwen/Qwen3-4B")
    panel = tree(page(make_run("r", cells))).get_element_by_id("published")
    assert "ForesightKV (arXiv 2602.03203)" in panel.text_content()
    assert "0.500" in panel.xpath(".//tbody/tr")[0].text_content()


def test_every_published_score_of_a_cell_is_shown(
    make_run: Callable, rows: Callable, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [field.name for field in fields(Published)]
    lines = [f"{paper},Table 1,Qwen3-4B,ForesightKV,AIME24,1024,pass@1,50,%,a note," for paper in ("one", "two")]
    printed = [Published(**dict(zip(names, line.split(","), strict=True))) for line in lines]
    monkeypatch.setattr(papers, "published", lambda: printed)
    monkeypatch.setattr(papers, "every", papers.every.__wrapped__)  # without the cache
    cells = rows("foresightkv", 1024, [1.0] * 8, task="aime24", model="Qwen/Qwen3-4B")
    panel = tree(page(make_run("r", cells))).get_element_by_id("published")
    shown = [line.text_content() for line in panel.xpath(".//tbody/tr")]
    assert ["one, Table 1" in line for line in shown] == [True, False]
    assert ["two, Table 1" in line for line in shown] == [False, True]
    assert "±0" not in shown[0]
    failed = rows("foresightkv", 1024, [1.0], task="aime24", model="Qwen/Qwen3-4B", status="error")
    failed = [row | {"score": None, "score_partial": None} for row in failed]
    assert "nan" not in tree(page(make_run("f", failed))).get_element_by_id("published").text_content()


def test_without_vl_convert_the_page_names_the_installation(
    run: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    whole = tree(page(run))
    assert "pip install 'kvbench[report]'" in whole.get_element_by_id("curves").text_content()
    assert not whole.xpath("//svg")
    assert whole.xpath("//*[@id='cells']//tbody/tr")


def test_unfinished_runs_are_named(make_run: Callable, rows: Callable, page: Page) -> None:
    run = make_run("half", rows("gkv", 48, [1.0, 0.0]), planned=10)
    assert "Run half is not finished (2 of 10 rows)." in page(run)


def test_write_replaces_a_page_and_refuses_a_folder(run: Path, tmp_path: Path) -> None:
    report = ScoreReport.make(load([run]))
    target = tmp_path / "new" / "page.html"
    assert write(report, target) == target
    assert target.stat().st_size < 2_000_000
    with pytest.raises(SetupError, match="cannot write the page"):
        write(report, tmp_path)
