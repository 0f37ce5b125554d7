"""How the questions of a training's data file become prompts: prompt style, thinking and system message."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, bare, quote
from kvbench.registry import did_you_mean
from kvbench.task import Turn
from kvbench.taskkit.prompts import STYLES, Style, effective_thinking, template_text, uses_chat
from kvbench.taskkit.reader import ModelReader
from kvbench.taskkit.template_variables import reads_thinking

if TYPE_CHECKING:
    from kvbench.engine.model.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """Settings of prompts with the meaning that they have in ``kvbench run``.

    thinking: whether the chat template turns thinking on; None: the template's default. prompt_style: name of the
    questions' style: wording, stop strings and answer marker. system: the system message for rows of the data file that
    have none. preset: the preset that sets `thinking`; None: the user sets it.
    """

    thinking: bool | None = None
    prompt_style: str = "plain"
    system: str | None = None
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.prompt_style not in STYLES:
            near = did_you_mean(self.prompt_style, list(STYLES))
            raise UserError(f"unknown prompt style {quote(self.prompt_style)}.{near} There are {', '.join(STYLES)}.")

    def settings(self) -> dict[str, Any]:
        """Return, by name, the settings that differ from their defaults."""
        given = {"thinking": self.thinking, "system": self.system}
        style = {"prompt_style": self.prompt_style} if self.prompt_style != "plain" else {}
        return {name: value for name, value in given.items() if value is not None} | style

    @property
    def style(self) -> Style:
        return STYLES[self.prompt_style]

    def asked(self) -> dict[str, Any]:
        """Return the settings on which answers and their judgement depend: `settings`, and the stop strings and answer
        marker of a style that has them."""
        has = {"stop_strings": self.style.stop, "marker": self.style.marker}
        return self.settings() | {name: value for name, value in has.items() if value}

    def reader(self, loaded: LoadedModel) -> ModelReader:
        """Return the reader that makes prompts for a model.

        The reader uses the tokenizer's chat template if there is one, unless the prompt style is raw text.

        Raises UserError if the template cannot turn thinking on or off as the user asked. A model that never thinks
        counts as one with thinking off.
        """
        chat = uses_chat(template_text(loaded.tokenizer) is not None, self.prompt_style)
        thinks = self.thinks(loaded, chat)
        # A template may have the switch but no tags that show its effect, as Gemma 4's.
        unseen = thinks is None and chat and reads_thinking(template_text(loaded.tokenizer) or "")
        if self.thinking is not None and bool(thinks) is not self.thinking and not unseen:
            flags = ("--thinking", "--no-thinking") if self.thinking else ("--no-thinking", "--thinking")
            cure = f"--preset {bare(self.preset)} asks for it: add {flags[1]}" if self.preset else f"omit {flags[0]}"
            raise UserError(f"prompts for this model cannot turn thinking {'on' if self.thinking else 'off'}; {cure}.")
        kind = loaded.model.config.model_type
        return ModelReader(tokenizer=loaded.tokenizer, model_type=kind, context=loaded.context, chat=chat)

    def thinks(self, loaded: LoadedModel, chat: bool) -> bool | None:
        """Return whether answers have a thinking block; None if unknown. chat: whether prompts use a chat template."""
        return effective_thinking(loaded.tokenizer, self.thinking, chat=chat)

    def turn(self, question: str, context: str = "", system: str = "") -> Turn:
        """Make the first turn from a question, in the wording of `prompt_style`. context: text before the question.
        system: the row's system message, if it has one."""
        turn = self.style.turn(question)
        before = context if not context or context.endswith("\n") else context + "\n\n"
        return replace(turn, context=before, system=system or self.system or turn.system)

    def message(self, text: str, context: str = "", system: str = "") -> Turn:
        """Make the first turn from the first message of a conversation, without the wording of `prompt_style`."""
        return replace(self, prompt_style="plain").turn(text, context, system)
