"""Read lm-eval's definition of a task (YAML and generation settings), and the task's data from a data folder.

Only tasks in the lm-eval package are found. A YAML file may name Python functions; third-party functions run only if
the user points lm-eval to them (``kvbench lm-eval --include_path``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, UserError, quote
from kvbench.registry import did_you_mean
from kvbench.sources import hub
from kvbench.sources.data import Data
from kvbench.sources.data.location import in_folder
from kvbench.task import DataSource, GenSpec, Manifest

MAX_GEN_TOKS = 256  # lm-eval's default for a task without a max_gen_toks
ASKED, EXAMPLES = "asked", "fewshot"  # names under which lm-eval gets the data of the folder as splits
# Files of kvbench's own layout with the rows of a hub data set: hub name -> (file, columns that the data set has).
NATIVE = {"openai/gsm8k": ("gsm8k/gsm8k_test.jsonl", ("question", "answer"))}
_BY_LM_EVAL = "'kvbench lm-eval --tasks {}' runs it."


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of one task in lm-eval.

    config: lm-eval's TaskConfig; it holds the names of Python functions, none of which was imported or run.
    """

    name: str
    path: Path
    config: Any

    @property
    def examples(self) -> int:
        """Return how many few-shot examples lm-eval takes from the task's data; 0 if the YAML itself holds them."""
        written = isinstance(self.config.fewshot_config.samples, (list, str))
        return 0 if written else int(self.config.num_fewshot or 0)

    def resolved(self) -> dict[str, Any]:
        """Return the YAML file's content for lm-eval's task class, with each name of a Python function replaced by the
        imported function."""
        from lm_eval.tasks._yaml_loader import load_yaml

        return {k: v for k, v in load_yaml(self.path).items() if k not in ("tag", "group", "task_list")}


@functools.cache
def definition(name: str) -> Definition:
    """Return the definition of the lm-eval task with this name. Raises UserError for an unknown task, a group, or a
    kind of task that kvbench does not run; SetupError if lm-eval is not installed."""
    try:
        import lm_eval.tasks
        from lm_eval.config.task import TaskConfig
        from lm_eval.tasks._yaml_loader import load_yaml
    except ImportError as error:
        raise SetupError(
            f"tasks of lm-eval need the package lm-eval ({error}): pip install 'lm-eval>=0.4.13'."
        ) from None
    root = Path(lm_eval.tasks.__file__).parent
    with quiet():
        path = _by_text(root, name) or _by_index(name)
        raw = load_yaml(path, resolve_func=False)
        _refuse(name, raw)
        known = {field.name for field in dataclasses.fields(TaskConfig)}
        return Definition(name, path, TaskConfig(**{k: v for k, v in raw.items() if k in known}))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the ``with`` block, hide progress bars, and lm-eval's log messages below the level of errors. Everything
    that Python code writes to standard error inside the block is discarded."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _by_text(root: Path, name: str) -> Path | None:
    """Return the YAML file below `root` with the line ``task: NAME``; None if no file or several files have it. This
    search takes 0.3 s; lm-eval needs 8 s to index its 14,000 files."""
    line = re.compile(rf"""^["']?task["']?:[ \t]*["']?{re.escape(name)}["']?[ \t]*(#.*)?\r?$""".encode(), re.MULTILINE)
    files = [path for path in root.rglob("*.yaml") if line.search(path.read_bytes())]
    return files[0] if len(files) == 1 else None


def _by_index(name: str) -> Path:
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    entry = manager.task_index.get(name)
    if entry is None:
        hint = did_you_mean(name, manager.all_subtasks)
        raise UserError(f"lm-eval has no task {quote(name)}.{hint} 'kvbench lm-eval ls tasks' shows all.")
    if name not in manager.all_subtasks or entry.yaml_path is None:
        listed = (entry.cfg or {}).get("task")
        members = [m for m in sorted(entry.tags) or (listed if isinstance(listed, list) else []) if isinstance(m, str)]
        first = next((m for m in members if m in manager.all_subtasks), None)
        such = f", such as {quote('lm_eval:' + first)}" if first else ""
        raise UserError(f"{quote(name)} is a group of tasks in lm-eval; name one of them{such}.")
    return Path(entry.yaml_path)


def _refuse(name: str, raw: Mapping[str, Any]) -> None:
    """Raise UserError for a task that kvbench does not run. Such a task generates no answers, is defined by a Python
    program, has programs as answers, or asks about images or sound. raw: the content of the task's YAML file."""
    task, kind = f"task {quote(name)} of lm-eval", raw.get("output_type", "generate_until")
    if kind == "loglikelihood_rolling":
        raise UserError(
            f"{task} measures the perplexity of whole texts; there is no answer during which a method could evict. "
            "Name a task that generates answers."
        )
    if kind != "generate_until":
        why = "compares the likelihoods of given answers; kvbench's own runs generate answers"
        raise UserError(f"{task} {why}. {_BY_LM_EVAL.format(name)}")
    if "class" in raw:
        raise UserError(
            f"{task} is defined by a Python program, and kvbench reads YAML tasks only. {_BY_LM_EVAL.format(name)}"
        )
    if raw.get("unsafe_code"):
        raise UserError(f"{task} runs model-written programs without a sandbox. Use 'livecodebench' for code.")
    if raw.get("doc_to_image") or raw.get("doc_to_audio"):
        raise UserError(f"{task} asks about images or sound; kvbench runs lm-eval's text tasks only. Name another one.")


def generation(asked: Mapping[str, Any], task: str = "the request") -> GenSpec:
    """Return the settings with which lm-eval generates answers to a task, as kvbench's GenSpec.

    asked: the task's `generation_kwargs`. task: its name in messages. Raises UserError for settings that kvbench lacks,
    and for values out of range.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), MAX_GEN_TOKS))
    until = tuple(str(text) for text in kwargs.pop("until") if text)
    longest, sampled = int(kwargs.pop("max_gen_toks")), bool(kwargs.pop("do_sample"))
    temperature = float(kwargs.pop("temperature", 1.0)) if sampled else 0.0  # 1.0 is transformers' default
    kwargs.pop("temperature", None)
    filters = {key: type_(kwargs.pop(key)) for key, type_ in _FILTERS.items() if kwargs.get(key) is not None}
    if strange := [key for key, value in kwargs.items() if value not in _OFF.get(key, (None,))]:
        raise UserError(
            f"{task} needs the generation settings {', '.join(map(quote, strange))}, which kvbench does not support. "
            "Leave them out, or name another task."
        )
    if temperature == 0.0:
        filters = {}
    wrong = [key for key, value in filters.items() if not _IN_RANGE[key](value)]
    if wrong or not (math.isfinite(temperature) and temperature >= 0):
        name = wrong[0] if wrong else "temperature"
        value = filters[name] if wrong else temperature
        raise UserError(f"{task} asks for {name}={value:g}, which is out of range. Name another task.")
    return GenSpec(max_new_tokens=longest, temperature=temperature, stop=until, **filters)


_FILTERS = {"top_p": float, "top_k": int, "min_p": float}
_IN_RANGE: dict[str, Callable[[float], bool]] = {
    "top_p": lambda p: 0 < p <= 1,
    "top_k": lambda k: k >= 0,
    "min_p": lambda p: 0 <= p <= 1,
}
_OFF = {"num_beams": (1,), "repetition_penalty": (1, 1.0), "num_return_sequences": (1,)}  # values that change nothing


@dataclass(frozen=True, slots=True)
class LocalRows:
    """A task's data from the user's data folder, used in place of lm-eval's data set."""

    asked: list[dict[str, Any]]  # the questions
    examples: list[dict[str, Any]] | None  # few-shot examples; None: drawn from the questions, if needed
    official: bool  # False if lm-eval draws the examples from a separate split, which the folder lacks

    @classmethod
    def find(cls, of: Definition, source: DataSource, task: str) -> LocalRows | None:
        """Return a task's data from the user's data folder; None if the run has no data folder. Raises SetupError if
        the folder lacks these data, or if they are empty."""
        folder = (source.path or source.env_path) if isinstance(source, Data) else None
        if folder is None:
            return None
        manifest, columns = Manifest(path=f"lm_eval/{of.name}.jsonl", rows=None), None
        native, its = NATIVE.get(str(of.config.dataset_path), ("", ()))
        other = Manifest(path=native, rows=None)
        if native and not _holds(folder, manifest) and _holds(folder, other):
            manifest, columns = other, its
        asked = [dict(row) for row in source.rows(task, manifest)]
        if not asked:
            raise SetupError(
                f"the data of task {quote(task)} in {quote(folder)} are empty. Add the rows of the task's data set."
            )
        if columns is not None:
            asked = [{column: row[column] for column in columns} for row in asked]
        if not of.examples:
            return cls(asked, None, True)
        beside = Manifest(path=f"lm_eval/{of.name}.fewshot.jsonl", rows=None)
        if folder.is_dir() and _holds(folder, beside):
            return cls(asked, [dict(row) for row in source.rows(task, beside)], True)
        config = of.config
        own = config.fewshot_config.split or config.training_split or config.validation_split or config.test_split
        return cls(asked, None, own == (config.test_split or config.validation_split))

    def overrides(self, config: Mapping[str, Any], *, examples: int) -> dict[str, Any]:
        """Return the changes to a task's configuration that make lm-eval use these rows instead of its own data set.
        config: the configuration, as `Definition.resolved` returns it. examples: number of few-shot examples."""
        import datasets

        splits = {ASKED: datasets.Dataset.from_list(self.asked)}
        if self.examples is not None:
            splits[EXAMPLES] = datasets.Dataset.from_list(self.examples)
        shots = None if not examples else ASKED if self.examples is None else EXAMPLES
        return {
            "custom_dataset": lambda **_: datasets.DatasetDict(splits),
            "training_split": None,
            "validation_split": None,
            "test_split": ASKED,
            "fewshot_split": shots,
            "fewshot_config": {**(config.get("fewshot_config") or {}), "split": shots},
        }


def _holds(folder: Path, manifest: Manifest) -> bool:
    return folder.is_file() or in_folder(folder, manifest, "--data") is not None


def commit(config: Any, source: DataSource) -> str | None:
    """Return the commit of the hub data set that lm-eval will load. None if the hub cannot be reached, or if lm-eval
    names no hub data set of the form OWNER/NAME. Raises HubError if the hub refuses the request."""
    import huggingface_hub

    path, asked = config.dataset_path, (config.dataset_kwargs or {}).get("revision")
    if config.custom_dataset is not None or "/" not in str(path) or huggingface_hub.is_offline_mode():
        return None
    chosen = source.revision if isinstance(source, Data) else None
    try:
        return hub.ask("dataset", str(path), chosen or asked).commit
    except hub.HubError as error:
        if error.why == "unreachable":
            return None  # the cache of the package datasets may hold the data set
        raise
