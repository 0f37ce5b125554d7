"""Checks a run before torch is imported: its settings against each other, then its inputs from disk and hub.

The engine makes the checks that need a tokenizer or a device, before it generates the first token.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvbench.config.run_config import RunConfig
from kvbench.console.problems import Problems
from kvbench.errors import SetupError, UserError, counted, few, quote
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.budget import Budget
from kvbench.eviction.options import check_budget
from kvbench.runner import task_data
from kvbench.runner.workload import load_task
from kvbench.sources import adapters, models, vocabulary
from kvbench.sources.models import ModelInfo
from kvbench.task import GenSpec, Task
from kvbench.taskkit import prompts, template_variables
from kvbench.taskkit.names import LM_EVAL


def check(config: RunConfig, model: ModelInfo | None, problems: Problems, *, duplicates: bool = False) -> None:
    """Check settings against each other and against the model, and add every error to `problems`.

    model: what is known about the model; if it is None, checks that need it are left out. duplicates: accept a run in
    which all samples of a question would be equal.
    """
    context = model.context if model else None
    with problems.collect():
        if context is not None and config.max_new_tokens is not None and config.max_new_tokens > context:
            asked = f"--max-new-tokens {config.max_new_tokens}"
            raise UserError(
                f"{asked} exceeds the model's context of {context} tokens, even without a prompt; give fewer."
            )
    with problems.collect():
        adapters.find(config.adapter)
    with problems.collect():
        template_variables.parse(config.template_option)
    _check_budgets(config, context, (model and model.group) or 1, problems)
    with problems.collect():
        _check_data(config, problems)
    for name in config.tasks:
        with problems.collect():
            _check_task(config, load_task(name, config.task_file), model, problems, duplicates)


def check_inputs(config: RunConfig) -> None:
    """Make sure that all inputs exist: the model, chat template, task data, and a sandbox if programs will run.
    Downloads task data and the model's configuration if they are missing, but no weights. Raises KVBenchError."""
    if config.chat_template is not None:
        prompts.load_template(config.chat_template)
    known = models.describe(config.model_place, config.revision)
    info = models.located(config.model_place, config.revision)
    if info != known:
        _check_again(config, info)
    if info.folder is not None:
        vocabulary.check_folder(info.folder, info.config)
    tasks = [load_task(name, config.task_file) for name in config.tasks]
    if any("code" in task.needs for task in tasks):
        from kvbench.scoring import sandbox

        sandbox.require(config.unsafe_run_code)
    for task in tasks:
        task.require()
    task_data.fetch(config)


def _check_again(config: RunConfig, info: ModelInfo) -> None:
    """Repeat `check` with the model's sizes, which were unknown before the model's configuration was downloaded. Raises
    KVBenchError."""
    problems = Problems()
    check(config, info, problems, duplicates=True)
    problems.warnings.clear()  # the first check showed them
    problems.stop()


def refuse_key(key: str | None) -> None:
    """Raise UserError for an API key on the command line, where other users of the machine can read it."""
    if key is not None:
        from kvbench.scoring.judge.settings import NO_ARGV

        raise UserError(NO_ARGV)


def refuse_oracle(name: str, method: Method) -> None:
    """Raise UserError if a method is an oracle, or is combined with one. An oracle knows tokens that the model has yet
    to generate."""
    if method.during("prefill").oracle or method.during("decode").oracle:
        raise UserError(
            f"method {quote(name)} is an oracle: it reads tokens that the model has yet to generate. "
            f"Use 'kvbench replay --method {name}', where the sequence is finished."
        )


def _check_budgets(config: RunConfig, context: int | None, group: int, problems: Problems) -> None:
    for size in config.budgets:
        with problems.collect():
            if context is not None and isinstance(size, int) and size > context:
                raise UserError(
                    f"--budget {size} is above the model's context of {context} tokens. Give a smaller budget."
                )
    for grid in config.grids:
        for method in grid.methods:
            with problems.collect():
                instance = choose.make(method.name, dict(method.options))
                # Some options make a method keep one cache per query head, which raises its smallest budget; the error
                # then names the options.
                name = method.label if instance.per_query_head else method.name
                refuse_oracle(method.name, instance)
                sizes: tuple[Budget | None, ...] = grid.budgets or (None,)
                for budget in sizes if instance.takes_budget or len(grid.methods) == 1 else (None,):
                    check_budget(name, instance, budget, group=group)


def _check_data(config: RunConfig, problems: Problems) -> None:
    """Raise SetupError if --data does not exist, and UserError if it is a file and a task reads no data. Warn if it is
    a folder and no task reads data."""
    if config.data is None:
        return
    data = Path(config.data).expanduser()
    if not os.path.exists(data):
        raise SetupError(f"--data {quote(config.data)} does not exist. Give a folder or file with the data.")
    idle = [n for n in config.tasks if not n.startswith(LM_EVAL) and not load_task(n, config.task_file).manifest]
    if len(idle) == len(config.tasks) or (idle and not data.is_dir()):
        these = few(list(map(quote, idle)), 3)
        reads = f"task {these} reads" if len(idle) == 1 else f"tasks {these} read"
        if not data.is_dir():
            raise UserError(
                f"--data {quote(config.data)} is a file, but {reads} no data. Leave out --data or "
                f"{'the task' if len(idle) == 1 else 'these tasks'}."
            )
        problems.warn(f"{reads} no data; --data {quote(config.data)} has no effect.")


def _check_task(config: RunConfig, task: Task, model: ModelInfo | None, problems: Problems, duplicates: bool) -> None:
    spec = task.gen(model.model_type if model else "")
    limit, size = config.limit_for(task.name), task.size()
    if limit is not None and size is not None and limit > size and not task.endless:
        problems.warn(f"task {quote(task.name)} has {counted(size, 'question')}; --limit {limit} has no effect.")
    with problems.collect():
        samples = config.samples or spec.n
        temperature = spec.temperature if config.temperature is None else config.temperature
        if samples > 1 and temperature == 0 and not duplicates:
            copies = f"{samples} samples at temperature 0 are {samples} copies of one answer"
            raise UserError(f"{copies}. Use --samples 1 or a temperature above 0.")
    with problems.collect():
        if "judge" in task.needs:
            from kvbench.scoring import judge

            judge.check(config.services(), task)
    with problems.collect():
        style = config.prompt_style_for(task.name)
        if style is not None and style not in task.prompt_styles:
            styles = ", ".join(task.prompt_styles)
            raise UserError(f"task {quote(task.name)} has no prompt style {quote(style)}; it has {styles}.")
        _check_template(config, task, spec, model)


def _check_template(config: RunConfig, task: Task, spec: GenSpec, model: ModelInfo | None) -> None:
    chat = prompts.uses_chat(
        spec.chat, config.prompt_style_for(task.name) or task.prompt_styles[0], no_chat_template=config.no_chat_template
    )
    if chat and config.chat_template is None and model is not None and model.has_chat_template is False:
        needs = f"the tokenizer of {quote(model.name)} has no chat template and task {quote(task.name)} needs one"
        raise UserError(f"{needs}. Pass --chat-template FILE or --no-chat-template.")
