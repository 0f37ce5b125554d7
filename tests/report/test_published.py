"""``report --published``: papers' scores beside ours, and whether a difference lies within both errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from kvbench.cli.app import main
from kvbench.errors import UserError
from kvbench.report import published
from kvbench.report.load import load
from kvbench.report.published_report import PublishedReport
from kvbench.report.render import FORMATS
from kvbench.store import row_key

MODEL = "Qwen/Qwen3-4B"


def aime(rows: Callable, method: str, budget: int | None, rights: list[int], samples: int = 4, **more: object) -> list:
    """Rows of AIME 2024: question i has rights[i] right answers of `samples`."""
    given = {"task": "aime24", "model": MODEL, "prompt_style": "foresightkv", "temperature": 0.6} | more
    made = []
    for i, right in enumerate(rights):
        for sample in range(samples):
            (row,) = rows(method, budget, [float(sample < right)], **given)
            place = {"doc_id": f"q{i}", "sample": sample}
            made.append(row | place | {"row_key": row_key({"of": row["row_key"]} | place)})
    return made


def report(*runs: object) -> PublishedReport:
    return PublishedReport.make(load(list(runs)))


def lines(shown: PublishedReport) -> list[dict]:
    return [line for table in shown.data()["tables"] for line in table["cells"]]


def test_every_score_of_the_file_that_a_cell_can_have_is_read() -> None:
    every = published.every()
    assert len(every) == 76
    assert all(0 <= printed.value <= 1 for printed in every)
    places = {(p.model, p.task, p.method, p.budget, p.row.method, p.row.table_or_figure): p.value for p in every}
    assert len(places) == len(every)
    assert {p.task for p in every} == {"aime24", "aime25", "amc23", "gpqadiamond", "livecodebenchreleasev3"}
    ten = [p for p in every if p.row.table_or_figure == "Table 10"]
    table = {(p.method, p.budget): p for p in ten if p.model.startswith("deepseek")}
    assert table["duo(sparsity=0.75)", "-"].value == pytest.approx(0.033)
    assert table["foresightkv", "1024"].value == pytest.approx(0.446)


def test_the_file_of_weights_is_no_other_method(make_run: Callable, rows: Callable) -> None:
    given = {"options": {"scorer": "runs/scorer", "features": "attn"}}
    shown = report(make_run("r", aime(rows, "foresightkv", 1024, [2] * 30, **given)))
    (line,) = lines(shown)
    assert (line["method"], line["published"]) == ("foresightkv(features=attn, scorer=runs/scorer)", 0.375)


def test_a_cell_stands_beside_the_papers_scores(make_run: Callable, rows: Callable) -> None:
    rights = [2] * 17 + [4] * 13  # 30 questions: 0.717
    shown = report(make_run("r", aime(rows, "foresightkv", 2048, rights)))
    (line,) = lines(shown)
    assert (line["method"], line["budget"], line["published"]) == ("foresightkv", 2048, pytest.approx(0.702))
    assert line["difference"] == pytest.approx((17 * 0.5 + 13) / 30 - 0.702)
    own = math.sqrt(17 * (1 / 3) / 4) / 30  # variance 1/3 of four samples, half of them right
    assert line["error"] == pytest.approx(own)
    assert line["published_error"] == pytest.approx(own)  # Table 10 does not state its samples: as many as ours
    assert line["within"] is True
    assert line["source"] == "ForesightKV (arXiv 2602.03203), Table 10"


def test_a_difference_beyond_both_errors_is_not_within(make_run: Callable, rows: Callable) -> None:
    shown = report(make_run("r", aime(rows, "rkv", 2048, [2] * 4 + [0] * 26)))
    (line,) = lines(shown)
    assert line["published"] == pytest.approx(0.448)
    assert line["within"] is False
    assert "no" in FORMATS["text"](shown)


def test_the_paper_s_own_number_of_samples_counts(make_run: Callable, rows: Callable) -> None:
    shown = report(make_run("r", aime(rows, "foresightkv", 1024, [2] * 30)))
    by = {line["published_method"]: line for line in lines(shown) if "Table 4" in line["source"]}
    line = by["ForesightKV, RL reward -L_ours"]
    assert line["published"] == pytest.approx(0.545)
    assert line["published_error"] == pytest.approx(line["error"] * math.sqrt(4 / 32))
    assert {"Table 4", "Table 5", "Table 10"} <= {line["source"].rpartition(", ")[2] for line in lines(shown)}


def test_errors_that_samples_do_not_show_are_unknown(make_run: Callable, rows: Callable) -> None:
    one = report(make_run("r", aime(rows, "foresightkv", 2048, [1] * 20 + [0] * 10, samples=1)))
    assert [(line["error"], line["within"]) for line in lines(one)] == [(None, None)]
    (block,) = one.blocks()
    (shown,) = [column.text(block.lines[0]) for column in block.grids[0] if column.header == "within both"]
    assert shown == "-"
    some = report(make_run("s", aime(rows, "foresightkv", 2048, [2] * 5 + [4] * 5)))  # 10 of the 30 questions
    (line,) = lines(some)
    assert line["error"] == pytest.approx(0.25 * math.sqrt(10 / 9) / math.sqrt(10))  # over questions
    draws = math.sqrt(5 * (1 / 3) / 4) / 10  # of the 10 questions
    assert line["published_error"] == pytest.approx(draws * math.sqrt(10 / 30))  # the paper asked all 30
    assert line["within"] is True


def test_a_paper_that_asked_other_questions_gets_no_verdict(make_run: Callable, rows: Callable) -> None:
    given = {"task": "gpqa_diamond", "prompt_style": "foresightkv"}
    shown = report(make_run("r", aime(rows, "rkv", 2048, [2] * 30, **given)))
    (line,) = lines(shown)
    assert (line["published"], line["difference"]) == (pytest.approx(0.4), pytest.approx(0.1))
    assert (line["published_error"], line["within"]) == (None, None)
    assert line["notes"].endswith("only 54 of the benchmark's questions")
    (block,) = shown.blocks()
    assert "ForesightKV (arXiv 2602.03203), Table 6: only 54 of the benchmark's questions" in block.notes[1]


def test_answers_of_another_length_are_no_match(make_run: Callable, rows: Callable) -> None:
    model = {"task": "amc23", "model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}
    right = aime(rows, "gkv", 512, [2] * 40, max_new_tokens=4096, **model)
    assert [line["published"] for line in lines(report(make_run("a", right)))] == [pytest.approx(0.45)]
    longer = aime(rows, "gkv", 512, [2] * 40, max_new_tokens=16384, **model)
    assert not lines(report(make_run("b", longer)))


def test_lines_name_their_group(make_run: Callable, rows: Callable) -> None:
    runs = [make_run(f"r{seed}", aime(rows, "rkv", 2048, [2] * 30, seed=seed)) for seed in (0, 1)]
    shown = PublishedReport.make(load(runs, ["seed"]))
    assert [line["group"] for line in shown.lines()] == ["seed 0", "seed 1"]


def test_what_was_published_but_not_run_is_named(make_run: Callable, rows: Callable) -> None:
    text = FORMATS["text"](report(make_run("r", aime(rows, "foresightkv", 2048, [2] * 30)))).replace("\n", " ")
    assert "Published, but with no cell here: ForesightKV, RL reward none (supervised only) at 1024" in text
    assert "From ForesightKV (arXiv 2602.03203)." in text


def test_without_a_match_the_report_says_so(
    make_run: Callable, rows: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("r", rows("gkv", 48, [1.0, 0.0]))
    assert main(["report", str(run), "--published"]) == 0
    assert "None of the 76 published scores is of model tiny" in capsys.readouterr().out.replace("\n", " ")
    assert main(["report", str(run), "--published", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"] == []


@pytest.mark.parametrize("other", ["--memory", "--by category", "--html x.html", "--baseline gkv", "--summary"])
def test_options_of_other_reports_are_refused(make_run: Callable, rows: Callable, other: str) -> None:
    run = make_run("r", rows("gkv", 48, [1.0]))
    assert main(["report", str(run), "--published", *other.split()]) == UserError.exit_code
