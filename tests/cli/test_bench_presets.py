"""`kvbench bench --preset`: the paper's numbers stand beside ours, in columns of their own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvbench.cli import bench_options
from kvbench.cli.bench_published import OURS, published_rows
from kvbench.cli.commands.bench import bench
from kvbench.errors import KVBenchError
from kvbench.eviction import choose
from kvbench.runner.bench.presets import PRESETS, short
from kvbench.runner.bench.results import Evictions, Measured, Speed
from kvbench.runner.bench.setting import Member, Setting
from kvbench.runner.bench.shapes import SHAPES
from kvbench.sources.published import FILE, published

TINY = dict(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, head_dim=16)
TINY |= dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2)
# Small enough for a CPU; only the first keeps lengths that the paper's table has, once they are multiplied by `scale`.
CALLS = {
    "foresightkv-table3": {"scale": "256", "new_tokens": "32,64", "sequences": "2"},
    "foresightkv-e6": {"scale": "128", "new_tokens": "16", "sequences": "4"},
    "gkv-table2": {"scale": "16", "new_tokens": "12", "sequences": "2"},
    "gkv-table3": {"scale": "16", "new_tokens": "12", "prompt": "140", "interval": "4", "sequences": "2"},
    "lookaheadkv-latency": {"scale": "128", "budget": ["40"], "new_tokens": "5", "repeats": "1"},
}


def asked(**typed: str | list[str] | None) -> bench_options.Asked:
    names = ("method", "budget", "method_opt", "preset", "scale", "baseline", "sequences", "samples", "prompt")
    names += ("new_tokens", "stretch", "interval", "shape", "device", "dtype", "memory", "decode_attn", "threads")
    return bench_options.read(dict.fromkeys((*names, "compile_cpu", "repeats")) | typed)


@pytest.fixture(scope="module")
def documents(request: pytest.FixtureRequest) -> dict[str, tuple[dict, str]]:
    """Each preset's JSON document and printed text, for a tiny shape."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")  # no cell of a table is wrapped
        patch.setitem(SHAPES, "A", ("Qwen3", TINY))
        found = {}
        for name, typed in CALLS.items():
            capture.read_global_capture()
            axes = {"method": None, "budget": None, "method_opt": None}
            bench(preset=name, shape="A", device="cpu", json=True, **(axes | typed))
            text, _ = capture.read_global_capture()
            found[name] = json.loads(text.splitlines()[-1]), text
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_method_runs(documents, name):
    document, text = documents[name]
    preset, rows = PRESETS[name], document["published"]
    assert "Traceback" not in text
    assert {row["system"].partition(" @")[0] for row in rows} == {label for label, *_ in preset.systems}
    assert all(row["failure"] is None for row in document["rows"])
    for column in preset.columns:
        assert any(isinstance(row["ours"][column.head], float | int) for row in rows), column
    assert f"{preset.paper}: {preset.what}" in text
    assert preset.unknown in text
    assert f"divided by {CALLS[name]['scale']}" in text
    assert "ours: shape A with random weights on cpu" in text


@pytest.mark.slow
def test_our_columns_hold_our_figures_beside_the_papers(documents):
    document, text = documents["foresightkv-table3"]
    rows = {(row["system"], row["load"]["new_tokens"]): row for row in document["published"]}
    assert len(rows) == 5 * 2
    for row in document["rows"]:
        figures = rows[row["system"], row["load"]["new_tokens"]]["ours"]
        full = next(r for r in document["rows"] if r["system"] == "full" and r["load"] == row["load"])
        assert figures["tok/s"] == row["warm"]["rate"]
        assert figures["over full"] == pytest.approx(row["warm"]["rate"] / full["warm"]["rate"])
        assert row["random_weights"] == row["system"].startswith("foresightkv")
    assert rows["foresightkv @4", 32]["published"] == {"sequences": "96", "tok/s": "375.1", "over full": "2.69"}
    assert rows["foresightkv @32", 32]["published"]["tok/s"] is None  # the paper has no 8K entries at 8K tokens
    assert rows["foresightkv @32", 64]["published"]["tok/s"] == "114.32"
    assert "foresightkv @4 (random weights)" in text
    assert "Qwen3-4B, one A800 GPU, generation length 8K" in text


def in_paper(name: str, shape: str | None = None, **typed: str) -> list[dict]:
    """The rows of a preset at the paper's own lengths, as if all systems had run, with a rate of 10 and 4 sequences."""
    found = asked(preset=name, shape=shape, **typed)
    setting = Setting(members=tuple(Member(*pair) for pair in found.pairs), **found.values)
    speed = Speed(rate=10.0, low=9.0, high=11.0, decode=None)
    facts = {"fitting": 9, "fresh": speed, "warm": speed, "first_seconds": 2.0, "seconds": 8.0}
    facts["evictions"] = Evictions(count=4, seconds=2.0, share=0.25, us=1.0)
    results = [
        Measured(system=system, load=load, decoded=load.sequences or 4, **facts)
        for load in setting.loads()
        for system in setting.names()
    ]
    return published_rows(found.preset, setting, results, found.scale)


@pytest.mark.parametrize(
    ("name", "shape", "table", "metric", "head", "missing"),
    [
        ("foresightkv-table3", None, "Table 3", "throughput", "tok/s", 1),
        ("foresightkv-table3", None, "Table 3", "max concurrent batch", "sequences", 1),
        ("foresightkv-table3", None, "Table 3", "throughput ratio vs full", "over full", 1),
        ("foresightkv-e6", None, "Appendix E.6", "total time", "total s", 1),
        ("foresightkv-e6", None, "Appendix E.6", "eviction share of time", "evicting %", 0),
        ("gkv-table2", None, "Table 2", "throughput", "tok/s", 0),
        ("gkv-table2", "llama-3.1-8b", "Table 2", "throughput", "tok/s", 0),
        ("gkv-table3", None, "Table 3", "time per compression", "ms per eviction", 0),
        ("gkv-table3", None, "Table 4", "compression share of decode time", "of decoding %", 0),
        ("lookaheadkv-latency", None, "overhead", "overhead of eviction", "over full %", 19),
    ],
)
def test_every_number_of_the_papers_table_stands_in_one_row(name, shape, table, metric, head, missing):
    """Each of the table's numbers once, in the row of its method, budget and load."""
    preset = PRESETS[name]
    model = preset.shapes[shape or next(iter(preset.shapes))]
    with open(FILE, encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["paper"] == preset.paper and line["model"] == model]
    lines = [line for line in lines if (line["table_or_figure"], line["metric"]) == (table, metric)]
    rows = in_paper(name, shape, **({"sequences": "16,32,64"} if shape else {}))
    found = [(row["theirs"], row["load"], row["published"][head]) for row in rows if row["published"][head]]
    assert sorted(value for *_, value in found) == sorted(line["value"] for line in lines)
    assert len(rows) - len(found) == missing
    for theirs, load, value in found:
        [line] = (line for line in lines if _same(line, theirs, load))
        assert line["value"] == value


def _same(line: dict[str, str], theirs: str, load: dict[str, int | None]) -> bool:
    budget = line["budget"].replace("512", "0.5K").replace("1024", "1K").replace("2048", "2K")
    name = line["method"] if budget in ("full", "none") else f"{line['method']} {budget}".replace("0.5K", "512")
    if budget == "none":
        theirs = theirs.rpartition(" ")[0]
    lengths = {f"generation {load['new_tokens'] // 1024}K", f"generate 32K x batch {load['sequences']}"}
    lengths |= {f"time to first token, prompt {load['prompt'] // 1024}K"}
    batch = f"batch {load['sequences']}"
    return name == theirs and (line["task"] in lengths or line["task"].endswith(f", {batch}"))


def test_our_figures_are_those_of_the_measurement():
    assert in_paper("foresightkv-table3")[0]["ours"] == {"sequences": 4, "tok/s": 10.0, "over full": 1.0}
    assert in_paper("foresightkv-e6")[0]["ours"] == {"total s": 8.0, "evicting s": 2.0, "evicting %": 25.0}
    assert in_paper("gkv-table3")[0]["ours"] == {"ms per eviction": 500.0, "of decoding %": 25.0}
    assert in_paper("lookaheadkv-latency")[1]["ours"] == {"first token s": 2.0, "over full %": 0.0}


def test_where_memory_ended_our_column_says_so():
    found = asked(preset="gkv-table2", method=["full"], sequences="32,64")
    setting = Setting(members=tuple(Member(*pair) for pair in found.pairs), **found.values)
    small, large = setting.loads()
    speed = Speed(rate=10.0, low=9.0, high=11.0, decode=None)
    results = [
        Measured(system="full", load=small, decoded=0, fitting=0, failure="out of memory (...)"),
        Measured(system="full", load=large, decoded=32, fitting=40, fresh=speed, warm=speed),
    ]
    rows = published_rows(found.preset, setting, results, 1)
    assert [row["ours"]["tok/s"] for row in rows] == ["OOM", "OOM"]
    assert [row["published"]["tok/s"] for row in rows] == ["62.41", "OOM"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_complete(name):
    preset, found = PRESETS[name], asked(preset=name)
    assert found.values["shape"] in preset.shapes
    assert {column.ours for column in preset.columns} <= set(OURS)
    assert [(m.label, budget) for m, budget in found.pairs] == [
        (label, budget) for label, _, budgets in preset.systems for budget in budgets or (None,)
    ]
    for label, theirs, _ in preset.systems:
        choose.from_label(label)
        assert preset.their_name(label) == theirs
    for column in preset.columns:
        assert preset.numbers(column.table), column
    models = {row.model for column in preset.columns for row in preset.numbers(column.table) if row.model}
    assert set(preset.shapes.values()) <= models


def test_what_is_typed_replaces_a_preset():
    plain = asked(preset="gkv-table2")
    assert (plain.values["sequences"], plain.values["interval"], plain.values["repeats"]) == ((32, 64, 128), 128, 1)
    small = asked(preset="gkv-table2", scale="16", shape="A", sequences="max,2", interval="8")
    assert (small.values["new_tokens"], small.values["interval"], small.values["shape"]) == ((1024,), 8, "A")
    assert small.values["sequences"] == (None, 2)
    assert [budget for _, budget in small.pairs] == [None, 128, 32, 64, 128]
    budgets = asked(preset="gkv-table3", budget=["99"])
    assert [m.label for m, _ in budgets.pairs] == ["gkv(form=local)", "gkv"]
    assert [budget for _, budget in budgets.pairs] == [99, 99]
    methods = asked(preset="gkv-table2", method=["tova"], scale="4")
    assert [(m.name, budget) for m, budget in methods.pairs] == [("tova", 512), ("tova", 128), ("tova", 256)]
    option = asked(preset="foresightkv-table3", method_opt=["foresightkv.sampling=false"], budget=["64"])
    assert [m.label for m, _ in option.pairs] == ["full", "foresightkv(sampling=False)"]
    added = asked(preset="gkv-table3", method_opt=["alpha=0.5"], budget=["64"])
    assert [m.label for m, _ in added.pairs] == ["gkv(alpha=0.5, form=local)", "gkv(alpha=0.5)"]
    assert asked(memory="0.5").values["memory"] == 1 << 29


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"preset": "table3"}, "--preset 'table3': choose foresightkv-table3"),
        ({"scale": "4"}, "--scale divides the numbers of tokens of a preset. Give a --preset too"),
        ({"preset": "gkv-table2", "scale": "0"}, "--scale must be 1 or more; got 0."),
        ({"preset": "gkv-table2", "scale": "64"}, "--budget must be at least"),
        ({"memory": "0"}, "--memory must be a positive number of GiB; got 0."),
        ({"sequences": "all"}, "--sequences must be a whole number, 1 or more, or 'max'; got 'all'."),
        ({"prompt": "5,,6"}, "--prompt has an empty item at position 2"),
        ({"prompt": "131000", "new_tokens": "1,200"}, "make 131200 tokens"),
        ({"stretch": "9", "new_tokens": "16,8"}, "give at most 8 (--new-tokens)."),
    ],
)
def test_wrong_values_are_refused(typed, message):
    with pytest.raises(KVBenchError) as error:
        asked(**typed)
    assert message in str(error.value)


def test_budgets_of_published_rows_are_read():
    entries = {(row.budget, row.entries) for row in published()}
    assert {("1K", 1024), ("full", None), ("512", 512), ("2048 (L=256)", 2048), ("none", None)} <= entries
    assert [short(n) for n in (32768, 1024, 64, 1500, None)] == ["32K", "1K", "64", "1500", "None"]
    assert Path(FILE).parent.parent.name == "bundled"
