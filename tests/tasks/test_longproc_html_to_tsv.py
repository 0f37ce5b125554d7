"""LongProc's html_to_tsv on two of its pages, and from an archive of its own form."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.sources.data import BUNDLED, Data
from kvbench.task import Output
from kvbench.taskkit.longproc import COMMIT
from kvbench.taskkit.names import expand, get_task

SAMPLES = DATA / "tasks"
FILE = SAMPLES / "longproc" / "html_to_tsv_0.5k.sample.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
TEMPLATE = (BUNDLED / "longproc" / "html_to_tsv.txt").read_text(encoding="utf-8")


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


@pytest.mark.parametrize(("level", "rows", "tokens"), [("0.5k", 100, 1024), ("2k", 189, 3072), ("8k", 120, 10240)])
def test_levels(level: str, rows: int, tokens: int):
    task = get_task(f"longproc_html_to_tsv/{level}")
    spec = task.gen("qwen3")
    assert (task.size(), spec.max_new_tokens, spec.temperature, spec.thinking) == (rows, tokens, 0.0, False)
    assert expand("longproc_html_to_tsv") == ["longproc_html_to_tsv"]


def test_prompts_are_the_official_ones():
    docs = get_task("longproc_html_to_tsv").docs(Data(SAMPLES, env={}))
    assert [doc.doc_id for doc in docs] == [row["task_id"] for row in ROWS]
    for doc, row in zip(docs, ROWS):
        (turn,) = doc.turns
        assert turn.user == TEMPLATE.format(html_str=row["html"], **row)
        assert "{Your TSV output}" in turn.question
        assert turn.context.endswith(row["html"].rstrip("\n") + "\n")
    assert len({doc.cluster for doc in docs}) == 2


def archive(folder: Path, rows: list[dict], pages: dict[str, bytes]) -> Data:
    (folder / "longproc").mkdir()
    with zipfile.ZipFile(folder / "longproc" / f"{COMMIT}.zip", "w") as made:
        made.writestr(f"LongProc-{COMMIT}/data/html_to_tsv/html_to_tsv_0.5k.json", json.dumps(rows))
        for name, page in pages.items():
            made.writestr(f"LongProc-{COMMIT}/data/html_to_tsv/webpage/{name}", page)
    return Data(folder, env={}, allow_mismatch=True)


def test_pages_come_from_the_archive(tmp_path: Path):
    row = {k: v for k, v in ROWS[0].items() if k != "html"} | {"html_path": "webpage/a.html"}
    twin = row | {"task_id": "other"}
    data = archive(tmp_path, [row, twin], {"a.html": "<p>é {x}</p>\r\nlast\r".encode()})
    docs = get_task("longproc_html_to_tsv").docs(data)
    assert [doc.turns[0].user for doc in docs] == [TEMPLATE.format(html_str="<p>é {x}</p>\nlast\n", **row)] * 2
    assert docs[0].cluster == docs[1].cluster
    whole = (tmp_path / "longproc" / f"{COMMIT}.zip").read_bytes()
    assert data.used["longproc_html_to_tsv"].sha256 == hashlib.sha256(whole).hexdigest()  # rows and pages


def test_an_archive_without_a_page_is_said(tmp_path: Path):
    row = {k: v for k, v in ROWS[0].items() if k != "html"} | {"html_path": "webpage/b.html"}
    with pytest.raises(SetupError, match=r"have no .*webpage/b\.html"):
        get_task("longproc_html_to_tsv").docs(archive(tmp_path, [row], {"a.html": b""}))


def test_scores():
    task = get_task("longproc_html_to_tsv")
    doc = task.docs(Data(SAMPLES, env={}))[0]
    right = task.score(doc, answer(f"```tsv\n{doc.reference}```"))
    assert (right.value, right.aux["precision"], right.aux["recall"], right.aux["no_answer"]) == (1.0, 1.0, 1.0, 0.0)
    assert right.aux["row_dup_rate"] > 0  # this page lists addresses twice
    cut = task.score(doc, answer("```tsv\n" + doc.reference[: len(doc.reference) // 2]))
    assert 0 < (cut.value or 0) < 1
    none = task.score(doc, answer("I cannot."))
    assert (none.value, none.aux["extraction_rate"], none.aux["no_answer"]) == (0.0, 0.0, 1.0)
