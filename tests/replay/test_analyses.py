"""Every analysis against a slow computation of its definition or against sets known by hand, and as a user runs it."""

from __future__ import annotations

import html
import html.parser
import json
import math
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
import torch
from support.analyses import BUDGET, INTERVAL, STREAMING, dense, found, held_by_streaming, mean, most_attended
from support.hostile import HOSTILE
from support.models import build
from support.traces import traces

from kvbench.config.run_config import MethodChoice
from kvbench.errors import UserError
from kvbench.eviction.choose import make
from kvbench.replay import correctness
from kvbench.replay import read_analyses as study_module
from kvbench.replay.analyses import api
from kvbench.replay.analyses.api import Study, analyses, choose, top_mass
from kvbench.replay.analyses.overlap import ANCHORS
from kvbench.replay.analyses.tally import Tally
from kvbench.replay.choices import FLOOR, FULL, ORACLE, Chosen
from kvbench.replay.read_analyses import read
from kvbench.report.plots import svg
from kvbench.store.schema import as_stored


def test_attended_tokens_are_the_fewest_that_carry_the_mass():
    paid = torch.tensor([[0.05, 0.5, 0.0, 0.3, 0.15], [0.2, 0.2, 0.2, 0.2, 0.2], [1.0, 0.0, 0.0, 0.0, 0.0]])
    assert top_mass(paid).int().tolist() == [[0, 1, 0, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert [sorted(most_attended(row)) for row in paid.tolist()] == [[1, 3, 4], [0, 1, 2, 3, 4], [0]]


def test_overlap_of_windows():
    """59 queries are three whole windows: two pairs 16 tokens apart, one pair 32 apart."""
    loaded, asked = build("qwen3"), traces([(45, 60), (30, 60)])
    wanted = defaultdict(list)
    for trace in asked:
        start = len(trace.prompt)
        for layer, weights in dense(loaded, trace).items():
            for head in range(2):
                of = []
                for first in (start, start + 16, start + 32):
                    paid = weights[2 * head : 2 * head + 2, first : first + 16, :first].mean(dim=(0, 1)).tolist()
                    of.append((first, paid, most_attended(paid)))
                for (first, _, before), (_, paid, now), distance in ((*of[:2], 16), (*of[1:], 16), (*of[::2], 32)):
                    figures = (
                        len(before & now) / len(before),
                        sum(j < first for j in now) / first,
                        sum(paid[j] for j in before) / sum(paid[:first]),
                    )
                    wanted[layer, distance].append(figures)
    rows = {(row["layer"], row["distance"]): row for row in found(loaded, asked, "overlap")}
    assert rows.keys() == wanted.keys()
    for key, row in rows.items():
        for name, values in zip(("overlap", "chance", "mass"), zip(*wanted[key])):
            assert row[name] == pytest.approx(mean(values), abs=1e-4)
        assert row["pairs"] == len(wanted[key]) / 2  # two heads


def test_overlap_of_long_answers_compares_some_windows_only():
    loaded, [trace] = build("qwen3"), traces([(20, 16 * (ANCHORS + 8) + 1)], seed=5)
    loaded.model.config.max_position_embeddings = 2048
    study = Study(task="t", traces=[trace], interval=INTERVAL)
    [analysis] = [kind(study) for kind in choose(["overlap"])]
    read(loaded, study, [analysis], [], max_tokens=2048)
    assert all(len(anchors) == 20 for anchors in analysis._anchors.values())  # every second of 40
    assert max(row["distance"] for row in analysis.rows()) == 1024


def test_sparsity_of_every_head():
    loaded, asked = build("qwen3"), traces([(45, 30), (30, 24)])
    wanted, queries = defaultdict(lambda: [0.0] * 5), 0
    for trace in asked:
        queries += len(trace.answer) - 1
        for layer, weights in dense(loaded, trace).items():
            for head in range(4):
                for i in range(len(trace.prompt), weights.shape[1]):
                    row = sorted(weights[head, i, : i + 1].tolist(), reverse=True)
                    for place, share in enumerate((0.9, 0.95, 0.99)):
                        carried = (k for k in range(1, len(row) + 1) if sum(row[:k]) >= share - 1e-7)
                        wanted[layer, head][place] += next(carried)
                    wanted[layer, head][3] += sum(w >= 0.01 * row[0] for w in row) / len(row)
                    wanted[layer, head][4] += len(row)
    rows = found(loaded, asked, "sparsity")
    assert len(rows) == 3 * 4
    for row in rows:
        names = ("entries_90", "entries_95", "entries_99", "above", "tokens")
        values = [value / queries for value in wanted[row["layer"], row["head"]]]
        assert [row[name] for name in names] == pytest.approx(values, abs=2e-3)


def slow_shares(weights, start):
    """sink, local, stripe, retrieval, dispersed of one head [T, T]."""
    total = weights.shape[0]
    sink = local = own = far_mass = 0.0
    columns = [0.0] * total
    for i in range(start, total):
        row = weights[i, : i + 1].tolist()
        far = {j: w for j, w in enumerate(row) if j >= 4 and i - j >= 16}
        sink += sum(row[:4])
        local += sum(w for j, w in enumerate(row) if j >= 4 and i - j < 16)
        own += sum(sorted(far.values(), reverse=True)[:4])
        far_mass += sum(far.values())
        for j, w in far.items():
            columns[j] += w
    stripe = sum(sorted(columns, reverse=True)[:4])
    return [part / (total - start) for part in (sink, local, stripe, own - stripe, far_mass - own)]


def test_patterns_of_every_head():
    """The last window has eleven queries, and counts."""
    loaded, asked = build("qwen3"), traces([(45, 60), (24, 60)])
    names = ("sink", "local", "stripe", "retrieval", "dispersed")
    rows = {(row["layer"], row["head"]): row for row in found(loaded, asked, "patterns")}
    attention = [dense(loaded, trace) for trace in asked]
    for (layer, head), row in rows.items():
        each = [slow_shares(of[layer][head], len(t.prompt)) for of, t in zip(attention, asked)]
        values = [mean(parts) for parts in zip(*each)]
        assert [row[name] for name in names] == pytest.approx(values, abs=1e-5)
        assert sum(row[name] for name in names) == pytest.approx(1)
        assert row["kind"] == names[values.index(max(values))]
        assert row["answers"] == mean([names[parts.index(max(parts))] == row["kind"] for parts in each])
    assert len(rows) == 12


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("sink", lambda i: 1),
        ("local", lambda i: i - 3),
        ("stripe", lambda i: 11),
        ("retrieval", lambda i: 5 + (i * 7) % 23),
        ("dispersed", None),
    ],
)
def test_what_each_kind_of_head_is(kind, place):
    """Heads drawn by hand: all attention on one token, or spread evenly over the far ones."""
    study = Study(task="t", traces=traces([(48, 33)]), interval=INTERVAL)
    [patterns] = [k(study) for k in choose(["patterns"])]
    for index in range(2):
        first = 48 + 16 * index
        weights = torch.zeros(1, 1, 16, first + 16)
        for q in range(16):
            i = first + q
            weights[0, 0, q, slice(4, i - 15) if place is None else place(i)] = 1.0
        weights /= weights.sum(dim=-1, keepdim=True)
        patterns.window(api.Window(layer=0, traces=[0], index=index, count=2, first=first, weights=weights, kv_heads=1))
    [row] = patterns.rows()
    assert row["kind"] == kind
    assert row[kind] > 0.7


def test_batches_that_do_not_fit_are_read_in_parts(monkeypatch):
    loaded, asked = build("qwen3"), traces([(30, 34)] * 3)
    whole = {name: found(loaded, asked, name) for name in ("overlap", "sparsity", "patterns")}
    monkeypatch.setattr(study_module, "SCRATCH_FLOATS", 1)
    for name, rows in whole.items():
        for row, other in zip(rows, found(loaded, asked, name), strict=True):
            assert row == pytest.approx(other, abs=1e-6)


def test_density_of_what_streaming_keeps():
    """Blocks begin at 45, 53 and 61 tokens; 66 are read at the end, five of them since the last eviction."""
    loaded, asked = build("qwen3"), traces([(45, 22)])
    rows = [r for r in found(loaded, asked, "density", STREAMING) if r["method"] == "streaming-llm"]
    moments = {"evictions": [(s, held_by_streaming(s)) for s in (45, 53, 61)]}
    moments["end"] = [(66, held_by_streaming(61) | set(range(61, 66)))]
    assert [row["when"] for row in rows] == ["evictions"] * 20 + ["end"] * 20
    for row in rows:
        of = moments[row["when"]]
        inside = [[j for j in range(seen) if j * 20 // seen == round(row["low"] * 20)] for seen, _ in of]
        kept = [[j for j in bins if j in held] for bins, (_, held) in zip(inside, of)]
        assert row["kept"] == pytest.approx(sum(map(len, kept)) / sum(map(len, inside)))
        share = sum(len(k) / len(held) for k, (_, held) in zip(kept, of))
        uniform = sum(len(bins) / seen for bins, (seen, _) in zip(inside, of))
        assert row["density"] == pytest.approx(share / uniform)


def test_density_of_the_full_cache_is_even():
    rows = found(build("qwen3"), traces([(45, 22), (30, 9)]), "density", FULL)
    assert {(row["kept"], round(row["density"], 6)) for row in rows} == {(1.0, 1.0)}


def test_survival_under_streaming():
    loaded, [trace] = build("qwen3"), traces([(45, 22)])
    rows = found(loaded, [trace], "survival", STREAMING)
    ages = [(1, 16), (17, 32), (33, 64)]
    survived, total, found_mass, all_mass = (defaultdict(float) for _ in range(4))
    for layer, weights in dense(loaded, trace).items():
        for head in range(2):
            for seen, end in ((45, 53), (53, 61), (61, 66)):
                paid = weights[2 * head : 2 * head + 2, seen:end, :seen].sum(dim=(0, 1)).tolist()
                attended, held = most_attended(paid), held_by_streaming(seen)
                for low, high in ages:
                    for token in range(max(0, seen - high), seen - low + 1):
                        for key in ((high, layer, head), (high, None, None)):
                            total[key] += token in attended
                            survived[key] += token in attended & held
                            all_mass[key] += paid[token]
                            found_mass[key] += paid[token] * (token in held)
    for row in rows:
        key = (row["age"], row["layer"], row["head"])
        assert row["attended"] == total[key]
        assert row["share"] == pytest.approx(survived[key] / total[key]) if total[key] else row["share"] is None
        assert row["mass"] == pytest.approx(found_mass[key] / all_mass[key], abs=1e-5)
    assert len(rows) == 3 * (1 + 3 * 2)
    assert {row["share"] for row in rows if row["age"] == 16} == {1.0}  # all of the newest 20 are held


def test_survival_under_the_full_cache_and_the_oracle():
    chosen = [Chosen(method=m, budget=BUDGET) for m in (ORACLE, FLOOR)]
    rows = found(build("qwen3"), traces([(45, 40)] * 2), "survival", *chosen, FULL)
    by_method = defaultdict(list)
    for row in rows:
        if row["layer"] is None:
            by_method[row["method"]].append(row)
    assert {row["share"] for row in by_method["full"]} == {1.0}
    lost = {name: sum(r["attended"] * (1 - r["share"]) for r in of) for name, of in by_method.items()}
    assert 0 < lost["golden"] < lost["random"]


def test_retention_ratio_counts_right_answers_only():
    """24 right after the last eviction at 61 or 43 tokens, and what was read since."""
    loaded, asked = build("qwen3"), traces([(45, 22), (35, 10), (45, 22), (45, 22)])
    right = {("0", 0): True, ("1", 0): True, ("2", 0): False}  # question 3 has no score
    [row] = found(loaded, asked, "retention-ratio", STREAMING, right=right)
    assert (row["answers"], row["right"]) == (3, 2)
    assert row["ratio"] == pytest.approx(mean([(24 + 5) / 66, (24 + 1) / 44]))
    assert row["script"] == pytest.approx(mean([24 / 67, 24 / 45]))
    assert row["ratio_se"] == pytest.approx(abs((24 + 5) / 66 - (24 + 1) / 44) / 2)
    [row] = found(loaded, asked, "retention-ratio", STREAMING)
    assert (row["answers"], row["right"], row["ratio"], row["script"]) == (0, 0, None, None)
    [row] = found(loaded, asked, "retention-ratio", FULL, right=right)
    assert (row["ratio"], row["script"]) == (1.0, 1.0)


def test_states_of_tokens_under_streaming():
    loaded, asked = build("qwen3"), traces([(45, 22), (45, 22)])
    rows = found(loaded, asked, "tokens", STREAMING, text=lambda token: f"<{token}>")
    views = defaultdict(list)
    for row in rows:
        views[row["seen"]].append(row)
    assert list(views) == [45, 53, 61, 66]
    for seen, view in views.items():
        held = held_by_streaming(seen) if seen < 66 else held_by_streaming(61) | set(range(61, 66))
        wanted = ["dropped" if j not in held else "recent" if j >= seen - 16 else "kept" for j in range(seen)]
        assert [row["state"] for row in view] == wanted
        assert [row["held"] for row in view] == [float(j in held) for j in range(seen)]
        assert [row["token"] for row in view] == [*asked[0].prompt, *asked[0].answer][:seen]
        assert [row["part"] for row in view] == ["prompt"] * 45 + ["answer"] * (seen - 45)
        assert {row["text"] for row in view} == {f"<{t}>" for t in [*asked[0].prompt, *asked[0].answer][:seen]}


def test_shown_evictions_are_spread_and_few():
    rows = found(build("qwen3"), traces([(20, 90)]), "tokens", STREAMING)
    # Blocks begin at 20 tokens, which fit, and eleven times with too many: 28, 36, ..., 108.
    assert list(dict.fromkeys(row["seen"] for row in rows)) == [28, 52, 84, 109]


class Elements(html.parser.HTMLParser):
    """Every tag with its attributes, and all text in the body."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, sorted(name for name, _ in attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("hostile", HOSTILE)
def test_token_text_stays_text(hostile):
    """As token text, and as the name of a task or a question."""
    loaded, [trace] = build("qwen3"), traces([(45, 4)])
    rows = found(loaded, [trace], "tokens", STREAMING, text=lambda token: hostile)
    for row in rows:
        row["doc_id"] = row["task"] = hostile
    page = analyses()["tokens"].pages(rows)["tokens.html"]
    tags = Elements(page).tags
    known = {("span", ("class", "style")), ("span", ("class",)), ("p", ()), ("h1", ()), ("h2", ()), ("h3", ())}
    known |= {("html", ("lang",)), ("head", ()), ("meta", ("charset",)), ("meta", ("content", "http-equiv"))}
    known |= {("title", ()), ("style", ()), ("body", ())}
    assert {(tag, tuple(attributes)) for tag, attributes in tags} == known
    assert not set(page) & set("\x1b\x07\u202e\u2066\u2069\u2028\r\t")
    if hostile.isprintable():
        assert hostile in Elements(page).text
    assert "default-src 'none'" in page


def test_errors_of_a_mean_are_those_of_a_mean():
    """Questions 0 and 1 have two samples each; the third has nothing under this key."""
    asked = traces([(4, 4)] * 5)
    asked = [type(t)(request=t.request, cluster=c) for t, c in zip(asked, "aabbc")]
    tally = Tally(Study(task="t", traces=asked, interval=1))
    tally.add(("k",), [0, 1, 2, 3], value=torch.tensor([1.0, 2.0, 4.0, 5.0]), count=1.0)
    [(_, figures)] = tally.figures(value=("value", "count"))
    assert figures == {"value": 3.0, "value_se": pytest.approx(abs(1.5 - 4.5) / 2)}
    tally.add(("one",), [4], value=1.0, count=2.0)
    assert dict(tally.figures(value=("value", "count")))[("one",)] == {"value": 0.5, "value_se": None}


def test_a_new_file_is_a_new_analysis(tmp_path, monkeypatch):
    text = Path(analyses.__code__.co_filename).parent.joinpath("sparsity.py").read_text()
    (tmp_path / "fresh.py").write_text(text.replace('@register("sparsity")', '@register("fresh")'))
    package = __import__("kvbench.replay.analyses", fromlist=["analyses"])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(api, "_known", dict(api._known))
    assert "fresh" in analyses()
    assert choose(["Fresh", "sparsity", "fresh"]) == [analyses()["fresh"], analyses()["sparsity"]]


def test_layers_that_never_evict_are_left_out():
    loaded, asked = build("gemma2"), traces([(45, 40)])
    for name in ("overlap", "sparsity", "patterns"):
        assert {row["layer"] for row in found(loaded, asked, name)} == {0, 2}
    assert {row["layer"] for row in found(loaded, asked, "survival", STREAMING)} == {None, 0, 2}


@pytest.mark.parametrize(
    ("method", "options", "copies"),
    [
        ("kvzip", (), 1),  # reads prompts one by one
        ("ada-kv", (("base", "snapkv(window=8)"),), 1),  # heads of unequal size
        ("snapkv", (("heads", "query"), ("window", 8)), 2),  # caches for both query heads of a KV head
    ],
)
def test_every_kind_of_cache_is_counted_whole(method, options, copies):
    """All keep 24 entries of the prompt for a KV head on average, and every token after it in each of its caches."""
    loaded, asked = build("qwen3"), traces([(45, 22)] * 2)
    chosen = Chosen(method=MethodChoice(name=method, options=options), budget=BUDGET)
    right = {("0", 0): True, ("1", 0): True}
    [row] = found(loaded, asked, "retention-ratio", chosen, right=right)
    assert row["ratio"] == pytest.approx((24 + 21 * copies) / 66)
    rows = [r for r in found(loaded, asked, "density", chosen) if r["when"] == "end"]
    tokens = [sum(j * 20 // 66 == i for j in range(66)) for i in range(20)]
    assert sum(r["kept"] * n for r, n in zip(rows, tokens)) == pytest.approx(24 / copies + 21)


@pytest.mark.parametrize("name", analyses())
def test_nothing_found_is_shown_as_nothing(name):
    """Answers of one token have no windows and no blocks."""
    loaded, asked = build("qwen3"), traces([(20, 1)] * 2)
    rows = found(loaded, asked, name, STREAMING) if name not in ("tokens", "retention-ratio", "losses") else []
    assert rows == []
    kind = analyses()[name]
    assert kind.table(rows)[1] == []
    assert kind.figures(rows) == []
    assert kind.plotted == (not kind.pages(rows))


def test_a_window_that_pays_nothing_to_old_tokens_is_no_pair():
    """Head 0 of window 1 looks at itself alone."""
    study = Study(task="t", traces=traces([(20, 33)]), interval=INTERVAL)
    [overlap] = [k(study) for k in choose(["overlap"])]
    for index, first in enumerate((20, 36)):
        weights = torch.zeros(1, 2, 16, first + 16)
        weights[0, :, :, 3] = 1.0
        if index:
            weights[0, 0] = torch.eye(16, first + 16).roll(first, dims=1)
        overlap.window(api.Window(layer=0, traces=[0], index=index, count=2, first=first, weights=weights, kv_heads=2))
    [row] = overlap.rows()
    assert (row["overlap"], row["mass"], row["pairs"], row["distance"]) == (1.0, 1.0, 1, 16)


def test_an_unknown_name_is_told():
    with pytest.raises(
        UserError, match=r"unknown analysis 'sparsty'. Did you mean 'sparsity'\? Known: cache-sparsity, density, "
    ):
        choose(["sparsty"])


SMALL = "--task walk/orbit-100 --limit 2 --interval 16"
METHODS = "--method gkv,streaming-llm --budget 48"
SESSION = {
    "attention": "replay --analysis overlap,patterns,persistence,union,maps --analysis sparsity --task walk/orbit-100 "
    "--limit 2 --out one --json",
    "methods": "replay --analysis density,survival,tokens,retention-ratio,losses,cache-sparsity "
    f"{METHODS} {SMALL} --out two --json",
    "again": f"replay --analysis density,tokens,retention-ratio {METHODS} {SMALL} --out three -q --json",
    "full": f"replay --analysis sparsity,density --method full {SMALL} -q --json",
    "sample": f"replay --analysis tokens {METHODS} {SMALL} --sample orbit-100-1000000001 -q --json",
    "run": "run --method full,streaming-llm --budget 48 --interval 16 --task walk/orbit-100 --limit 3 --run-name r1 -q",
    "of a run": f"replay --analysis retention-ratio,overlap --run r1 {METHODS} --interval 16 --limit 2 -q --json",
    "sample of a run": f"replay --analysis tokens --run r1 {METHODS} --sample orbit-100-1000000002 -q --json",
    "help": "replay --help",
}
REFUSED = {
    "unknown": ("replay --analysis overlp --task walk", "unknown analysis 'overlp'. Did you mean 'overlap'?"),
    "empty": ("replay --analysis overlap, --task walk", "--analysis has an empty item at position 2"),
    "method": (
        "replay --analysis overlap,sparsity --method gkv --task walk",
        "--method cannot be given with --analysis overlap,sparsity, which uses the full cache only.",
    ),
    "budget": ("replay --analysis patterns --budget 32 --task walk", "--budget cannot be given with --analysis"),
    "option": ("replay --analysis patterns --method-opt gkv.window=8 --task walk", "--method-opt cannot be given"),
    "interval": ("replay --analysis patterns --interval 8 --task walk", "--interval cannot be given with --analysis"),
    "no method": ("replay --analysis survival --budget 32 --task walk", "--method is missing."),
    "no task": ("replay --analysis overlap", "--task is missing."),
    "sample alone": ("replay --method gkv --budget 32 --task walk --sample 3", "--sample is given without --analysis."),
    "no sample": (
        "replay --analysis overlap --task walk --limit 2 --sample 3",
        "--sample '3': no question of the tasks has this id; a larger --limit takes more questions.",
    ),
    "judged": (
        "replay --analysis retention-ratio --method gkv --budget 32 --task mt_bench --limit 1",
        "task 'mt_bench' needs a judge or a program to score its answers",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("analyses")


@pytest.fixture(scope="module")
def session(folder, calls):
    lines = [*SESSION.values(), *(line for line, _ in REFUSED.values())]
    return dict(zip([*SESSION, *REFUSED], calls(folder, [(line.split(), {}) for line in lines])))


def document(result):
    assert result.code == 0, result.err
    return json.loads(result.out.splitlines()[-1])


def test_help_names_every_analysis(session):
    text = " ".join(session["help"].out.split())
    for name, kind in analyses().items():
        assert f"{name}: {kind.about}" in text
        assert len(f"   {name}: {kind.about}") <= 80


@pytest.mark.parametrize("name", analyses())
def test_tables_plots_and_document(session, folder, name):
    kind = analyses()[name]
    asked, out = ("attention", "one") if issubclass(kind, api.AttentionAnalysis) else ("methods", "two")
    rows = document(session[asked])["analyses"][name]
    path = folder / out / f"{name}.{kind.file}"
    table = pd.read_csv(path) if kind.file == "csv" else pd.read_parquet(path)
    assert len(table) == len(rows) > 0
    assert list(table) == list(rows[0])
    for column in table.select_dtypes("number"):
        wanted = [math.nan if row[column] is None else float(row[column]) for row in rows]
        assert table[column].astype(float).tolist() == pytest.approx(wanted, nan_ok=True)
    figures = kind.figures(rows)
    assert kind.plotted == bool(figures)
    for figure in figures:
        assert (folder / out / f"{figure.name}.svg").read_text() == svg(figure)
        assert (folder / out / f"{figure.name}.pdf").read_bytes().startswith(b"%PDF")
    for page in kind.pages(rows):
        assert "<html" in (folder / out / page).read_text()
    assert f"{name}: {kind.about}" in session[asked].out
    assert {row["task"] for row in rows} == {"walk/orbit-100"}


def test_what_stands_in_the_folder(session, folder):
    kept, whole = json.loads((folder / "two" / "analyses.json").read_text()), document(session["methods"])
    assert kept == {key: value for key, value in whole.items() if key != "analyses"}
    assert (kept["model"], kept["settings"]["interval"]) == ("tiny", 16)


def test_the_same_command_gives_the_same_files(session, folder):
    rows, others = (document(session[name])["analyses"] for name in ("again", "methods"))
    assert rows == {name: others[name] for name in ("density", "tokens", "retention-ratio")}
    assert len(session["again"].out.splitlines()) == 1
    written = {path.name for path in (folder / "three").iterdir()}
    assert written >= {"density.svg", "density.csv", "tokens.html", "tokens.parquet", "retention-ratio.svg"}
    assert {name[:-4] for name in written if name.endswith(".txt")} == {n[:-4] for n in written if n.endswith(".pdf")}
    for name in written - {"analyses.json"}:  # it names all analyses of the command
        assert (folder / "two" / name).read_bytes() == (folder / "three" / name).read_bytes()


def test_methods_stand_beside_the_yardsticks(session):
    rows = document(session["methods"])["analyses"]["survival"]
    assert {row["method"] for row in rows} == {"golden", "random", "gkv", "streaming-llm"}
    assert {row["budget"] for row in rows} == {48}
    assert {row["method"] for row in document(session["full"])["analyses"]["density"]} == {"full"}


def test_attention_does_not_depend_on_methods(session):
    assert document(session["full"])["analyses"]["sparsity"] == document(session["attention"])["analyses"]["sparsity"]


def test_answers_of_a_run_with_their_scores(session):
    here, there = document(session["methods"])["analyses"], document(session["of a run"])["analyses"]
    assert [row["right"] for row in there["retention-ratio"]] == [row["right"] for row in here["retention-ratio"]]
    assert {row["answers"] for row in there["retention-ratio"]} == {2}
    assert there["overlap"]


def test_each_method_s_own_right_answers(session, folder):
    """The figure of the released script, from the rows of the run."""
    assert {row["own_answers"] for row in document(session["methods"])["analyses"]["retention-ratio"]} == {0}
    found = document(session["of a run"])["analyses"]["retention-ratio"]
    rows = pd.read_parquet(folder / "results" / "r1" / "rows.parquet")
    rows = rows[rows["method"] == "streaming-llm"]
    right = rows[rows["score"] == 1]
    script = [min(1, 48 / (r.prompt_tokens + r.output_tokens)) for r in right.itertuples()]
    for row in found:
        if row["method"] == "streaming-llm":
            assert (row["own_answers"], row["own_right"]) == (3, len(right))
            assert row["own"] == (pytest.approx(mean(script)) if script else None)
        else:
            assert (row["own_answers"], row["own"]) == (0, None)


def test_own_ratios_are_read_by_method_options_and_budget(tmp_path, monkeypatch):
    lines = [
        {"task": "t", "status": "ok", "method": method, "options": as_stored("options", options), "budget": budget}
        | {"budget_share": share, "prompt_tokens": 30, "output_tokens": 70, "cluster_id": str(i), "score": score}
        | {"interval": interval}
        for i, (method, options, budget, share, score, interval) in enumerate(
            [
                ("full", {}, None, None, 1.0, None),
                ("streaming-llm", {"sinks": 4}, 24, None, 1.0, 8),
                ("streaming-llm", {"sinks": 4}, 24, None, 0.0, 8),
                ("streaming-llm", {"sinks": 2}, 24, None, 1.0, 8),
                ("streaming-llm", {"sinks": 4}, 48, None, 1.0, 8),
                ("streaming-llm", {"sinks": 4}, 15, 0.5, 1.0, 8),
                ("streaming-llm", {"sinks": 4}, 24, 0.25, 1.0, 8),
                ("streaming-llm", {"sinks": 4}, 24, None, 1.0, 16),
            ]
        )
    ]
    kinds = {"budget": "Int32", "interval": "Int32"}  # as `read_rows` has them
    monkeypatch.setattr(correctness, "read_rows", lambda folder: pd.DataFrame(lines).astype(kinds))
    share = Chosen(method=MethodChoice(name="streaming-llm"), budget=0.5)
    other = Chosen(method=MethodChoice(name="gkv"), budget=24)
    own = correctness.own_ratios(tmp_path, "t", [FULL, STREAMING, share, other], 8)
    assert own == {FULL: [("0", 1.0)], STREAMING: [("1", 0.24), ("2", None)], share: [("5", 0.15)]}
    [row] = found(build("qwen3"), traces([(45, 22)]), "retention-ratio", STREAMING, own=own)
    assert (row["own_answers"], row["own_right"], row["own"], row["own_se"]) == (2, 1, 0.24, None)


def test_own_ratios_of_a_method_whose_option_is_a_file_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    scorer = str(tmp_path / "foresightkv.safetensors")
    options = as_stored("options", make("foresightkv", {"scorer": scorer}).options())
    assert str(tmp_path) not in options
    line = {
        "task": "t",
        "status": "ok",
        "method": "foresightkv",
        "options": options,
        "budget": 24,
        "budget_share": None,
    }
    line |= {"prompt_tokens": 30, "output_tokens": 70, "cluster_id": "0", "score": 1.0, "interval": 8}
    monkeypatch.setattr(correctness, "read_rows", lambda folder: pd.DataFrame([line]))
    chosen = Chosen(method=MethodChoice(name="foresightkv", options=(("scorer", scorer),)), budget=24)
    assert correctness.own_ratios(tmp_path, "t", [chosen], 8) == {chosen: [("0", 0.24)]}


def test_one_question(session):
    for name, question in (("sample", "orbit-100-1000000001"), ("sample of a run", "orbit-100-1000000002")):
        assert {row["doc_id"] for row in document(session[name])["analyses"]["tokens"]} == {question}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(session, case):
    result = session[case]
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert (result.code, len(errors), result.out) == (2, 1, "")
    assert REFUSED[case][1] in errors[0]
