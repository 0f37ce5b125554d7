"""LongProc (Ye et al. 2025, arXiv:2501.05414): its archive, its levels of answer length, and the base of its tasks.

Every task has up to three levels, named after the longest right answer in tokens. Prompts are the official ones,
bundled (Apache-2.0). `score` rates the final answer, and `score_partial` the procedure that the model writes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled, parts
from kvbench.taskkit.rows import answer, documents

COMMIT = "78e873ae395e42625fba7942bbb92713de08b2a6"
URL = f"https://github.com/princeton-pli/LongProc/archive/{COMMIT}.zip"
INSIDE = f"LongProc-{COMMIT}"  # the top folder in the archive
NEW_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 10240}  # HELMET's longproc_addon/configs


def manifest(task: str, level: str, rows: int | None) -> Manifest:
    """Return where the data of a LongProc task at one level are: in a data folder, or in the repository's archive.
    rows: the number of rows; None: unknown."""
    return Manifest(
        path=f"longproc/{task}_{level}.jsonl",
        rows=rows,
        url=URL,
        member=f"{INSIDE}/data/{task}/{task}_{level}.json",
        samples=(f"longproc/{task}_{level}.sample.jsonl",),
        licence="Apache-2.0",
    )


class LongProc(Task):
    """Base of the tasks whose prompt is a template filled with columns of a data row.

    A document's id is the number of its row among the rows that `select` returns (from 0), since the data have no ids.
    """

    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "long context"
    cheap_score = True
    rows: ClassVar[Mapping[str, int | None]]  # number of data rows by level; None: unknown
    mark: ClassVar[str]  # the text in the template after which a query-agnostic run evicts

    @property
    def part(self) -> str:
        """The task's name in LongProc."""
        return self.name.partition("/")[0].removeprefix("longproc_")

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each level
        return manifest(self.part, self.variant, self.rows[self.variant])

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        rows = self.select(source.rows(self.name, self.manifest))[:limit]
        context, question = parts(bundled(f"longproc/{self.part}.txt"), self.mark)

        def make(numbered: tuple[int, Mapping[str, Any]]) -> Doc:
            number, row = numbered
            texts = self.texts(row)
            turn = Turn(context=context.format(**texts), question=question.format(**texts))
            return Doc(doc_id=str(number), turns=(turn,), reference=self.reference(row), cluster_id=self.cluster(row))

        return documents(self, enumerate(rows), make)

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=NEW_TOKENS[self.variant], thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        scores = self.grade(answer(output), doc.reference)
        return Score(
            value=scores["accuracy"],
            partial=scores["partial_accuracy"],
            aux={"extraction_rate": scores["extraction_rate"], "no_answer": 1.0 - scores["extraction_rate"]},
        )

    def cluster(self, row: Mapping[str, Any]) -> str:
        """Return the name of the source, such as a document, from which a row comes. Rows from one source get one name.
        The name is "" if no other row comes from this source."""
        return ""

    def select(self, rows: Any) -> Any:
        """Return the data rows of the task's level; all rows unless a subclass overrides this."""
        return rows

    def texts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that fill the prompt template, by the names of its placeholders. row: a row of the data."""
        raise NotImplementedError

    def reference(self, row: Mapping[str, Any]) -> Any:
        """Return the part of a row with which `grade` compares an answer."""
        raise NotImplementedError

    def grade(self, text: str, reference: Any) -> dict[str, float]:
        """Return the scores of a model's text by name: accuracy, partial_accuracy, and extraction_rate (1 if the text
        holds an answer). reference: the value that the method `reference` returned."""
        raise NotImplementedError
