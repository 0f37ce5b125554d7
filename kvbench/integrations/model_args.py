"""Read lm-eval's ``--model_args`` as kvbench settings, named as in ``kvbench run``.

An option of a method has the method's name as prefix: ``gkv.alpha=0.9``. lm-eval turns values that look like numbers
into numbers, so a revision like 1234567 must be quoted: ``revision='1234567'``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.config.parsers import budget, choice, parse, protection, text, unknown_key
from kvbench.config.plugins import load_plugins
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.config.settings import PARSERS
from kvbench.errors import SetupError, UserError
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.options import check_budget

# Settings of `kvbench run` that lm-eval's tasks and flags decide, or that do not apply to lm-eval.
NOT_HERE = (
    *("task_file", "limit", "samples", "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop"),
    *("prompt_style", "no_chat_template", "max_prompt_tokens", "multi_turn", "compress", "attn", "keep_prompts"),
    *("judge", "judge_model", "judge_key_env", "judge_mode", "unsafe_run_code"),
)
SETTINGS = tuple(name for name in PARSERS if name not in NOT_HERE)
OWN = ("method", "budget", "protect", "truncate", "think_end_token")
TEXTS = ("method", "protect", "think_end_token", *(name for name in SETTINGS if PARSERS[name] is text))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgs:
    """The parsed ``--model_args`` of lm-eval: a run's settings, one method, one budget, and two arguments of lm-eval's
    model `hf`."""

    run: RunConfig  # the settings shared with `kvbench run`
    choice: MethodChoice
    budget: int | float | None
    truncate: str = "none"  # "left" drops the first tokens of a prompt that is too long, as lm-eval's `hf` model does
    think_end_token: str | None = None  # token after which the answer begins, as in `hf`

    def method(self) -> Method:
        return choose.make(self.choice.name, dict(self.choice.options))


def read(arguments: Mapping[str, Any], *, device: str | None, batch_size: int | str | None) -> ModelArgs:
    """Check and convert lm-eval's model_args. Raises UserError for an invalid argument.

    device, batch_size: lm-eval's flags of these names. A `batch_size` above its default 1 is the number of slots,
    unless the arguments give `slots`.
    """
    values = {key: value for key, value in arguments.items() if value is not None}
    if device is not None:
        values["device"] = device
    if "slots" not in values and str(batch_size).isdigit() and int(str(batch_size)) > 1:
        values["slots"] = int(str(batch_size))
    with in_its_words():
        return _read(values)


def _read(values: dict[str, Any]) -> ModelArgs:
    options = [(*key.rsplit(".", 1), str(values.pop(key))) for key in list(values) if "." in key]
    for key, value in values.items():
        if key not in (*SETTINGS, *OWN):
            raise UserError(f"{unknown_key(key, (*SETTINGS, *OWN))} Options of a method are written METHOD.NAME=VALUE.")
        if key in TEXTS and not isinstance(value, str):
            raise UserError(
                f"{key} was read as {value!r}, not as text; put single quotes round the value and double quotes round "
                f"the whole argument, as in \"{key}='...'\"."
            )
    if "plugin" in values:
        load_plugins(parse("plugin", PARSERS["plugin"], values["plugin"]))
    name = choose.canonical(values.get("method", "full"))
    pairs = (choose.addressed(name, f"{method}.{key.replace('-', '_')}", value) for method, key, value in options)
    method = choose.parse(name, [pair for of_option in pairs for pair in of_option])
    size = parse("budget", budget, values["budget"]) if "budget" in values else None
    check_budget(name, method, size, word="budget")
    replaced = parse("protect", protection, values.get("protect", "own"))
    chosen = MethodChoice(name=name, options=choose.changed(name, method)).under(replaced, "protect")
    method = choose.make(name, dict(chosen.options))
    grid = Grid(methods=(chosen,), budgets=() if size is None else (size,), tasks=())
    settings = {key: parse(key, PARSERS[key], values[key]) for key in SETTINGS if key in values}
    return ModelArgs(
        run=RunConfig(grids=(grid,), **settings),
        choice=chosen,
        budget=size,
        truncate=parse("truncate", choice("none", "left"), values.get("truncate", "none")),
        think_end_token=values.get("think_end_token"),
    )


@contextlib.contextmanager
def in_its_words() -> Iterator[None]:
    """Reword errors raised in the `with` block: they name arguments (``prefill``) instead of flags (``--prefill``)."""
    try:
        yield
    except (UserError, SetupError) as error:
        message = re.sub(r"--([a-z_-]+)", r"\1", str(error).replace("--method-opt ", ""))
        raise type(error)(f"model_args: {message}") from error
