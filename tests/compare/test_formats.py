"""No format runs, hides or passes on text of a model, a file name or a run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable

import numpy as np
import pytest

from kvbench.compare import flips, planning, words
from kvbench.compare.github import commands, without_commands
from kvbench.compare.junit import junit
from kvbench.compare.outcome import compare
from kvbench.compare.planning import MOST_QUESTIONS, SAMPLES, Plan, needed
from kvbench.compare.policy import Policy, Rule
from kvbench.compare.reading import read_runs
from kvbench.compare.tables import Comparison
from kvbench.report.render import FORMATS
from kvbench.report.stats import regression

EVIL = "<script>alert(1)</script>|x`::error::boo\x1b[31m\u202e\r\n::stop-commands::x%0A]]>"
OTHER = {"method_source": "bbbb"}


@pytest.fixture
def outcome(make_run: Callable, rows: Callable):
    """A cell with an evil method, task and questions that fell from right to wrong, with evil answers."""
    names = {"method": EVIL, "task": f"task{EVIL}"}
    base = rows([[1.0]] * 8, **names)
    new = rows([[0.0]] * 8, **names, **OTHER)
    for side in (base, new):
        for row in side:
            row |= {"doc_id": f"{EVIL}{row['doc_id']}", "output": EVIL, "extracted": EVIL}
    folders = make_run("a", base), make_run("b", new)
    found = compare(*(read_runs([folder], folder.name) for folder in folders), Policy())
    assert found.exit_code == 5
    return found


def test_text_and_markdown(outcome) -> None:
    tables = Comparison.make(outcome)
    shown = {name: FORMATS[name](tables) for name in ("text", "markdown")}
    shown |= {"flips": flips.text(outcome), "flips in Markdown": flips.markdown(outcome)}
    for name, text in shown.items():
        assert not {"\x1b", "\u202e", "\r"} & set(text), name
        assert "\n::" not in without_commands(text), name
    for name in ("markdown", "flips in Markdown"):
        assert "<script" not in shown[name]
        assert "&lt;script&gt;" in shown[name]
    rows = [line for line in shown["flips in Markdown"].splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {6}


def test_json_is_one_line(outcome) -> None:
    text = FORMATS["json"](Comparison.make(outcome, flips=True))
    assert "\n" not in text
    assert json.loads(text)["tables"][0]["cells"][0]["method"].startswith("<script>")


def test_junit_is_well_formed(outcome) -> None:
    suites = ET.fromstring(junit(outcome))
    [case] = suites.iter("testcase")
    assert "<script>alert(1)</script>" in case.get("name", "")
    assert "\x1b" not in ET.tostring(suites, encoding="unicode")


def test_github_has_one_command_a_line(outcome) -> None:
    [line] = commands(outcome)
    assert line.startswith("::error title=kvbench compare::")
    assert "\n" not in line
    assert "%250A" in line  # the percent sign of the text, escaped


def test_answers_to_gated_questions_are_withheld(make_run, rows) -> None:
    base = rows([1.0] * 8, task="gpqa_diamond", output="the secret question")
    new = rows([0.0] * 8, task="gpqa_diamond", output="the secret question", output_sha256="x", **OTHER)
    found = compare(*(read_runs([make_run(name, part)], name) for name, part in (("a", base), ("b", new))), Policy())
    for text in (flips.text(found), flips.markdown(found), FORMATS["json"](Comparison.make(found, flips=True))):
        assert "withheld" in text
        assert "secret" not in text


def test_answers_of_a_file_are_not_here(make_run, rows, side) -> None:
    new = read_runs([make_run("b", rows([0.0] * 8, **OTHER))], "b")
    text = flips.text(compare(side("a", rows([1.0] * 8)), new, Policy()))
    assert "base  (this side stores no texts of answers)" in text
    assert "new   answer 0.0" in text


def test_a_strict_comparison_of_an_unfinished_run_fails_in_every_format(side, rows) -> None:
    new = side("b", rows([1.0] * 4), planned=8)
    found = compare(side("a", rows([1.0] * 8)), new, Policy(strict=True))
    assert found.exit_code == 5
    why = "run 'b' is not finished: 4 of 8 rows."
    assert any(line.startswith("::error") and why in line for line in commands(found))
    assert f'<failure message="{why}"/>' in junit(found)
    assert why in " ".join(FORMATS["text"](Comparison.make(found)).split())


def test_undecided_cells_are_errors_only_if_they_fail(side, rows) -> None:
    base, new = side("a", rows([[1.0, 0.0]] * 3)), side("b", rows([[0.0, 1.0]] * 3, method_source="bbbb"))
    strict = compare(base, new, Policy(strict=True))
    assert [line.partition(" ")[0] for line in commands(strict)] == ["::error", "::warning"]
    advisory = compare(base, new, Policy(strict=True, rules=(Rule(patterns={}, tier="advisory"),)))
    assert [line.partition(" ")[0] for line in commands(advisory)] == ["::warning"]


def test_a_reason_beside_equal_answers_is_in_the_tables(side, rows) -> None:
    raised = rows([1.0] * 8, entries_after_evict=60.0)
    found = compare(side("a", rows([1.0] * 8)), side("b", raised), Policy())
    assert [one.verdict for one in found.judged] == ["same"]
    for name in ("text", "markdown"):
        assert "48 before, 60 now" in " ".join(FORMATS[name](Comparison.make(found)).split())


def test_a_plan_beyond_its_cap_says_so() -> None:
    assert needed(0.5, 1e-6, 1.0, 2.0, 1.0, 0.5) == MOST_QUESTIONS + 1
    assert 1239 <= needed(0.5, 0.05, 1.0, 2.0, 1.0, 0.5) <= 1300  # at least as many as t alone needs
    most = dict.fromkeys(SAMPLES, MOST_QUESTIONS + 1)
    plan = Plan(
        cell="c",
        model="m",
        interval=None,
        seed="0",
        margin=1e-6,
        questions=9,
        variance=0.5,
        needed=most,
        independent=most,
        samples=None,
        source="samples",
    )
    assert planning.text([plan]).count("> 1,000,000") == len(SAMPLES)


def test_a_side_with_a_table_is_named_as_the_user_typed_it(make_run: Callable, rows: Callable) -> None:
    first = make_run("a", rows([1.0, 0.0] * 4))
    other = make_run("b", [row | {"task": "chain"} for row in rows([1.0, 0.0] * 4)])
    both = read_runs([first / "rows.parquet", other], "a/rows.parquet,b")
    base, _ = words.sides(compare(both, both, Policy()))
    assert base.startswith("BASE a/rows.parquet,b: kvbench 0")


def test_both_sides_are_named_with_their_state(make_run: Callable, rows: Callable) -> None:
    folders = [
        make_run(name, rows([1.0, 0.0] * 4), git=git) for name, git in (("a", "abc"), ("b", "abc"), ("c", "def"))
    ]
    first, same, other = (read_runs([folder], folder.name) for folder in folders)
    assert list(words.sides(compare(first, same, Policy()))) == [
        f"BASE {folders[0]}: kvbench 0, commit abc",
        f"NEW {folders[1]}: the same version and commit",
    ]
    outcome = compare(first, other, Policy())
    assert list(words.sides(outcome))[1] == f"NEW {folders[2]}: kvbench 0, commit def"
    unknown = read_runs([make_run("d", rows([1.0, 0.0] * 4), git=None)], "d")
    assert [line.partition(": ")[2] for line in words.sides(compare(unknown, unknown, Policy()))] == [
        "kvbench 0, commit unknown"
    ] * 2
    assert "commit def" in FORMATS["markdown"](Comparison.make(outcome))
    assert FORMATS["text"](Comparison.make(outcome)).startswith("BASE")


def test_a_wide_bound_is_explained(side: Callable, rows: Callable) -> None:
    few, many = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [1.0, 0.0] * 200
    other = {"output_sha256": "else"}
    found = compare(side("a", rows(few)), side("b", rows([0.0, 1.0, *few[2:]], **other)), Policy())
    [line] = words.wide(found.judged)
    assert "because 6 questions say little" in line
    assert "--plan" in line
    assert line in FORMATS["text"](Comparison.make(found)).replace("\n", " ").replace("  ", " ")
    found = compare(side("a", rows(many)), side("b", rows([0.0, 1.0, *many[2:]], **other)), Policy())
    assert not list(words.wide(found.judged))


def test_a_plan_without_spread_says_so(side: Callable, rows: Callable) -> None:
    policy = Policy(margin=0.05)
    parts = {"none": [1.0] * 8, "mean score": [1.0, 0.0] * 4, "samples": [[1.0, 0.0]] * 8}
    for source, scores in parts.items():
        [plan] = planning.plans(side("a", rows(scores)), policy)
        assert plan.source == source
        said = {"none": "No spread: gkv at 48", "mean score": "One sample per question: gkv at 48"}.get(source, "")
        assert len(planning.notes([plan])) == bool(said)
        assert said in planning.text([plan])


@pytest.mark.parametrize(
    ("uneven", "chance", "lost", "samples", "margin"),
    [
        (0.04, 0.5, 1.0, 4, 0.05),
        (0.04, 0.5, 1.0, 1, 0.05),
        (0.5, 0.5, 1.0, 8, 0.05),
        (1.0, 0.05, 0.1, 1, 0.05),
        (1.0, 0.3, 0.25, 1, 0.1),
    ],
)
def test_as_many_questions_as_planned_suffice(uneven, chance, lost, samples, margin, side, rows) -> None:
    """The samples of a share of the questions lose a part of their score by chance; all other samples are right."""
    draw = np.random.default_rng(0)

    def scores(falls: np.ndarray, samples: int) -> np.ndarray:
        return 1 - lost * draw.binomial(1, chance * falls[:, None], (len(falls), samples))

    base = scores(draw.permutation(np.arange(200) < uneven * 200), 16)
    [plan] = planning.plans(side("a", rows(base.tolist())), Policy(margin=margin))
    passed = 0
    for _ in range(100):
        falls = draw.random(plan.needed[samples]) < uneven
        passed += regression(scores(falls, samples), scores(falls, samples), permutations=2).low > -margin
    assert passed >= 68  # three standard errors below 80


@pytest.mark.parametrize(("uneven", "margin"), [(1, 0.05), (8, 0.05), (26, 0.1)])
def test_a_plan_agrees_with_its_own_questions(uneven: int, margin: float, side, rows) -> None:
    """More samples never need more questions, and the first number that suffices for the cell's own is found."""
    [plan] = planning.plans(side("a", rows([[1.0, 0.0]] * uneven + [[1.0] * 2] * (40 - uneven))), Policy(margin=margin))
    counts = list(plan.needed.values())
    assert counts == sorted(counts, reverse=True)
    enough = [samples for samples, count in plan.needed.items() if count <= plan.questions]
    assert bool(enough) == (plan.samples is not None)
    assert not enough or plan.samples <= enough[0]


def clustered(made: list[dict], size: int = 6) -> list[dict]:
    """The rows, with `size` questions of one source after the other."""
    return [row | {"cluster_id": f"page {int(row['doc_id'][1:]) // size}"} for row in made]


def test_a_plan_counts_clusters_as_the_comparison_does(side: Callable, rows: Callable) -> None:
    """The samples of the first case move together in a cluster, those of the second do not."""
    policy = Policy(margin=0.05)
    together, apart = [[1.0, 0.0]] * 30, [[1.0, 0.0], [0.0, 1.0]] * 15
    pages = [1.0] * 6 + [0.0] * 6
    for scores, variance in ((together, 6.0), (apart, 1.0), ([*pages, *pages, *pages[:6]], 3.6)):
        [plan] = planning.plans(side("a", clustered(rows(scores))), policy)
        assert plan.variance == pytest.approx(variance)
        assert all(plan.needed[k] > plan.independent[k] for k in SAMPLES)
        assert "Clusters: gkv at 48" in planning.text([plan])
        [alone] = planning.plans(side("b", rows(scores)), policy)
        assert alone.needed == alone.independent == plan.independent
        assert not any("Clusters" in note for note in planning.notes([alone]))


def test_as_many_clusters_as_planned_suffice(side: Callable, rows: Callable) -> None:
    policy = Policy(margin=0.05)
    [plan] = planning.plans(side("a", clustered(rows([1.0] * 30))), policy)
    assert (plan.needed[1], plan.independent[1], plan.samples) == (360, 60, None)
    for count, verdict in ((354, "undecided"), (360, "no worse")):
        base, new = clustered(rows([1.0] * count)), clustered(rows([1.0] * count, output_sha256="else", **OTHER))
        assert [one.verdict for one in compare(side("b", base), side("c", new), policy).judged] == [verdict]
    [few] = planning.plans(side("d", clustered(rows([[1.0, 0.0]] * 24))), policy)
    assert few.samples is None  # four clusters


def test_flips_say_what_is_shown(make_run: Callable, rows: Callable) -> None:
    long = rows([0.0] * 8, output_sha256="else", output="x" * 200, method_source="bbbb")
    folders = [make_run("a", rows([1.0] * 8)), make_run("b", long)]
    shown = flips.text(compare(*(read_runs([folder], folder.name) for folder in folders), Policy()))
    assert shown.startswith("Each question with its mean score in BASE > NEW")
    assert f"at most {flips.TAIL} characters" in shown
    assert f"new   ...{'x' * flips.TAIL}\n" in shown
