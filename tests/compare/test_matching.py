"""Which cells and questions may be compared, and with which figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvbench.compare import baseline, planning
from kvbench.compare.cell import Key
from kvbench.compare.matching import parse_map
from kvbench.compare.outcome import compare
from kvbench.compare.planted import checks
from kvbench.compare.policy import Policy, Rule
from kvbench.compare.reading import read_runs, read_sides
from kvbench.compare.tables import Comparison
from kvbench.compare.words import differing, mapped, unused
from kvbench.errors import SetupError, UserError
from kvbench.report.load import load
from kvbench.report.render import FORMATS
from kvbench.store.identity import digest

NONE = Policy()
OTHER = {"method_source": "bbbb"}
SCORES = [1.0] * 8


def test_stop_strings_are_refused_even_where_one_side_has_none(side, rows, tmp_path) -> None:
    base, new = side("a", rows(SCORES)), side("b", rows(SCORES, stop=["\n\n"]))
    with pytest.raises(UserError, match="stop strings is"):
        compare(base, new, NONE)
    baseline.write(tmp_path / "a.json", base)
    content = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    del content["sha256"], content["cells"][0]["facts"]["stop"]
    (tmp_path / "a.json").write_text(json.dumps(content | {"sha256": digest(content)}), encoding="utf-8")
    with pytest.raises(UserError, match="stop strings is"):
        compare(baseline.read(tmp_path / "a.json"), new, NONE)


def test_a_map_names_a_method_with_its_options() -> None:
    assert parse_map(["gkv(window=8)=mine"]) == {"mine": "gkv(window=8)"}
    assert parse_map(["gkv=mine(window=8, sink=4)"]) == {"mine(window=8, sink=4)": "gkv"}
    with pytest.raises(UserError, match="write BASE=NEW"):
        parse_map(["gkv(window=8)"])


def test_a_map_says_what_it_compares_and_what_it_leaves_out(side, rows) -> None:
    """gkv of BASE stands against rkv of NEW; the other cells of these two methods are not compared."""
    base = side("a", rows(SCORES, method="gkv"), rows(SCORES, method="rkv"))
    new = side("b", rows(SCORES, method="gkv"), rows([0.0] * 8, method="rkv"))
    found = compare(base, new, NONE, parse_map(["gkv=rkv"]))
    assert found.exit_code == 5
    said = ["--map compares gkv of BASE with rkv of NEW."]
    assert [line.partition(": ")[0] for line in mapped(found)] == [
        *said,
        "--map leaves out cells of BASE",
        "--map leaves out cells of NEW",
    ]
    table = json.loads(FORMATS["json"](Comparison.make(found)))
    assert [cell["new_method"] for cell in table["tables"][0]["cells"]] == ["rkv"]
    shown = FORMATS["text"](Comparison.make(found))
    assert "gkv=rkv" in shown
    assert said[0] in shown
    assert not list(mapped(compare(base, base, NONE)))


def test_a_map_takes_options_as_a_run_does(side, rows) -> None:
    """``lam=0`` is the cell ``gkv(lam=0.0)``; names of models and of methods that are not installed stay."""
    assert parse_map(["gkv=gkv(lam=0)", "org/a=org/b", "mine(x=1)=mine(x=2)"]) == {
        "gkv(lam=0.0)": "gkv",
        "org/b": "org/a",
        "mine(x=2)": "mine(x=1)",
    }
    base, new = side("a", rows(SCORES)), side("b", rows(SCORES, options={"lam": 0.0}))
    assert compare(base, new, NONE, parse_map(["gkv=gkv(lam=0)"])).exit_code == 0
    with pytest.raises(UserError, match=r"--map 'gkv\(lambda=0\)': 'b' has no such method or model"):
        compare(base, new, NONE, parse_map(["gkv=gkv(lambda=0)"]))


@pytest.mark.parametrize(("old", "new"), [("gkv", "gkv(window=8)"), ("gkv(window=8)", "gkv")])
def test_a_method_alone_is_its_cell_with_the_default_options(old, new, side, rows) -> None:
    """A run has one method with and without an option; --map compares these two cells."""
    run = side("a", rows(SCORES), rows(SCORES, options={"window": 8}), rows(SCORES, method="h2o"))
    outcome = compare(run, run, NONE, parse_map([f"{old}={new}"]))
    pairs = [(pair.base.key.method, pair.new.key.method) for one in outcome.judged for pair in one.pairs]
    assert sorted(pairs) == sorted([(old, new), ("h2o", "h2o")])
    assert [[key.method for key in keys] for keys in outcome.aside] == [[new], [old]]
    variants = side("b", rows(SCORES, options={"window": 8}), rows(SCORES, options={"window": 4}))
    with pytest.raises(UserError, match="two cells of 'b' the same name"):
        compare(variants, variants, NONE, parse_map(["gkv=mine"]))


def test_a_map_crosses_an_option_that_the_installed_method_no_longer_has(side, rows) -> None:
    base, new = side("a", rows(SCORES, options={"old": 1})), side("b", rows(SCORES, options={"lam": 0.0}))
    outcome = compare(base, new, NONE, parse_map(["gkv(old=1)=gkv(lam=0)"]))
    assert outcome.exit_code == 0
    assert [line.split(";")[0] for line in mapped(outcome)] == [
        "--map compares gkv(old=1) of BASE with gkv(lam=0.0) of NEW."
    ]


def test_rows_of_several_folders_count_once_as_in_a_report(make_run, rows) -> None:
    folders = [make_run("a", rows(SCORES)), make_run("b", rows(SCORES[::-1]))]
    joined, alone = read_runs(folders, "a,b"), read_runs(folders[:1], "a")
    assert joined.notices == tuple(load(folders).repeated)
    assert joined.notices[0].startswith("8 rows of b left out: a has the same rows, which are used instead (")
    [mine], [theirs] = joined.cells.values(), alone.cells.values()
    assert (mine.questions, mine.digest) == (theirs.questions, theirs.digest)


@pytest.mark.parametrize(("base", "new"), [("table", "own"), ("own", "table"), ("own", "other"), ("table", "table")])
def test_one_statement_of_the_main_score_is_enough(make_run, rows, base, new) -> None:
    """The task of a plug-in that is not installed: a table states no main score."""
    gone = rows(SCORES, task="gone", score=0.0)
    runs = {}
    for run, score in (("own", "score_partial"), ("other", "score_strict")):
        stated = {"version": "1", "data": {}, "headline": score}
        runs[run] = str(make_run(run, gone, tasks={"gone": stated}))
    runs["table"] = f"{make_run('bare', gone)}/rows.parquet"
    if (base, new) == ("own", "other"):
        with pytest.raises(UserError, match="score is score_partial in own and score_strict in other"):
            compare(*read_sides(runs[base], runs[new]), NONE)
        return
    sides = read_sides(runs[base], runs[new])
    assert compare(*sides, NONE).exit_code == 0
    main = "score" if "own" not in (base, new) else "score_partial"
    assert {cell.headline for side in sides for cell in side.cells.values()} == {main}


def test_a_mapped_method_permits_no_other_weights(side, rows) -> None:
    base = side("a", rows(SCORES))
    other = {"model_revision": "s"}
    with pytest.raises(UserError, match="model revision is r in a and s in b"):
        compare(base, side("b", rows(SCORES, method="mine", **other)), NONE, parse_map(["gkv=mine"]))
    assert compare(base, side("c", rows(SCORES, **other)), NONE, parse_map(["tiny=tiny"])).exit_code == 0


def test_two_states_of_a_model_keep_the_rule_of_entries(side, rows) -> None:
    base, new = side("a", rows(SCORES)), side("b", rows(SCORES, entries_after_evict=60.0))
    assert compare(base, new, NONE, parse_map(["tiny=tiny"])).exit_code == 5


def test_entries_are_those_of_shared_questions(side, rows) -> None:
    """One question more, with a longer prompt and so a larger share of it, is no regression; a shared one is."""
    share = {"budget_share": 0.5}
    base = side("a", rows(SCORES, **share))
    longer = [row | {"doc_id": "long"} for row in rows([1.0], entries_after_evict=96.0, entries_peak=200.0, **share)]
    assert compare(base, side("b", rows(SCORES, **share), longer), NONE).exit_code == 0
    raised = rows(SCORES, **share)
    raised[3] |= {"entries_after_evict": 49.0}
    outcome = compare(base, side("c", raised, longer), NONE)
    assert outcome.judged[0].reasons == ("entries after an eviction: 48 before, 49 now",)


def changed(rows, number: int = 2) -> list:
    made = rows(SCORES)
    made[number] |= {"output_sha256": "else"}
    return made


@pytest.mark.parametrize("unknown", [{"git": None}, {"chunk": None}, {"git": "abc+changes"}])
def test_answers_may_differ_where_what_decides_them_is_unknown(side, rows, unknown) -> None:
    assert compare(side("a", rows(SCORES)), side("b", changed(rows)), NONE).exit_code == 5
    assert compare(side("c", rows(SCORES), **unknown), side("d", changed(rows), **unknown), NONE).exit_code == 0


def test_answers_may_differ_after_prompts_were_read_in_other_pieces(side, rows) -> None:
    outcome = compare(side("a", rows(SCORES)), side("b", changed(rows), chunk=128), NONE)
    assert outcome.exit_code == 0
    assert [(d.word, d.values) for d in outcome.judged[0].pairs[0].differences] == [
        ("prompt tokens read at once", "512 > 128")
    ]


def test_of_libraries_and_plug_ins_only_those_that_differ_are_named(side, rows) -> None:
    libraries = {"torch": "0", "numpy": "1", "pyarrow": "2"}
    base = side("a", rows(SCORES), versions=libraries)
    new = side("b", rows(SCORES, artefacts={"plug-in mine": "3f2a"}), versions=libraries | {"triton": "3.9.0"})
    outcome = compare(base, new, NONE)
    assert list(differing(outcome)) == [
        ("subject", "other libraries triton none > 3.9.0"),
        ("subject", "tables, drafts or plug-in plug-in mine none > 3f2a (gkv)"),
    ]
    unknown = compare(side("c", rows(SCORES)), base, NONE)
    assert list(differing(unknown)) == [("subject", "other libraries numpy unknown > 1, pyarrow unknown > 2")]


def test_a_fact_about_several_methods_is_one_sentence(side, rows) -> None:
    sides = [
        side(name, *(rows(SCORES, method=m, method_source=m + name) for m in ("gkv", "h2o"))) for name in ("a", "b")
    ]
    [(_, sentence)] = differing(compare(*sides, NONE))
    assert sentence == "source of the method gkva > gkvb (gkv), h2oa > h2ob (h2o)"


def test_the_spread_of_speeds_is_over_batches(side, rows) -> None:
    """The samples of a batch share their seconds, so that one batch shows no spread."""
    one = side("a", rows(SCORES))
    two = rows(SCORES)
    for place, row in enumerate(two):
        row["decode_seconds"] = 1.0 + place % 2
    [speed] = [cell.figures.get("speed_spread") for cell in one.cells.values()]
    [spread] = [cell.figures.get("speed_spread") for cell in side("b", two).cells.values()]
    assert speed is None
    assert spread is not None
    assert spread > 0.1


def test_answers_differ_only_where_one_does(side, rows) -> None:
    """Each side lacks the answer of another sample; all that both have are equal."""
    base, new = rows([[1.0, 1.0]] * 8), rows([[1.0, 1.0]] * 8)
    base[0] |= {"status": "judge_error", "score": None, "score_partial": None}
    new[1] |= {"status": "judge_error", "score": None, "score_partial": None}
    [one] = compare(side("a", base), side("b", new), NONE).judged
    assert one.verdict == "missing"


def test_no_text_of_a_gated_task_is_quoted(make_run, rows) -> None:
    task = {"task": "gpqa_diamond", "score_strict": 1.0}
    base = rows(SCORES, output="the secret question", **task)
    new = rows(SCORES, output="a secret question", output_sha256="x", **task)
    sides = [read_runs([make_run(name, part)], name) for name, part in (("a", base), ("b", new))]
    [one] = compare(*sides, NONE).judged
    assert one.verdict == "differs"
    assert "the first is question q0, sample 0" in one.reasons[-1]
    assert "secret" not in repr(one.first)


@pytest.mark.parametrize("sample", [-1, 2**20, 2**31 - 1])
def test_samples_without_a_possible_number(side, rows, sample) -> None:
    with pytest.raises(SetupError, match="the numbers of samples must be whole, from 0"):
        side("a", [row | {"sample": sample} for row in rows([1.0])])


def test_an_unknown_prompt_agrees_with_every_prompt(side, rows) -> None:
    new = rows([[1.0, 1.0]] * 8)
    new[0] |= {"prompt_sha256": None}
    assert compare(side("a", rows([[1.0, 1.0]] * 8)), side("b", new), NONE).exit_code == 0
    new[0] |= {"prompt_sha256": "another"}
    with pytest.raises(UserError, match="samples of question 'q0' differ in prompt: another and p"):
        side("c", new)


def test_a_planted_drop_is_of_right_answers(side, rows) -> None:
    """Every fifth question is right: the drop must take most of these."""
    scores = [1.0 if number % 5 == 0 else 0.0 for number in range(50)]
    made = [row | {"doc_id": f"q{number:02}"} for number, row in enumerate(rows(scores))]
    assert [check.name for check in checks(side("a", made)) if not check.caught] == []
    with pytest.raises(UserError, match="no drop of the score can be planted"):
        list(checks(side("b", made[:30])))


def test_one_entry_is_not_the_whole_prompt() -> None:
    entry = Key("tiny", "walk", "gkv", 1, 32, "0")
    assert entry != replace(entry, budget=1.0)
    assert len({entry, replace(entry, budget=1.0)}) == 2


def test_a_table_that_fits_no_cell_is_named(side, rows) -> None:
    policy = Policy(rules=(Rule(patterns={"method": "g*"}), Rule(patterns={"method": "gvk"})))
    outcome = compare(side("a", rows(SCORES)), side("b", rows(SCORES)), policy)
    assert list(unused(outcome)) == ["the policy's [[cells]] table 2 fits no cell of BASE; check its patterns."]


def test_later_turns_with_images_compare_with_text_and_a_reset_does_not(side, rows) -> None:
    """A side with fewer questions may lack the dialogues whose later turns have images."""
    text = rows(SCORES, multi_turn_cache="keep")
    shown = [row | {"multi_turn_cache": "keep" if i else "reset (images)"} for i, row in enumerate(text)]
    outcome = compare(side("a", shown), side("b", text[1:]), NONE)
    assert not outcome.judged[0].pairs[0].differences
    for mode in ("reset", "reset (template)"):
        with pytest.raises(UserError, match="later turns"):
            compare(side("a", shown), side("b", rows(SCORES, multi_turn_cache=mode)), NONE)


def test_cells_with_one_name_are_told_apart(side, rows) -> None:
    seeds = [rows([1.0] * 6, method=method, seed=seed) for method in ("gkv", "mine") for seed in (0, 1)]
    base, new = side("a", *seeds), side("b", *seeds, rows([1.0] * 6, seed=1, interval=64))
    names = ["gkv at 48 on walk (interval 32, seed 0)", "gkv at 48 on walk (interval 32, seed 1)"]
    other = "gkv at 48 on walk (interval 64, seed 1)"
    assert [plan.cell for plan in planning.plans(new, Policy(margin=0.05))][:3] == [*names, other]
    tables = Comparison.make(compare(base, new, NONE))
    data = tables.data()
    assert data["new_only"] == [other]
    assert data["new_only_cells"] == [{"cell": other, "model": "tiny", "interval": 64, "seed": "1"}]
    assert any(f"In NEW only: {other}." in line for line in FORMATS["text"](tables).splitlines())
    assert list(mapped(compare(base, new, NONE, parse_map(["gkv=mine"]))))[1:] == [
        "--map leaves out cells of BASE: mine at 48 on walk (seed 0), mine at 48 on walk (seed 1).",
        f"--map leaves out cells of NEW: {', '.join([*names, other])}.",
    ]
