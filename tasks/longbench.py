"""LongBench (Bai et al. 2023, arXiv:2308.14508): 21 sets of questions on long texts, English, Chinese and code.

Official prompts and answer lengths, bundled (MIT); `kvbench.scoring.longbench` scores the answers. Rows come from the
official archive, because contexts in other copies already include the instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.registry import tasks
from kvbench.scoring.longbench import require, score_row
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled_json, parts, text_id
from kvbench.taskkit.rows import answer, documents, texts_of

HUB, REVISION = "THUDM/LongBench", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
SYNTHETIC = "longbench/synthetic_21_sets.jsonl"
NO_CHAT = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})  # as in the official pred.py
RESERVE = 500  # tokens kept free for the chat template, beside prompt and answer


@dataclass(frozen=True, slots=True)
class Set:
    category: str
    language: str
    rows: int


SETS = {
    "narrativeqa": Set("single-document QA", "en", 200),
    "qasper": Set("single-document QA", "en", 200),
    "multifieldqa_en": Set("single-document QA", "en", 150),
    "multifieldqa_zh": Set("single-document QA", "zh", 200),
    "hotpotqa": Set("multi-document QA", "en", 200),
    "2wikimqa": Set("multi-document QA", "en", 200),
    "musique": Set("multi-document QA", "en", 200),
    "dureader": Set("multi-document QA", "zh", 200),
    "gov_report": Set("summarization", "en", 200),
    "qmsum": Set("summarization", "en", 200),
    "multi_news": Set("summarization", "en", 200),
    "vcsum": Set("summarization", "zh", 200),
    "trec": Set("few-shot learning", "en", 200),
    "triviaqa": Set("few-shot learning", "en", 200),
    "samsum": Set("few-shot learning", "en", 200),
    "lsht": Set("few-shot learning", "zh", 200),
    "passage_count": Set("synthetic", "en", 200),
    "passage_retrieval_en": Set("synthetic", "en", 200),
    "passage_retrieval_zh": Set("synthetic", "zh", 200),
    "lcc": Set("code", "code", 500),
    "repobench-p": Set("code", "code", 500),
}


def macro(language: str) -> dict[str, float]:
    """Return the weight of each set in the average for a language. All six categories have equal weight in the average,
    and all sets have equal weight within a category. Code sets count for both languages. language: "en" or "zh"."""
    members = {name: one.category for name, one in SETS.items() if one.language in (language, "code")}
    sizes = list(members.values())
    return {name: 1 / (6 * sizes.count(category)) for name, category in members.items()}


@tasks.register("longbench")
class LongBench(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "long context"
    summary = "LongBench, 21 sets: question answering, summaries, few-shot, retrieval, code; English and Chinese"
    variants = tuple(SETS)
    group = True
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "avg16": {name: 1.0 for name, one in SETS.items() if one.language != "zh"},
        "macro6_en": macro("en"),
        "macro6_zh": macro("zh"),
        "avg21": dict.fromkeys(SETS, 1.0),
    }

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each set
        return Manifest(
            path=f"longbench/{self.variant}.jsonl",
            rows=SETS[self.variant].rows,
            hub=HUB,
            files=("data.zip",),
            member=f"data/{self.variant}.jsonl",
            revision=REVISION,
            samples=(f"longbench/{self.variant}.sample.jsonl", SYNTHETIC),
            where={"dataset": self.variant},
            licence="MIT; texts under their own licences",
        )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        """Return the documents. Raises SetupError at once if a package that the set's metric needs is missing."""
        require(self.variant)
        return documents(self, self.rows(source)[:limit], self.doc, ids="_id")

    def gen(self, model_type: str) -> GenSpec:
        samsum = self.variant == "samsum"  # models would continue with further dialogues after a line end
        return GenSpec(
            max_new_tokens=bundled_json("longbench/dataset2maxlen.json")[self.variant],
            stop_tokens=("\n",) if samsum else (),
            min_new_tokens=1 if samsum else 0,
            truncate="middle",
            reserve=RESERVE,
            chat=self.variant not in NO_CHAT,
            thinking=False,
        )

    def score(self, doc: Doc, output: Output) -> Score:
        text = answer(output)
        value = score_row(self.variant, text, doc.reference, doc.meta["all_classes"])
        return Score(value=value, aux={"no_answer": float(not text.strip())})

    def rows(self, source: DataSource) -> list[Mapping[str, Any]]:
        """Return the rows of this task's set, in the order of the data source."""
        return list(source.rows(self.name, self.manifest))

    def category(self, row: Mapping[str, Any]) -> str:
        """Return the category of one question, by which reports group questions."""
        return SETS[self.variant].category

    def doc(self, row: Mapping[str, Any]) -> Doc:
        context, question = parts(bundled_json("longbench/dataset2prompt.json")[self.variant], "{context}")
        texts = {"context": row["context"], "input": row["input"]}
        classes = None if row["all_classes"] is None else list(texts_of(row, "all_classes"))
        return Doc(
            doc_id=str(row["_id"]),
            turns=(Turn(context=context.format(**texts), question=question.format(**texts)),),
            reference=texts_of(row, "answers"),
            meta={"category": self.category(row), "all_classes": classes, "length": row["length"]},
            cluster_id=text_id(row["context"]),
        )
