"""Rows of any subtask."""

from __future__ import annotations

from kvbench.errors import UserError, show
from kvbench.ruler.cwe import CommonWords
from kvbench.ruler.fwe import FrequentWords
from kvbench.ruler.material import Material
from kvbench.ruler.niah import Needles
from kvbench.ruler.qa import QuestionAnswering
from kvbench.ruler.recipes import SUBTASKS, Row
from kvbench.ruler.room import Room
from kvbench.ruler.vt import VariableTracking


def make_rows(subtask: str, room: Room, material: Material, n: int) -> list[Row]:
    """The first `n` rows of a subtask.

    Raises:
        UserError: the length is too small, or there are fewer than `n` questions.
        SetupError: words, essays or documents cannot be had.
    """
    if room.length <= room.new_tokens:
        raise room.too_short()
    if not room.count("word"):  # such a tokenizer is an empty one, and nothing would ever be long enough
        raise UserError(f"task {show(room.name)}: the tokenizer makes no tokens of a word.")
    recipe = SUBTASKS[subtask]
    match recipe.family:
        case "niah":
            return Needles(room=room, material=material, **recipe.settings).rows(n)
        case "vt":
            return VariableTracking(room=room).rows(n)
        case "cwe":
            return CommonWords(room=room, material=material).rows(n)
        case "fwe":
            return FrequentWords(room=room).rows(n)
        case _:
            return QuestionAnswering(room=room, material=material, **recipe.settings).rows(n)
