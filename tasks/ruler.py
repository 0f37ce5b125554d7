"""RULER (Hsieh et al. 2024): 13 synthetic subtasks at lengths from 4K to 128K, made with the model's own tokenizer.

A length includes the chat template and the answer. The prompts equal those of NVIDIA's generators (see
`kvbench.taskkit.ruler`). kvbench does not use lm-eval's RULER, which has other prompts (docs/tasks.md) and runs remote
code of tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvbench.registry import tasks
from kvbench.scoring.ruler import score_output
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task
from kvbench.taskkit.ruler.make import make_rows
from kvbench.taskkit.ruler.material import ENGLISH_WORDS, ESSAYS, HOTPOTQA, SQUAD, Sources
from kvbench.taskkit.ruler.reading import document, place_of_needle, room_for
from kvbench.taskkit.ruler.recipes import FAMILIES, LENGTHS, SUBTASKS, Family

ROWS = 500  # per subtask, without --limit
LONGEST_OFFLINE_CWE = 32768  # tokens; longer prompts may need more words than wonderwords has


@tasks.register("ruler")
class Ruler(Task):
    suite = "long context"
    summary = "RULER, 13 subtasks of retrieval, tracing, counting and question answering at 4K to 128K"
    variants = tuple(SUBTASKS)
    group = True
    lengths = LENGTHS
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {"mean of 13": dict.fromkeys(SUBTASKS, 1.0)}
    cheap_score = True
    endless = True

    @property
    def family(self) -> Family:
        return FAMILIES[SUBTASKS[self.variant].family]

    @property
    def manifest(self) -> Manifest | None:  # type: ignore[override]  # the subtask's data, if any
        settings = SUBTASKS[self.variant].settings
        if settings.get("haystack") == "essay":
            return ESSAYS
        if self.variant == "cwe":
            return ENGLISH_WORDS if self.length > LONGEST_OFFLINE_CWE else None
        return {"squad": SQUAD, "hotpotqa": HOTPOTQA}.get(settings.get("documents", ""))

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        with room_for(self, self.family.new_tokens) as room:
            rows = make_rows(self.variant, room, Sources(source, self.name), ROWS if limit is None else limit)
        return [document(f"{self.variant}-{number}", row, self.variant) for number, row in enumerate(rows)]

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=self.family.new_tokens, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        return score_output(
            output.text, doc.reference, any_reference=self.family.any_reference, aux=place_of_needle(doc)
        )

    def size(self) -> int:
        return ROWS
