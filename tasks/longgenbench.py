"""LongGenBench (Wu et al. 2024, arXiv:2409.02076): write a text of many numbered entries (a diary, a menu, or the
plan of a tower or a city); given events must stand in given entries.

Prompts are raw text, as in the released script: they end with the head of the first entry, which the model continues.
There are three kinds of events: asked for once, in a range of entries, or periodically. A judge says for each event
whether the event's entry mentions it (`kvbench.scoring.longgenbench`); an event whose entry was not written counts as
missing. The score is the share of events found, as a mean over the kinds (the paper's STIC-2, for one question).
docs/tasks.md has all columns, and what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbench.registry import tasks
from kvbench.scoring.judge import JudgeError, connect
from kvbench.scoring.judge.asking import NO_JUDGE, ask, failed, judged_by
from kvbench.scoring.longgenbench import completion, questions, read_entries, says_yes
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.rows import documents

FOLDER = "https://raw.githubusercontent.com/mozhu621/LongGenBench/62c0e869219c225671a0b8f50217b0cd836b882b/Dataset"
KINDS = ("once", "range", "periodic")
REPLY = 50  # most tokens of a judge's reply, as in the released script


@dataclass(frozen=True, slots=True)
class Length:
    """One variant of the data: its file, the file's hash, and the most tokens of an answer."""

    file: str
    sha256: str
    tokens: int


LENGTHS = {
    "short": Length("Dataset_short.json", "3cf98c4badc330a93d1010f57f6658b09f2ebc2e6428a3df083b652d902d96e8", 16000),
    "long": Length("Dataset_long.json", "f61048da5ecfb1b717584af8b2dc5999198459e9b95aceedde2dcc6f5cdd35e7", 32000),
}


@tasks.register("longgenbench")
class LongGenBench(Task):
    suite = "long answers"
    summary = "LongGenBench, 400 texts of 52 to 365 entries with events at given places, checked by a judge (--judge)"
    variants = tuple(LENGTHS)
    needs = frozenset({"judge"})

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each length
        length = LENGTHS[self.variant]
        return Manifest(
            path=f"longgenbench/{length.file}",
            rows=400,
            url=f"{FOLDER}/{length.file}",
            url_sha256=length.sha256,
            samples=(f"longgenbench/{self.variant}.sample.jsonl",),
            licence="CC-BY-ND-4.0",
        )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        rows = source.rows(self.name, self.manifest)[:limit]
        return documents(self, enumerate(rows), lambda numbered: self._doc(*numbered))

    def gen(self, model_type: str) -> GenSpec:
        new = LENGTHS[self.variant].tokens
        return GenSpec(max_new_tokens=new, temperature=0.95, top_p=0.95, stop=("*** finished",), chat=False)

    def score(self, doc: Doc, output: Output) -> Score:
        """Score an answer by the share of wanted events that the judge finds in it, a mean over the kinds of events.

        The score has no value in judge mode "pair", without a judge, or if the judge fails. Raises SetupError if the
        judge's server refuses the API key (KeyRefused), or if a local judge cannot be used.
        """
        wanted = doc.reference
        text = wanted["prefix"] + output.text
        entries = read_entries(text, wanted["type"])
        aux = {"completion": completion(entries, wanted["number"]), "words": float(len(text.split()))}
        if self.services.judge_mode == "pair":
            return Score(value=None, status="unscored", note="longgenbench compares no pairs; use --judge-mode single")
        judge = connect(self.services)
        if judge is None:
            return replace(NO_JUDGE, aux=aux)
        shares, model = {}, ""
        for kind, events in wanted["events"].items():
            try:
                asked = [ask(judge, ("", question, (), REPLY), says_yes) for question in questions(entries, events)]
            except JudgeError as error:
                return replace(failed(str(error)), aux=aux)
            found = sum(bool(one.value) for one in asked)
            shares[kind] = found / len(events)
            if asked:
                aux[f"{kind}_written"], model = found / len(asked), asked[0].judge
        return Score(
            value=sum(shares.values()) / len(shares),
            aux=aux | shares,
            facts=judged_by(model, "yes or no") if model else {},
        )

    def _doc(self, number: int, row: Mapping[str, Any]) -> Doc:
        events = {kind: {str(n): str(event) for n, event in row[f"checks_{kind}"].items()} for kind in KINDS}
        events = {kind: of_kind for kind, of_kind in events.items() if of_kind}
        if (
            not events
            or int(row["number"]) < 1
            or not all(n.isdecimal() for of_kind in events.values() for n in of_kind)
        ):
            raise ValueError("the question has no events or no entries, or an event has no entry number")
        reference = {"prefix": str(row["prefix"]), "type": row["type"], "number": int(row["number"]), "events": events}
        return Doc(
            doc_id=f"{self.variant}-{number}",
            turns=(Turn(question=str(row["prompt"])),),
            reference=reference,
            meta={"category": str(row["type"])},
        )
