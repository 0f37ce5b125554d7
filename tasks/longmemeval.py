"""LongMemEval (Wu et al. 2024, arXiv:2410.10813): 500 questions on a user's earlier chats, marked by a judge.

The chats stand in one prompt, by date, as JSON: the released long-context set-up. A judge marks every answer with yes
or no by the released prompt for the type of question. All prompts are bundled (MIT). The data are the version of
September 2025 (longmemeval-cleaned).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.errors import quote
from kvbench.registry import tasks
from kvbench.scoring.judge import verdict
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled, parts
from kvbench.taskkit.rows import answer, documents

FILES = {"s": "longmemeval_s_cleaned.json", "oracle": "longmemeval_oracle.json"}
PROMPTS = {"default": "longmemeval/step_by_step.txt", "direct": "longmemeval/direct.txt"}
NEW_TOKENS = {"default": 800, "direct": 500}
KINDS = (
    *("single-session-user", "single-session-assistant", "single-session-preference"),
    *("multi-session", "temporal-reasoning", "knowledge-update"),
)
RESERVE = 1000  # tokens kept free for the question and the chat template, as in the released script


@tasks.register("longmemeval")
class LongMemEval(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "long context"
    summary = "LongMemEval, 500 questions on chats of 115K tokens, marked by a judge (--judge)"
    variants = tuple(FILES)
    prompt_styles = tuple(PROMPTS)
    needs = frozenset({"judge"})

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each variant
        file = FILES[self.variant]
        hub = "xiaowu0162/longmemeval-cleaned"
        return Manifest(path=f"longmemeval/{file}", rows=500, hub=hub, files=(file,), licence="MIT")

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        rows = source.rows(self.name, self.manifest)[:limit]
        context, question = parts(bundled(PROMPTS[style]), "{history}")
        return documents(self, rows, lambda row: _doc(row, context, question, NEW_TOKENS[style]), ids="question_id")

    def gen(self, model_type: str) -> GenSpec:
        """Return settings for greedy decoding. A prompt that is too long loses its middle; in the released script, such
        a prompt loses its end."""
        return GenSpec(max_new_tokens=NEW_TOKENS["default"], truncate="middle", reserve=RESERVE, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        """Return the score: 1 if the judge marks the answer as right, 0 if as wrong, no value without a usable verdict.

        In judge mode "pair" the score has no value either. Raises SetupError if the judge's server refuses the API key
        (KeyRefused), or if a local judge cannot be used.
        """
        if self.services.judge_mode == "pair":
            return Score(value=None, status="unscored", note="longmemeval compares no pairs; use --judge-mode single")
        asked = doc.reference
        kind = verdict.ABSTENTION if asked["abstention"] else doc.meta["category"]
        score = verdict.verdict(self.services, kind, asked["question"], asked["answer"], answer(output).strip())
        return replace(score, aux={**score.aux, "abstention": float(asked["abstention"])})

    def sources(self) -> dict[str, str]:
        return {"judge_prompts_sha256": hashlib.sha256(verdict.FILE.read_bytes()).hexdigest()}


def _doc(row: Mapping[str, Any], context: str, question: str, new_tokens: int) -> Doc:
    name, text, kind = str(row["question_id"]), str(row["question"]), str(row["question_type"])
    if kind not in KINDS:
        raise ValueError(f"question_type {quote(kind)} is not one of {', '.join(KINDS)}")
    return Doc(
        doc_id=name,
        turns=(
            Turn(
                context=context.format(history=_history(row["haystack_dates"], row["haystack_sessions"])),
                question=question.format(date=row["question_date"], question=text),
            ),
        ),
        reference={"question": text, "answer": str(row["answer"]), "abstention": "_abs" in name},
        meta={"category": kind},
        gen={"max_new_tokens": new_tokens},
    )


def _history(dates: list[str], sessions: list[list[dict[str, Any]]]) -> str:
    """Return the chats as one text, sorted by date (compared as text); each chat is a list of messages in JSON."""
    history = ""
    for number, (date, chat) in enumerate(sorted(zip(dates, sessions, strict=True), key=lambda pair: pair[0]), 1):
        # `has_answer` marks the messages that hold the answer
        messages = [{key: value for key, value in message.items() if key != "has_answer"} for message in chat]
        history += f"\n### Session {number}:\nSession Date: {date}\nSession Content:\n\n{json.dumps(messages)}\n"
    return history
