"""Finds the questions of a run in the tasks' data on this machine: later turns, reference answers, images.

A run does not store these. kvbench downloads nothing here, and uses data only if they equal the recorded data. An image
file is read only from data that the user names (``--data``, KVBENCH_DATA) or that kvbench itself keeps or makes. A path
that only a run's folder names is not read: otherwise a hostile folder could put a private picture into a page that the
user passes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.console.redact import hide_keys
from kvbench.errors import KVBenchError, UserError, quote
from kvbench.sources import hub
from kvbench.sources.data import Data
from kvbench.task import IMAGE, Doc, Turn
from kvbench.taskkit.names import LM_EVAL, get_task

LONGEST = 4000  # characters of a reference answer that is not text, such as tests of a program
Entry = Mapping[str, Any]  # a row with its texts


class RunQuestions:
    """The questions of one run. info: the run's record. data: the folder of ``--data``, if the user gave one."""

    def __init__(self, info: Mapping[str, Any], data: str | None) -> None:
        self.info = info
        environment, own = info["environment"], os.environ.get("KVBENCH_DATA")
        self._path = data or environment.get("data")
        self._variable = own or environment.get("data_variable") or ""
        # The place of the data, if only the run's folder names this place; otherwise "".
        self._recorded = "" if data else environment.get("data") or ("" if own else self._variable)
        self._docs: dict[tuple[str, str], dict[str, Doc]] = {}

    def of(self, entry: Entry) -> Doc | None:
        """Return the question that a stored sample (`entry`) answers.

        None if the task's data are missing or differ from the recorded data, if the task belongs to lm-eval, or if the
        stored prompt does not contain the question (`_asks`).
        """
        task, style = entry["task"], entry.get("prompt_style", "default")
        if (task, style) not in self._docs:
            self._docs[task, style] = self._read(task, style)
        doc = self._docs[task, style].get(entry["doc_id"])
        return doc if doc is not None and _asks(doc, entry) else None

    def missing(self, task: str) -> str:
        """Return a clause that says why a question of a task is missing (`of` returns None)."""
        try:
            get_task(task)
        except KVBenchError:
            if plugins := self.info["environment"].get("plugins"):
                names = ", ".join(quote(Path(plugin["path"]).name) for plugin in plugins)
                return f"the task comes from a plug-in of the run ({names}), which must be given with --plugin"
            return "this kvbench has no task of this name"
        return "the task's data are not on this machine, or are not those of the run"

    def uris(self, doc: Doc, entry: Entry) -> dict[int, str]:
        """Return the `data:` address of each image of a question, by the image's number from 1. Images beyond a total
        size (`pictures.MOST_BYTES`) are left out. entry: a stored sample that answers the question.

        Raises UserError for a missing or broken image, for images that the model did not see, and for image files that
        only the run's folder names.
        """
        from kvbench.report.page.pictures import embedded

        images = [image for turn in doc.turns for image in turn.images]
        if self._recorded and any(image.path is not None for image in images):
            raise UserError(
                "kvbench reads no image files that only a run's folder names. If you trust the folder, give --data "
                f"{quote(hide_keys(self._recorded))}."
            )
        made = embedded(images)
        digest = hashlib.sha256((entry["prompt"] or "").encode())
        for image in made:
            digest.update(bytes.fromhex(image.sha256))
        if digest.hexdigest() != entry.get("prompt_sha256"):
            raise UserError(
                "the images on this machine are not those that the model saw. Name the run's data with --data."
            )
        return {number: image.uri for number, image in enumerate(made, 1) if image.uri}

    def _read(self, name: str, style: str) -> dict[str, Doc]:
        recorded = self.info["environment"].get("tasks", {}).get(name, {}).get("data", {})
        if name.startswith(LM_EVAL):  # its questions need a model's tokenizer
            return {}
        source = Data(
            self._path,
            revision=self.info["environment"].get("data_revision"),
            allow_mismatch=True,
            env={"KVBENCH_DATA": self._variable},
        )
        try:
            task = get_task(name)
            limit = RunConfig.from_dict(self.info["config"]).limit_for(name)
            with hub.only(()):
                docs = {doc.doc_id: doc for doc in task.docs(source, style=style, limit=limit)}
        except Exception:  # from the task's own code, which may need the model's tokenizer
            return {}
        used = source.used.get(task.name)
        return {} if used and used.sha256 != recorded.get("sha256") else docs


def later(doc: Doc) -> list[str]:
    """Return the question of each turn after the first, as text. "[image 3]" stands for the third image, counted over
    all turns."""
    number = len(doc.turns[0].images)
    found = []
    for turn in doc.turns[1:]:
        parts = texts(turn)
        found.append(parts[0] + "".join(f"[image {number + n}]{text}" for n, text in enumerate(parts[1:], 1)))
        number += len(turn.images)
    return found


def texts(turn: Turn) -> list[str]:
    """Return the texts of a turn before, between and after its images."""
    return turn.user.split(IMAGE) if turn.images else [turn.user]


def reference(doc: Doc) -> str:
    """Return the reference answer as text: a text or number as it is, a list of texts as lines, any other value as JSON
    of at most `LONGEST` characters. Return "" if the question has no reference answer."""
    wanted: Any = doc.reference
    if dataclasses.is_dataclass(wanted) and not isinstance(wanted, type):
        wanted = dataclasses.asdict(wanted)
    if isinstance(wanted, (str, int, float)):
        return str(wanted)
    if isinstance(wanted, (tuple, list)) and all(isinstance(one, str) for one in wanted):
        return "\n".join(wanted)
    text = json.dumps(wanted, ensure_ascii=False, default=str) if wanted else ""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... [cut: {len(text)} characters in all]"


def _asks(doc: Doc, entry: Entry) -> bool:
    """Return whether the row's prompt contains this question. False if the task's data now have another question under
    this id, or if the run stored no prompt. A prompt from which tokens were cut is not checked: the result is True."""
    prompt = entry["prompt"]
    if not prompt:
        return False
    turn = doc.turns[0]
    parts = turn.question.split(IMAGE) if turn.images else [turn.question]
    return bool(entry.get("prompt_tokens_cut")) or all(part.strip() in prompt for part in parts)
