"""Tasks of lm-eval by name (``--task lm_eval:gsm8k``): lm-eval's questions, prompts and scores on kvbench's engine.

lm-eval makes documents and prompts with its own seeds, and its own filters and metrics score every answer alone. The
headline score is the first metric that is a mean over answers and is higher for better answers, under the first filter
that does not vote over several answers. Unlike lm-eval, kvbench asks without thinking by default: the tasks allow few
new tokens, and their stop strings would end a thinking block. In the style `plain`, the text behind a block is scored.
docs/lm-eval.md says what is not run this way.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import pickle
import random
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kvbench.console.faults import words
from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import hub
from kvbench.sources.data import hub_error
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.lm_eval_source import Definition, LocalRows, commit, definition, generation, quiet
from kvbench.taskkit.names import gated_data
from kvbench.taskkit.rows import answer as shown

RAW, CHAT = "lm_eval", "plain"  # prompt styles
SEED, OTHER_SEED = 0, 1234  # lm-eval's defaults for Python's random numbers, and for NumPy's and few-shot examples
VOTES = ("take_first_k", "majority_vote")  # filters that need several answers to one question
NO_MATCH = "[invalid]"  # result of lm-eval's filters for an answer without a match
BEHIND = "answer-behind-thinking"  # part of the version in the style `plain`
LONGEST = 500  # most characters of an extracted answer that a row keeps


class LMEvalTask(Task):
    """A task that the lm-eval package defines in YAML. The constructor does not import lm-eval; the methods that
    need it do."""

    suite = "lm_eval"
    summary = "a task of lm-eval, by the name that lm-eval gives it"
    prompt_styles: ClassVar[tuple[str, ...]] = (RAW, CHAT)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = f"lm_eval:{name}"
        self.known_as = name
        self._marks: tuple[str, ...] = ()  # how documents and scores differ from the official ones
        self._first: Mapping[str, Any] = {}  # the first document, from which lm-eval infers the form of all documents
        self._about: dict[str, Any] = {}
        self._notes: list[str] = []

    @property
    def version(self) -> str:  # type: ignore[override]
        """Return a version such as ``3.0+lm-eval-0.4.13``: the task's version in lm-eval, and lm-eval's own. Suffixes
        name how documents and scores differ from the official ones. All parts are joined by "+"."""
        import importlib.metadata

        own = (definition(self.known_as).config.metadata or {}).get("version", "?")
        return "+".join((str(own), f"lm-eval-{importlib.metadata.version('lm_eval')}", *self._marks))

    @property
    def gated(self) -> bool:
        """Return whether the data must not be shown, because one of kvbench's own tasks lists the same data as gated.
        Raises UserError and SetupError as `definition` does."""
        return definition(self.known_as).config.dataset_path in gated_data()

    def gen(self, model_type: str) -> GenSpec:
        """Return the generation settings of the YAML file, without thinking; greedy decoding gets one sample, because
        all samples would be equal."""
        config = definition(self.known_as).config
        spec = generation(config.generation_kwargs, f"task {quote(self.name)}")
        return replace(spec, n=config.repeats if spec.temperature > 0 else 1, thinking=False)

    def docs(self, source: DataSource, *, style: str = RAW, limit: int | None = None) -> list[Doc]:
        yaml = definition(self.known_as)
        rows = LocalRows.find(yaml, source, self.name)
        if rows is None and not hub.may_ask(self.name):
            raise SetupError(
                f"kvbench downloads no data for task {quote(self.name)}, because only the run's folder names the task. "
                f"Give --task {shlex.quote(self.name)} again to allow the download, or give --data a folder that holds "
                "the data."
            )
        try:
            revision = None if rows else commit(yaml.config, source)
        except hub.HubError as error:
            raise _no_data(error, self.name, yaml) from None
        with _as_lm_eval():
            task = _load(self.name, yaml, rows, revision)
            self._first = dict(task.eval_docs[0])
            _filters(task.config, self.name)
            _metric(task, self.name)
            task.set_config("num_fewshot", yaml.config.num_fewshot or 0)
            task.set_fewshot_seed(OTHER_SEED)
            chat: Any = _messages if style == CHAT else None
            try:
                task.build_all_requests(limit=limit, apply_chat_template=chat is not None, chat_template=chat)
            except Exception as error:  # such as too few documents for the examples, or a missing column
                raise _misfit(self.name, error) from None
        self._marks = (BEHIND,) if style == CHAT else ()
        self._describe(yaml, rows, task, revision)
        return [
            Doc(
                doc_id=str(instance.doc_id),
                turns=(_turn(instance.args[0], chat=style == CHAT),),
                reference=dict(instance.doc),
            )
            for instance in task.instances
        ]

    def score(self, doc: Doc, output: Output) -> Score:
        task = _scorer(self.known_as, pickle.dumps(dict(self._first)))
        metric, filters = _metric(task, self.name), _filters(task.config, self.name)
        text = shown(output) if BEHIND in self._marks else output.text
        instance = _instance(self.known_as, doc.reference, text)
        results: dict[str, Any] = {}
        for ensemble in filters:
            ensemble.apply([instance])
            scored = task.process_results(doc.reference, [instance.filtered_resps[ensemble.name]])
            results |= {f"{name},{ensemble.name}": value for name, value in scored.items()}
        headline, first = f"{metric},{filters[0].name}", instance.filtered_resps[filters[0].name]
        numbers = {name: number for name, value in results.items() if (number := _number(value)) is not None}
        value = numbers.pop(headline, None)
        note = ""
        if value is None or not 0 <= value <= 1:
            note, value = f"lm-eval's {headline} is {results.get(headline)!r}, not a number from 0 to 1", None
        extracted = first[:LONGEST] if isinstance(first, str) else None
        return Score(value=value, extracted=extracted, aux=numbers | {"no_answer": float(first == NO_MATCH)}, note=note)

    def size(self) -> None:
        """Return None, because the number of questions is unknown before lm-eval loads its data."""

    def sources(self) -> dict[str, Any]:
        return self._about

    def notes(self) -> list[str]:
        return self._notes

    def _describe(self, yaml: Definition, rows: LocalRows | None, task: Any, revision: str | None) -> None:
        """Set what `sources` (for the run's record), `notes` (for the user) and `version` say about the loaded data."""
        config, shots = yaml.config, yaml.config.num_fewshot or 0
        self._about = {"num_fewshot": shots}
        if rows is None:
            texts = "\n".join(json.dumps(dict(d), sort_keys=True, default=str) for d in task.eval_docs)
            self._about |= {
                "task": self.name,
                "source": "lm-eval",
                "location": "/".join(str(p) for p in (config.dataset_path, config.dataset_name) if p),
                "revision": revision or (config.dataset_kwargs or {}).get("revision"),
                "sha256": hashlib.sha256(texts.encode()).hexdigest(),
                "rows": len(task.eval_docs),
            }
        elif not rows.official:
            self._marks += ("fewshot-from-asked-rows",)
            self._notes.append(
                f"task {quote(self.name)}: the data folder has no lm_eval/{yaml.name}.fewshot.jsonl, so the {shots} "
                "few-shot examples are other questions of the task itself. Scores are not the official ones."
            )
        if left_out := [f["name"] for f in config.filter_list or [] if _is_vote(f)]:
            names = ", ".join(left_out)
            self._notes.append(
                f"task {quote(self.name)}: filters {names} need several answers at once and are left out."
            )


def _load(name: str, yaml: Definition, rows: LocalRows | None, revision: str | None) -> Any:
    """Build lm-eval's own object for a task, with the task's data.

    Raises SetupError if a package is missing, or if the data are unavailable or do not fit the task.

    rows: data from the user's folder; None: from the hub. revision: the commit of the hub data set.
    """
    from lm_eval.api.task import ConfigurableTask

    try:
        config = yaml.resolved()
        if rows is not None:
            config |= rows.overrides(config, examples=yaml.examples)
        elif revision is not None:
            config["dataset_kwargs"] = {**(config.get("dataset_kwargs") or {}), "revision": revision}
        return ConfigurableTask(config=config)
    except ImportError as error:
        raise SetupError(f"task {quote(name)} needs a package that is not installed ({error}). Install it.") from None
    except Exception as error:  # of the hub, of malformed data, or of the task's own functions
        raise (_misfit(name, error) if rows else _no_data(error, name, yaml)) from None


def _misfit(name: str, error: Exception) -> SetupError:
    what = f"{type(error).__name__}: {quote(words(error))}"
    return SetupError(
        f"the data of task {quote(name)} do not fit lm-eval's definition of it ({what}). Check columns and rows."
    )


def _no_data(error: Exception, name: str, yaml: Definition) -> SetupError:
    if (error.why if isinstance(error, hub.HubError) else hub.why(error)) == "unreachable":
        return SetupError(
            f"task {quote(name)} is not on this machine and the hub is unreachable. Run it once on a connected machine "
            "(HF_HUB_OFFLINE=1 then uses the cached data), or give --data (or KVBENCH_DATA) a folder that holds "
            f"lm_eval/{yaml.name}.jsonl."
        )
    return hub_error(error, name, Manifest(path="", rows=None, hub=str(yaml.config.dataset_path)))


@functools.cache
def _scorer(name: str, first: bytes) -> Any:
    """Build lm-eval's own object for a task, to score answers. first: the task's first document, pickled; the object
    gets no other data, because scoring needs none."""
    yaml = definition(name)
    rows = LocalRows([pickle.loads(first)], None, True)
    with _as_lm_eval():
        from lm_eval.api.task import ConfigurableTask

        config = yaml.resolved()
        changes = rows.overrides(config, examples=0) | {"process_docs": None, "num_fewshot": 0, "fewshot_config": None}
        return ConfigurableTask(config=config | changes)


def _instance(name: str, doc: Any, text: str) -> Any:
    """Return an answer (`text`) as an Instance, the form that lm-eval's filters and metrics take. name: the task's name
    in lm-eval. doc: lm-eval's document with the question."""
    from lm_eval.api.instance import Instance

    return Instance(
        request_type="generate_until", doc=doc, arguments=("", {}), idx=0, metadata=(name, 0, 1), resps=[text]
    )


def _metric(task: Any, name: str) -> str:
    """Return the name of a task's first metric that is a mean over answers, with higher values for better answers.
    Raises UserError if there is none."""
    from lm_eval.api.registry import get_aggregation

    better = task.higher_is_better()
    for metric, aggregation in task.aggregation().items():
        if aggregation is get_aggregation("mean") and better.get(metric, True):
            return str(metric)
    listed = ", ".join(map(str, task.aggregation()))
    raise UserError(
        f"task {quote(name)} has no metric that rates single answers and is higher for better ones (its metrics: "
        f"{listed}); 'kvbench lm-eval --tasks {name.partition(':')[2]}' runs it."
    )


def _filters(config: Any, name: str) -> list[Any]:
    """Return lm-eval's filters of a task, which extract results from answers. Filters that vote over several answers
    are left out. Raises UserError if no filter remains."""
    from lm_eval.filters import build_filter_ensemble

    listed = config.filter_list or [{"name": "none", "filter": [{"function": "take_first"}]}]
    ensembles = [
        build_filter_ensemble(
            f["name"], [(step["function"], {k: v for k, v in step.items() if k != "function"}) for step in f["filter"]]
        )
        for f in listed
        if not _is_vote(f)
    ]
    if not ensembles:
        raise UserError(
            f"task {quote(name)} scores several answers to a question together, and kvbench scores each alone. "
            f"'kvbench lm-eval --tasks {name.partition(':')[2]}' runs it."
        )
    return ensembles


def _is_vote(listed: Mapping[str, Any]) -> bool:
    return any(step["function"] in VOTES for step in listed["filter"])


def _number(value: Any) -> float | None:
    """Return a finite number (Python's or NumPy's) as float; None for anything else, such as a pair of numbers."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _messages(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """Return chat messages as JSON. lm-eval calls this function in place of a chat template; kvbench applies the
    template later. `add_generation_prompt` is ignored."""
    return json.dumps(messages)


def _turn(context: str, *, chat: bool) -> Turn:
    """Return the prompt that lm-eval made (`context`) as a turn. chat: whether the prompt is the JSON of `_messages`;
    otherwise it is raw text."""
    if not chat:
        return Turn(question=context)
    texts = {message["role"]: str(message["content"]) for message in json.loads(context)}
    return Turn(system=texts.get("system"), question=texts["user"], answer_prefix=texts.get("assistant", ""))


@contextlib.contextmanager
def _as_lm_eval() -> Iterator[None]:
    """Run the ``with`` block, which calls lm-eval, under lm-eval's random seeds and without its log. Afterwards the
    states of the random generators are restored; the progress bars of the package datasets stay off."""
    import datasets
    import numpy as np

    states = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(OTHER_SEED)
    datasets.disable_progress_bars()
    try:
        with quiet():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
