"""The numbers of docs/training.md and docs/replay.md equal the CSV files that they were read from."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

import pytest
from support.folders import ROOT

from kvbench.registry import methods

TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
REPLAY = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
MODELS = {
    "untrained": "tiny",
    "`gkv-distill` at 96": "distilled",
    "`gkv-rl` at 128, temperature 2, from the untrained, 150 steps": "rl",
    "`gkv-rl` at 96, from the distilled, 80 steps": "distilled, rl 80",
    "`gkv-rl` at 96, from the distilled, 250 steps": "distilled, rl 250",
}


def rows(path: str) -> list[dict[str, str]]:
    with (ROOT / "results" / path).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def agrees(text: str, value: float | str) -> bool:
    """Whether a number of a page is a value, rounded to the page's digits; values may be rounded to four places."""
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(text) - float(value)) <= 0.5 * unit * (1 + 1e-9) + (5e-5 if unit > 1e-4 else 0)


def section(page: str, heading: str) -> str:
    level = heading.split(" ")[0]
    return re.split(rf"\n#{{2,{len(level)}}} ", page.split(f"\n{heading}\n")[1])[0]


def table(text: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose header begins with `first`."""
    lines = text[text.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def replayed(interval: str, folder: str = "interval") -> Iterator[dict[str, str]]:
    yield from rows(f"replay/{folder}-{interval}/replay.csv")


def pick(found: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    [row] = [row for row in found if all(row[name] == value for name, value in wanted.items())]
    return row


def test_a_number_agrees_with_what_it_was_rounded_from() -> None:
    assert agrees("0.57", 0.5664)
    assert not agrees("0.56", 0.5664)
    assert agrees("1.4e-6", 1.449e-6)
    assert not agrees("1.4e-6", 1.46e-6)
    assert agrees("3.46e+04", 34_551.0)
    assert not agrees("1e-7", 2e-7)


def test_the_table_of_models_trained_for_their_cache() -> None:
    found, sampled = rows("training/gkv.csv"), rows("training/gkv-sampled.csv")
    page = table(section(TRAINING, "### With the built-in model"), "model")
    assert [row["model"] for row in page] == list(MODELS)
    largest = 0.0
    for row in page:
        model = MODELS[row["model"]]
        for column, text in row.items():
            if column == "model":
                continue
            if column.startswith("96, sampled"):
                cell = pick(sampled, model=model, budget="96", temperature="0.6")
            elif column == "full":
                cell = pick(found, model=model, task="chain", method="full")
            else:
                cell = pick(found, model=model, task="chain", method="gkv", budget=column)
            assert agrees(text, cell["exact"]), (model, column)
            largest = max(largest, float(cell["exact_se"]))
    assert agrees(re.findall(r"standard errors at most (\S+)\)", TRAINING)[-1], largest)


def test_differences_of_these_models() -> None:
    """Every `difference ± error` of the section is one of the CSV files'."""
    text = section(TRAINING, "### With the built-in model")
    pairs = [
        (float(row[f"{figure}_diff"]), float(row[f"{figure}_diff_se"]))
        for file in ("gkv", "gkv-sampled")
        for row in rows(f"training/{file}.csv")
        for figure in ("exact", "partial")
        if row.get(f"{figure}_diff")
    ]
    written = re.findall(rf"({NUMBER}) ± ({NUMBER})", text)
    assert len(written) >= 14
    for difference, error in written:
        # The page says "loses 0.008" for -0.008.
        assert any((agrees(difference, d) or agrees(difference, -d)) and agrees(error, e) for d, e in pairs), (
            f"{difference} ± {error}"
        )
    for row in rows("training/gkv.csv"):  # what the text says of all budgets
        if row["model"] == "distilled" and row["method"] == "gkv":
            assert float(row["exact_diff"]) > 2 * float(row["exact_diff_se"])
            assert (float(row["partial_diff"]) > 0) is (row["budget"] != "64")


@pytest.mark.parametrize("column", ["both stages", "best untrained one that bounds the cache", "`random`", "oracle"])
def test_the_table_of_the_scorer(column) -> None:
    """At the budgets of the stored replay; it has no row of the supervised scorer and of 48."""
    found, names = list(replayed("32")), {"both stages": "foresightkv", "`random`": "random", "oracle": "golden"}
    for row in table(section(TRAINING, "## ForesightKV"), "task"):
        if row["budget"] == "48":
            continue
        numbers, named = re.findall(NUMBER, re.sub(r"`[^`]*`", "", row[column])), re.findall(r"`([^`]*)`", row[column])
        for method in named or [names[column]]:
            cell = pick(found, task=row["task"], budget=row["budget"], method=method)
            for number, figure in zip(numbers, ("loss_increase", "loss_increase_se")):
                assert agrees(number, cell[figure]), (row["task"], row["budget"], method)


def test_the_table_of_gates() -> None:
    found, checked = list(replayed("32")), 0
    for row in table(section(TRAINING, "## Retention gates"), "task"):
        for column in ("`retention`", "`trimkv`", "best rule", "`golden`"):
            method = re.findall(r"`(\w+)`", row[column] if column == "best rule" else column)[0]
            cells = [c for c in found if (c["task"], c["budget"], c["method"]) == (row["task"], row["budget"], method)]
            numbers = re.findall(NUMBER, row[column].rpartition("`")[2])
            for cell in cells:
                checked += 1
                for number, figure in zip(numbers, ("loss_increase", "loss_increase_se")):
                    assert agrees(number, cell[figure]), (row, column)
    assert checked == 16


def bounded(row: dict[str, str]) -> bool:
    return row["decode_bounded"] == "True"


def best(found: list[dict[str, str]]) -> dict[str, str]:
    return min(found, key=lambda row: float(row["loss_ratio"]))


@pytest.mark.parametrize("line", table(REPLAY, "interval"), ids=lambda r: f"{r['interval']}-{r['task']}-{r['budget']}")
def test_the_table_of_the_oracle(line) -> None:
    def cells(folder: str = "interval") -> list[dict[str, str]]:
        mine = (line["task"], line["budget"])
        return [row for row in replayed(line["interval"], folder) if (row["task"], row["budget"]) == mine]

    def same(text: str, cell: dict[str, str]) -> None:
        ratio, error = re.findall(NUMBER, re.sub(r"`[^`]*`", "", text).partition("(")[0])
        assert agrees(ratio, cell["loss_ratio"])
        assert agrees(error, cell["loss_ratio_se"])

    ours = [row for row in cells() if row["method"] != "random" and row["oracle"] == "False"]
    trained = {name for name, cls in methods.items() if cls.trained}
    golden = pick(cells(), method="golden")
    same(line["`golden`"], golden)
    same(line["`within=mean`"], pick(cells("within-mean"), method="golden(within=mean)"))
    assert agrees(line["entries of `golden`"], golden["entries_mean"])
    for column, group in (
        ("best rule that bounds the cache", [r for r in ours if bounded(r) and r["method"] not in trained]),
        ("best trained one that does", [r for r in ours if bounded(r) and r["method"] in trained]),
        ("best prompt-only (entries)", [r for r in ours if not bounded(r)]),
    ):
        text = line[column]
        if not text.startswith("no "):
            name = re.findall(r"`([^`]*)`", text)[0]
            assert best(group)["method"] == name, column
            same(text, best(group))
            if entries := re.findall(r"\((\d+)\)", text):
                assert agrees(entries[0], best(group)["entries_mean"])


def test_what_the_page_says_of_oracles_with_a_shared_budget() -> None:
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows("replay/oracles.csv"):
        key = row["interval"], row["task"], row["budget"]
        cells.setdefault(key, {})[row["oracle"]] = float(row["loss_increase"])
    gains = [cell["head"] - cell["model, heads weighted"] for cell in cells.values()]
    over = [cell["model, heads weighted"] - cell["retention"] for cell in cells.values()]
    text = " ".join(REPLAY.split())
    said = re.findall(
        rf"better than `golden` in (\w+) of the eight cells, by ({NUMBER}) to ({NUMBER}) nats, and loses less than "
        rf"`retention` in (\w+); in the other (\w+) `retention` is better by at most ({NUMBER})",
        text,
    )
    better, least, most, fewer, other, worst = said[0]
    words = {"three": 3, "five": 5, "seven": 7}
    assert (len(gains), sum(g > 0 for g in gains)) == (8, words[better])
    assert agrees(least, min(g for g in gains if g > 0))
    assert agrees(most, max(gains))
    assert (sum(d < 0 for d in over), sum(d > 0 for d in over)) == (words[fewer], words[other])
    assert agrees(worst, max(over))


def test_the_table_of_held_out_figures_with_all_weights_and_an_adapter() -> None:
    found = rows("training/gkv-held-out.csv")
    page = table(section(TRAINING, "### All weights, bfloat16, and an adapter"), "trained")
    assert len(page) == len({(row["trained"], row["precision"], row["lr"]) for row in found})
    for row in page:
        own = [r for r in found if all(r[key] == row[key] for key in ("trained", "precision"))]
        own = [r for r in own if float(r["lr"]) == float(row["rate"])]
        assert row["numbers"].replace(",", "") == own[0]["numbers"]
        for step in (column for column in row if column.isdigit()):
            assert agrees(row[step], pick(own, step=step)["accuracy"]), (row, step)
        assert agrees(row["full"], own[-1]["full_accuracy"])
        assert float(own[-1]["accuracy"]) > float(own[0]["accuracy"]) + 0.1  # training improves the held-out figure
