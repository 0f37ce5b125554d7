"""LongBench and LongBench-E on made-up rows in their schema: prompts, sampling, groups, averages, scores."""

from __future__ import annotations

import json
import pickle
import shutil
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from kvbench.tasks.longbench import SETS, macro
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.scoring import longbench as scoring
from kvbench.sources.data import BUNDLED, Data
from kvbench.task import Output
from kvbench.taskkit.names import expand, get_task

SAMPLES = DATA / "tasks"
SYNTHETIC = SAMPLES / "longbench" / "synthetic_21_sets.jsonl"
ROWS = {row["dataset"]: row for row in map(json.loads, SYNTHETIC.read_text(encoding="utf-8").splitlines())}
PROMPTS = json.loads((BUNDLED / "longbench" / "dataset2prompt.json").read_bytes())
NO_CHAT = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.fixture
def source() -> Data:
    return Data(SAMPLES, env={})


def answer(text: str, thinking: bool | None = False) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)


def test_names_and_sizes():
    assert expand("longbench") == [f"longbench/{name}" for name in SETS] == [f"longbench/{name}" for name in PROMPTS]
    assert len(expand("longbench_e")) == 13
    assert sum(get_task(name).size() or 0 for name in expand("longbench")) == 4750
    assert sum(get_task(name).size() or 0 for name in expand("longbench_e")) == 3668
    for name in [*expand("longbench"), *expand("longbench_e")]:
        manifest = get_task(name).manifest
        assert manifest is not None
        tail = "_e" if name.startswith("longbench_e") else ""
        assert manifest.member == f"data/{name.partition('/')[2]}{tail}.jsonl"
        assert (manifest.files, len(manifest.revision or "")) == (("data.zip",), 40)


@pytest.mark.parametrize("group", ["longbench", "longbench_e"])
def test_prompts_are_the_official_ones_byte_for_byte(group: str, source: Data):
    for name in expand(group):
        task = get_task(name)
        docs = task.docs(source)
        for doc in docs:
            row = ROWS[task.variant]
            if doc.doc_id == row["_id"]:
                (turn,) = doc.turns
                assert turn.user == PROMPTS[task.variant].format(**row)
                assert turn.context.rstrip("\n").endswith(row["context"].rstrip("\n"))
                assert doc.reference == tuple(row["answers"])
                break
        else:
            assert len(docs) == 2  # multifieldqa_zh has rows of its own


def test_braces_in_a_text_are_text(tmp_path: Path):
    row = ROWS["hotpotqa"] | {"context": "{input} {0} {{x}}", "input": "{context}?"}
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / "hotpotqa.jsonl").write_text(json.dumps(row))
    (doc,) = get_task("longbench/hotpotqa").docs(Data(tmp_path, env={}, allow_mismatch=True))
    assert doc.turns[0].user == PROMPTS["hotpotqa"].format(**row)


@pytest.mark.parametrize(("name", "column"), [("hotpotqa", "answers"), ("trec", "all_classes")])
def test_a_text_in_place_of_a_list_is_refused(tmp_path: Path, name: str, column: str):
    row = ROWS[name] | {column: "['Paris']"}  # as a table in CSV would hold it
    (tmp_path / "longbench").mkdir()
    (tmp_path / "longbench" / f"{name}.jsonl").write_text(json.dumps(row))
    with pytest.raises(
        SetupError, match=rf"^data of task 'longbench/{name}', row 1, .*'{column}' must be a list of texts"
    ):
        get_task(f"longbench/{name}").docs(Data(tmp_path, env={}, allow_mismatch=True))


def test_questions_on_one_text_are_one_cluster(source: Data):
    docs = get_task("longbench/multifieldqa_zh").docs(source)
    assert len(docs) == 2
    assert docs[0].cluster == docs[1].cluster != docs[0].doc_id


@pytest.mark.parametrize("name", SETS)
def test_sampling(name: str):
    spec = get_task(f"longbench/{name}").gen("qwen3")
    tokens = {"32": "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en passage_retrieval_zh",
              "64": "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
              "128": "narrativeqa qasper dureader samsum", "512": "gov_report qmsum multi_news vcsum"}  # fmt: skip
    assert name in tokens[str(spec.max_new_tokens)].split()
    assert (spec.n, spec.temperature, spec.thinking, spec.truncate, spec.reserve) == (1, 0.0, False, "middle", 500)
    assert spec.chat == (name not in NO_CHAT)
    assert (spec.stop_tokens, spec.min_new_tokens) == ((("\n",), 1) if name == "samsum" else ((), 0))


def test_the_averages_are_the_published_ones():
    """GPT-3.5-Turbo-16k in LongBench's README: 44.0 in English, 44.5 in Chinese, by category."""
    scores = "23.6 43.3 52.3 61.2 51.6 37.7 26.9 28.7 29.5 23.4 26.7 16.0 68.0 91.4 41.7 29.2 4.5 71.0 77.5 54.7 53.6"
    row = dict(zip(SETS, map(float, scores.split()), strict=True))
    for language, published in (("en", 44.0), ("zh", 44.5)):
        weights = macro(language)
        assert sum(weights.values()) == pytest.approx(1)
        assert round(sum(weight * row[name] for name, weight in weights.items()), 1) == published
    averages = get_task("longbench").averages
    assert list(averages) == ["avg16", "macro6_en", "macro6_zh", "avg21"]
    assert [len(averages[name]) for name in averages] == [16, 16, 7, 21]
    assert len(get_task("longbench_e").averages["avg13"]) == 13


@pytest.mark.parametrize(("length", "bucket"), [(3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")])
@pytest.mark.parametrize("dataset", ["trec", "trec_e"])
def test_buckets_of_length(length: int, bucket: str, dataset: str, tmp_path: Path):
    (tmp_path / "longbench").mkdir()
    row = ROWS["trec"] | {"length": length, "dataset": dataset}
    (tmp_path / "longbench" / "trec_e.jsonl").write_text(json.dumps(row))
    (doc,) = get_task("longbench_e/trec").docs(Data(tmp_path, env={}, allow_mismatch=True))
    assert doc.meta["category"] == bucket
    assert get_task("longbench_e/trec").score(doc, answer("City\nQuestion: x")).value == 1.0


def test_rows_come_from_the_archive_of_the_hub(tmp_path: Path):
    (tmp_path / "longbench").mkdir()
    with zipfile.ZipFile(tmp_path / "longbench" / "data.zip", "w") as archive:
        for name in ("lcc", "lcc_e"):
            archive.writestr(f"data/{name}.jsonl", json.dumps(ROWS["lcc"] | {"_id": name}))
    data = Data(tmp_path, env={}, allow_mismatch=True)
    assert [doc.doc_id for doc in get_task("longbench/lcc").docs(data)] == ["lcc"]
    assert [doc.doc_id for doc in get_task("longbench_e/lcc").docs(data)] == ["lcc_e"]
    with pytest.raises(SetupError, match=r"has no 'data/trec\.jsonl'"):
        get_task("longbench/trec").docs(data)


def test_a_sample_is_recorded_as_one(source: Data):
    get_task("longbench/trec").docs(source)
    assert source.used["longbench/trec"].mismatch == "a sample: 1 of 200 rows (longbench/synthetic_21_sets.jsonl)"


def test_scores(source: Data):
    for name, text, value in (
        ("trec", "\nCity\nQuestion: next?", 1.0),
        ("hotpotqa", "Ada Brook", 1.0),
        ("passage_count", "3 of 4", 0.5),
        ("lcc", "\n        return len(self.items)\n", 1.0),
        ("multifieldqa_zh", "", 0.0),
    ):
        task = pickle.loads(pickle.dumps(get_task(f"longbench/{name}")))
        doc = task.docs(source)[0]
        score = task.score(doc, answer(text))
        assert (score.value, score.aux["no_answer"]) == (value, float(not text)), name


def test_what_was_thought_does_not_count(source: Data):
    task = get_task("longbench/hotpotqa")
    (doc,) = task.docs(source)
    assert task.score(doc, answer("<think>Is it Ada Brook?</think>Tom", thinking=True)).value == 0.0
    assert task.score(doc, answer("Ada Brook, then", thinking=True)).aux["no_answer"] == 1.0  # never stopped thinking


def test_a_missing_package_is_said_before_any_work(source: Data, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    scoring._package.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SetupError, match=r"pip install \"kvbench\[longbench\]\""):
        get_task("longbench/gov_report").docs(source)
    assert get_task("longbench/hotpotqa").docs(source)
    scoring._package.cache_clear()


def test_data_that_are_not_longbench_are_refused(tmp_path: Path):
    (tmp_path / "longbench").mkdir()
    file = tmp_path / "longbench" / "trec.jsonl"
    data = Data(tmp_path, env={}, allow_mismatch=True)
    file.write_text('{"dataset": "trec", "input": "x", "_id": "1"}')
    with pytest.raises(SetupError, match="have no column 'context'"):
        get_task("longbench/trec").docs(data)
    shutil.copy(SYNTHETIC, file)
    file.write_text(file.read_text(encoding="utf-8") + json.dumps(ROWS["trec"]), encoding="utf-8")
    with pytest.raises(SetupError, match="some values of '_id' occur twice"):
        get_task("longbench/trec").docs(data)
