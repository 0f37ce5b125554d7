"""Turns the error of a training whose memory ran out into one that names settings of the training as cures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvbench.console import faults
from kvbench.errors import SetupError, joined
from kvbench.train.plan import SMALLER

LENGTHS = ("max_prompt", "max_tokens", "tokens")  # settings that limit the tokens of texts
OF_DATA = ("precision",)  # settings in `SMALLER` that lower the memory of the work before the first step


@contextmanager
def explained(settings: Mapping[str, Any], names: Iterable[str] = SMALLER) -> Iterator[None]:
    """Inside the `with` statement, turn an exception that means that memory ran out into a SetupError with cures.

    settings: the value of every setting of the training, by name. names: the settings in `SMALLER` that lower the
    memory of the work inside the `with` statement. The error names those of them whose value in `SMALLER` takes less
    memory than the present value.
    """
    try:
        yield
    except Exception as error:
        if not faults.out_of_memory(error):
            raise
        options = [f"--opt {name}={SMALLER[name]}" for name in names if _lowers(name, settings)]
        limits = ", ".join(f"--opt {name}=N" for name in LENGTHS if name in settings)
        shorter = [f"shorter texts ({limits})"] if limits else []
        cures = joined([*options, *shorter, "a larger machine"], "or")
        raise SetupError(
            f"out of memory ({faults.first_line(error)}). Use {cures}; --dry-run shows the memory of each phase."
        ) from error


def _lowers(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether the value in `SMALLER` takes less memory than the setting's present value; False if the recipe
    lacks the setting. A smaller number takes less memory, but 0 takes the most: it means no adapter (`lora`)."""
    value = SMALLER[name]
    now = settings.get(name, value)
    return bool(now != value) and not (isinstance(now, int) and isinstance(value, int) and 0 < now < value)
