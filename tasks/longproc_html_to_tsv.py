"""LongProc's html_to_tsv (Ye et al. 2025, arXiv:2501.05414): extract a table from a web page.

Score: F1 over table rows (`kvbench.scoring.html_to_tsv`). Data and pages come from LongProc's repository; a user's own
data file can hold each page in the column `html`.
"""

from __future__ import annotations

import posixpath
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.registry import tasks
from kvbench.scoring.html_to_tsv import row_dup_rate, score_tsv
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled, parts
from kvbench.taskkit.longproc import COMMIT, INSIDE, NEW_TOKENS, URL, manifest
from kvbench.taskkit.rows import answer, documents

ARCHIVE = Manifest(path=f"longproc/{COMMIT}.zip", rows=None, url=URL)
FOLDER = f"{INSIDE}/data/html_to_tsv"  # paths of pages in the data are relative to it
ROWS = {"0.5k": 100, "2k": 189, "8k": 120}


@tasks.register("longproc_html_to_tsv", aliases=("html_to_tsv",))
class HtmlToTsv(Task):
    suite = "long context"
    summary = "LongProc html_to_tsv, tables from web pages with answers of up to 0.5K, 2K and 8K tokens"
    version = "3"  # 2: rows as corrected in March 2025; 3: an unfinished block of thinking is the answer
    variants = tuple(ROWS)
    cheap_score = True

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each level
        here = manifest("html_to_tsv", self.variant, ROWS[self.variant])
        return replace(here, licence="Apache-2.0; pages of the public web")

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        rows = source.rows(self.name, self.manifest)[:limit]
        if all("html" in row for row in rows):
            return documents(self, rows, lambda row: _doc(row, row["html"]), ids="task_id", lacks="")
        return self._with_pages(rows, source)

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=NEW_TOKENS[self.variant], thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        text = answer(output)
        scores = score_tsv(text, doc.reference)
        value = scores.pop("f1")
        no_answer = {"no_answer": 1.0 - scores["extraction_rate"]}
        return Score(value=float(value), aux=scores | no_answer | {"row_dup_rate": row_dup_rate(text)})

    def _with_pages(self, rows: Any, source: DataSource) -> list[Doc]:
        """Return a document for each row of the data, with the row's web page from LongProc's archive. Raises
        SetupError if the archive cannot be read or lacks a page."""
        file = source.file(self.name, ARCHIVE)
        try:
            with zipfile.ZipFile(file) as archive:
                pages = (_page(archive, row["html_path"]) for row in rows)
                return documents(self, rows, lambda row: _doc(row, next(pages)), ids="task_id", lacks="")
        except (zipfile.BadZipFile, OSError, UnicodeDecodeError) as error:
            raise SetupError(
                f"the pages of task {quote(self.name)} in {quote(file)} cannot be read ({error}). Check the file's "
                "permissions, or download the file again."
            ) from None


def _page(archive: zipfile.ZipFile, path: str) -> str:
    """Return a page's text with line ends as "\\n", as Python's text mode reads it."""
    name = posixpath.normpath(f"{FOLDER}/{path}")
    if name not in archive.NameToInfo:
        raise KeyError(name)  # zipfile's own KeyError holds a sentence instead of the name
    text = archive.read(name).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _doc(row: Mapping[str, Any], page: str) -> Doc:
    context, question = parts(bundled("longproc/html_to_tsv.txt"), "{html_str}")
    texts = {name: row[name] for name in ("task_topic", "task_description", "filtering_instruction", "tsv_header")}
    return Doc(
        doc_id=str(row["task_id"]),
        turns=(Turn(context=context.format(html_str=page), question=question.format(**texts)),),
        reference=str(row["gt"]),
        cluster_id=str(row["html_path"]),
    )
