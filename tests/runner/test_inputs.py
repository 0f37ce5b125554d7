"""Inputs of a run: what must be able to end an answer, and the record of the tasks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import UserError
from kvbench.registry import tasks
from kvbench.report.scoring import Scoring
from kvbench.runner.inputs import Inputs, _check_end
from kvbench.task import GenSpec

NO_END: Any = SimpleNamespace(eos_token_id=None, get_text_config=lambda: SimpleNamespace(eos_token_id=None))


def check(where: Path, *prompts: tuple[tuple[str, ...], tuple[int, ...]]) -> None:
    """prompts: the stop strings and stop tokens of each prompt."""
    config = RunConfig(grids=(Grid(methods=(MethodChoice(name="full"),), budgets=(), tasks=("gsm8k",)),), model="m")
    made = [SimpleNamespace(spec=GenSpec(max_new_tokens=8, stop=stop), stop_ids=ids) for stop, ids in prompts]
    works: Any = {"gsm8k": SimpleNamespace(spec=GenSpec(max_new_tokens=8), prompts=made)}
    _check_end(config, str(where), NO_END, NO_END, works)


def test_a_stop_string_or_token_of_every_prompt_is_enough(tmp_path: Path) -> None:
    check(tmp_path, (("Question:",), ()), ((), (7,)))
    with pytest.raises(UserError, match="task 'gsm8k' has no stop string"):
        check(tmp_path, (("Question:",), ()), ((), ()))


def test_the_record_states_how_tasks_are_scored() -> None:
    """For a report where a task is not installed."""
    made = {name: SimpleNamespace(task=tasks.get(name)(), data={}, prompts_hash=str) for name in ("walk", "mt_bench")}
    stated = Inputs.tasks(SimpleNamespace(works=made))  # type: ignore[arg-type]
    for name in made:
        own = Scoring.of("gone", [{}, {"tasks": {"gone": stated[name]}}])
        assert own == Scoring.of(name, [])
        assert own.votes is (name == "walk")
