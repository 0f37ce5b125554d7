"""SCBench (Li et al. 2024, arXiv:2412.10319): several questions in turn on one long context, in twelve sets.

A document is a context with its questions. Later questions continue from the evicted cache and see the model's own
earlier answers, as in the released script with --disable_golden_context. By default, that script replaces these answers
by the right ones. Released prompts, bundled (MIT); `kvbench.scoring.scbench` has the scoring rules of the sets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.registry import tasks
from kvbench.scoring.scbench import repoqa, rules
from kvbench.scoring.scbench.packages import require
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled_json, text_id
from kvbench.taskkit.rows import documents, visible

CONTEXT = 131072  # tokens of prompt and answers at most, as in the released scripts
RESERVE = 1500  # tokens kept free for the chat template and the later questions
ROUGE = ("rouge_score.rouge_scorer",)


@dataclass(frozen=True, slots=True)
class Set:
    """One of SCBench's data sets. new_tokens: most tokens of an answer.

    rule: the name of a function in `kvbench.scoring.scbench.rules`, or "function" (RepoQA's rule). A set with two kinds
    of questions has a dictionary from the kind (the turns' column `task`) to the name of its rule. strict: the rule of
    the column `score_strict`; "": none.
    """

    group: str
    rows: int
    new_tokens: int
    rule: str | Mapping[str, str]
    strict: str = ""
    packages: tuple[str, ...] = ()


SETS = {
    "kv": Set("string", 100, 150, "contains"),
    "prefix_suffix": Set("string", 100, 150, "contains"),
    "vt": Set("string", 90, 30, "share"),
    "repoqa": Set("semantic", 88, 1024, "function", packages=repoqa.PACKAGES),
    "qa_eng": Set("semantic", 69, 40, "mentions"),
    "qa_chn": Set("semantic", 35, 40, "f1_of_characters", strict="f1_zh"),
    "choice_eng": Set("semantic", 58, 40, "option"),
    "many_shot": Set("global", 54, 10, "any_character", strict="whole_word"),
    "mf": Set("global", 100, 5, "first_number"),
    "summary": Set("global", 70, 200, "rouge", packages=ROUGE),
    "summary_with_needles": Set(
        "multi-task", 70, 800, {"scbench_summary": "rouge", "scbench_passkey": "first_integer"}, packages=ROUGE
    ),
    "repoqa_and_kv": Set(
        "multi-task", 88, 1024, {"scbench_repoqa": "function", "scbench_kv": "contains"}, packages=repoqa.PACKAGES
    ),
}


@tasks.register("scbench")
class SCBench(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "long context"
    summary = "SCBench, 12 sets of several questions on one long context, answered in turn"
    variants = tuple(SETS)
    group = True
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {
        **{
            group: {name: 1.0 for name, one in SETS.items() if one.group == group}
            for group in ("string", "semantic", "global", "multi-task")
        },
        "avg12": dict.fromkeys(SETS, 1.0),
    }

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each set
        return Manifest(
            path=f"scbench/scbench_{self.variant}.jsonl",
            rows=SETS[self.variant].rows,
            hub="microsoft/SCBench",
            config=f"scbench_{self.variant}",
            split="test",
            samples=(f"scbench/scbench_{self.variant}.sample.jsonl",),
            licence="MIT",
        )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        """Return the documents. Raises SetupError at once if a package that the set's rules need is missing."""
        require(SETS[self.variant].packages)
        needles: dict[str, list[repoqa.Needle]] = defaultdict(list)  # by repository; all rows' functions
        rows = enumerate(source.rows(self.name, self.manifest))
        return documents(self, rows, lambda numbered: self._doc(numbered[0], numbered[1], needles))[:limit]

    def gen(self, model_type: str) -> GenSpec:
        new = SETS[self.variant].new_tokens
        return GenSpec(max_new_tokens=new, truncate="middle", reserve=RESERVE, longest=CONTEXT - new, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        texts = [visible(text, output.thinking) for text in output.turns]
        if len(texts) < len(doc.turns):
            return Score(value=None, note=f"the model gave {len(texts)} of {len(doc.turns)} answers")
        asked = doc.reference
        scores = [_score(turn["rule"], text, turn) for text, turn in zip(texts, asked)]
        strict = SETS[self.variant].strict
        kinds = {turn["kind"] for turn in asked} - {""}
        by_kind = {
            kind.removeprefix("scbench_"): _mean([s for s, turn in zip(scores, asked) if turn["kind"] == kind])
            for kind in kinds
        }
        return Score(
            value=_mean(scores),
            strict=_mean([_score(strict, text, turn) for text, turn in zip(texts, asked)]) if strict else None,
            aux={
                **by_kind,
                **{f"turn_{number}": score for number, score in enumerate(scores, 1)},
                "no_answer": _mean([float(not text.strip()) for text in texts]),
            },
        )

    def _doc(self, number: int, row: Mapping[str, Any], needles: dict[str, list[repoqa.Needle]]) -> Doc:
        turns = list(row["multi_turns"])
        references = [self._reference(row, turn, needles) for turn in turns]
        new = SETS[self.variant].new_tokens
        return Doc(
            doc_id=str(number),
            turns=tuple(self._turn(row, place, turn) for place, turn in enumerate(turns)),
            reference=references,
            meta={"category": str(row.get("lang") or row.get("task") or "")},
            cluster_id=text_id(str(_context(row))),
            gen={"reserve": RESERVE + new * (len(turns) - 1), "longest": CONTEXT - new * len(turns)},
        )

    def _turn(self, row: Mapping[str, Any], place: int, turn: Mapping[str, Any]) -> Turn:
        template = bundled_json("scbench/prompts.json")[self.variant]
        texts = {"context": _context(row), "input": turn["input"], "question": turn["input"]}
        if self.variant == "mf":
            asked = re.findall(r"The .+ is", turn["input"])[0]  # such as "The largest number of the list is"
            texts["prefix"] = f"What is {asked.lower().removesuffix(' is')}?"
        if self.variant == "choice_eng":
            texts |= {f"OPTION_{letter}": text for letter, text in zip("ABCD", turn["options"], strict=True)}
        if place == 0:
            return Turn(context=template["context"].format(**texts), question=template["question"].format(**texts))
        prefix = "This paper" if self.variant == "summary" else ""
        return Turn(question=template["later"].format(**texts), answer_prefix=prefix)

    def _reference(
        self, row: Mapping[str, Any], turn: Mapping[str, Any], needles: dict[str, list[repoqa.Needle]]
    ) -> dict[str, Any]:
        """Return what is needed to score a turn: `rule` (the name of the scoring rule), `kind` (the kind of question;
        "" in sets of one kind) and the rule's arguments."""
        rule, kind, right = SETS[self.variant].rule, "", turn["answer"]
        if not isinstance(rule, str):
            kind = str(turn["task"])
            rule = rule[kind]
        if rule == "function":
            mine = needles[str(row["repo"])]
            mine.append((str(turn["name"]), str(right)))
            return {"rule": rule, "kind": kind, "language": row["lang"], "name": str(turn["name"]), "needles": mine}
        if rule == "option":
            right = (right, "ABCD"[turn["options"].index(right)])
        return {"rule": rule, "kind": kind, "answer": right}


def _context(row: Mapping[str, Any]) -> Any:
    """Return a row's long text. The rows of `vt` hold it as `input`; the released scripts read either column."""
    return row["input" if "input" in row and "context" not in row else "context"]


def _score(rule: str, text: str, turn: Mapping[str, Any]) -> float:
    if rule == "function":
        return repoqa.score_function(text, turn["language"], turn["name"], turn["needles"])
    score: float = getattr(rules, rule)(text, turn["answer"])
    return score


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
