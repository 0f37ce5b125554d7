"""Functions that the YAML files in ``lm_eval_tasks`` call: they give lm-eval the documents of kvbench's tasks, and
score the model's answers.

kvbench's task scores each answer in a scoring process. A question's scores are means over its answers, so lm-eval's
standard error over questions is clustered by question. An answer that cannot be scored counts neither as right nor as
wrong; the metric `unscored` is the share of these answers.
"""

from __future__ import annotations

import functools
import json
import logging
from typing import TYPE_CHECKING, Any

from kvbench.config.run_config import RunConfig
from kvbench.scoring.pool import ScorePool
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Score
from kvbench.taskkit.names import get_task

if TYPE_CHECKING:
    import datasets

TASK, DOC = "kvbench_task", "kvbench_doc"  # columns of the data set: names of task and document in kvbench
WORKERS = 2
SETTINGS = ("data", "data_revision", "allow_data_mismatch", "thinking")
_of_model: dict[str, Any] = {}


def use_settings(run: RunConfig) -> None:
    """Let `documents` use a model's settings where lm-eval passes none, as with a model that is given as an object."""
    _of_model.update({name: getattr(run, name) for name in SETTINGS})


def documents(**settings: Any) -> datasets.DatasetDict:
    """Return all documents of one task.

    settings: `kvbench_task` from the YAML, and lm-eval's model_args, of which this function reads `SETTINGS`; those
        that are missing come from `use_settings`.
    """
    import datasets

    settings = _of_model | settings
    task = get_task(settings[TASK])
    mismatch = bool(settings.get("allow_data_mismatch"))
    data = Data(settings.get("data"), revision=settings.get("data_revision"), allow_mismatch=mismatch)
    docs = task.docs(data)
    for note in data.notes():
        logging.getLogger("lm_eval").warning(note)
    rows = [
        {
            TASK: task.name,
            DOC: doc.doc_id,
            "prompt": doc.turns[0].user,
            "reference": str(doc.reference),
            "thinking": settings.get("thinking"),
            "meta": json.dumps(dict(doc.meta)),
        }
        for doc in docs
    ]
    return datasets.DatasetDict(test=datasets.Dataset.from_list(rows))


def question_scores(doc: dict[str, Any], results: list[Any]) -> dict[str, float]:
    """Return the scores of a question as means over its answers, and the share of answers that cannot be scored.

    Answers that cannot be scored do not enter the means; if no answer can be scored, there are no means. results:
    [text], or with `take_first_k` [[text, ...]].
    """
    answers = results[0] if isinstance(results[0], list) else results
    task = get_task(doc[TASK])
    asked = Doc(doc_id=doc[DOC], turns=(), reference=doc["reference"], meta=json.loads(doc["meta"]))
    outputs = [
        Output(text=text, stop_reason="", prompt_tokens=0, output_tokens=0, thinking=doc["thinking"])
        for text in answers
    ]
    scores = [future.result() for future in [_pool().submit(task, asked, output) for output in outputs]]
    scored = [_numbers(score) for score in scores if score.value is not None]
    means = {name: sum(s[name] for s in scored) / len(scored) for name in (scored[0] if scored else ())}
    return means | {"unscored": (len(scores) - len(scored)) / len(scores)}


def _numbers(score: Score) -> dict[str, float]:
    found = {
        "score": score.value,
        "score_strict": score.strict,
        "score_partial": score.partial,
        "no_answer": score.aux.get("no_answer"),
    }
    return {name: value for name, value in found.items() if value is not None}


@functools.cache
def _pool() -> ScorePool:
    return ScorePool(workers=WORKERS)
