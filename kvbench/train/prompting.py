"""How the questions of a training's data file become prompts: prompt style, thinking and system message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, quote
from kvbench.registry import did_you_mean
from kvbench.task import Turn
from kvbench.taskkit.prompts import STYLES, effective_thinking, template_text, uses_chat
from kvbench.taskkit.reader import ModelReader

if TYPE_CHECKING:
    from kvbench.engine.model.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """Settings of prompts with the meaning that they have in ``kvbench run``.

    thinking: the value of the chat template's switch; None: the template's default. prompt_style: the wording of
    questions. system: the system message of rows that have none.
    """

    thinking: bool | None = None
    prompt_style: str = "plain"
    system: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_style not in STYLES:
            near = did_you_mean(self.prompt_style, list(STYLES))
            raise UserError(f"no prompt style {quote(self.prompt_style)}.{near} There are {', '.join(STYLES)}.")

    def settings(self) -> dict[str, Any]:
        """Return the settings that the user gave, by name."""
        given = {"thinking": self.thinking, "system": self.system}
        style = {"prompt_style": self.prompt_style} if self.prompt_style != "plain" else {}
        return {name: value for name, value in given.items() if value is not None} | style

    def reader(self, loaded: LoadedModel) -> ModelReader:
        """Return the reader that makes prompts for a model; it uses the tokenizer's chat template if there is one.

        Raises UserError if the template does not switch thinking as the user asked. For a model that never thinks,
        thinking counts as off.
        """
        chat = uses_chat(template_text(loaded.tokenizer) is not None, self.prompt_style)
        if self.thinking is not None and bool(self.thinks(loaded, chat)) is not self.thinking:
            flag = "--thinking" if self.thinking else "--no-thinking"
            raise UserError(
                f"the model's prompts do not turn thinking {'on' if self.thinking else 'off'}; omit {flag}."
            )
        kind = loaded.model.config.model_type
        return ModelReader(tokenizer=loaded.tokenizer, model_type=kind, context=loaded.context, chat=chat)

    def thinks(self, loaded: LoadedModel, chat: bool) -> bool | None:
        """Return whether answers hold a thinking block; None if unknown."""
        return effective_thinking(loaded.tokenizer, self.thinking, chat=chat)

    def turn(self, question: str, context: str = "", system: str = "") -> Turn:
        """Return a question as a first turn. context: text before it; system: the row's own system message."""
        turn = STYLES[self.prompt_style].turn(question)
        before = context if not context or context.endswith("\n") else context + "\n\n"
        return replace(turn, context=before, system=system or self.system or turn.system)

    def message(self, text: str, context: str = "", system: str = "") -> Turn:
        """Return the first message of a conversation as a turn, without the wording of `prompt_style`."""
        return replace(self, prompt_style="plain").turn(text, context, system)
