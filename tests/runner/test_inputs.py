"""Answers of a model without end tokens: something else must be able to end them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import UserError
from kvbench.runner.inputs import _check_end
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
