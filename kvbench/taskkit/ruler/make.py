"""Make the prompts of any RULER subtask."""

from __future__ import annotations

from kvbench.errors import UserError, quote
from kvbench.taskkit.ruler.cwe import CommonWords
from kvbench.taskkit.ruler.fit_length import Prompts, Room
from kvbench.taskkit.ruler.fwe import FrequentWords
from kvbench.taskkit.ruler.material import Sources
from kvbench.taskkit.ruler.niah import Needles
from kvbench.taskkit.ruler.qa import QuestionAnswering
from kvbench.taskkit.ruler.recipes import SUBTASKS, Row
from kvbench.taskkit.ruler.vt import VariableTracking

KINDS: dict[str, type[Prompts]] = {  # by the name of the family
    "niah": Needles,
    "vt": VariableTracking,
    "cwe": CommonWords,
    "fwe": FrequentWords,
    "qa": QuestionAnswering,
}


def make_rows(subtask: str, room: Room, material: Sources, n: int) -> list[Row]:
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
    return KINDS[recipe.family](room=room, material=material, **recipe.settings).rows(n)
