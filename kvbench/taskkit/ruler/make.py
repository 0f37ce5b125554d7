"""Make the prompts of any RULER subtask."""

from __future__ import annotations

from kvbench.errors import UserError, quote
from kvbench.taskkit.ruler.cwe import CommonWords
from kvbench.taskkit.ruler.fit_length import Room
from kvbench.taskkit.ruler.fwe import FrequentWords
from kvbench.taskkit.ruler.material import Material
from kvbench.taskkit.ruler.niah import Needles
from kvbench.taskkit.ruler.qa import QuestionAnswering
from kvbench.taskkit.ruler.recipes import SUBTASKS, Row
from kvbench.taskkit.ruler.vt import VariableTracking


def make_rows(subtask: str, room: Room, material: Material, n: int) -> list[Row]:
    """Return the first `n` prompts of a RULER subtask. room: how long the prompts may be. material: the source texts.

    Raises SetupError if words, essays or documents are unavailable. Raises UserError if prompts do not fit into the
    length, or if the subtask has fewer than `n` questions.
    """
    if room.length <= room.new_tokens:
        raise room.too_short()
    if not room.count("word"):  # a tokenizer without tokens would let a prompt grow for ever
        raise UserError(
            f"task {quote(room.name)}: the tokenizer makes no tokens of the text 'word'; check the model's tokenizer "
            "files."
        )
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
