"""The parts of a model that tasks and prompts need: tokenizer, chat template and context length, but no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.errors import UserError, counted, quote
from kvbench.records import FollowUp, Images
from kvbench.scoring.boxed import after_thinking
from kvbench.sources.tokenizer import THINKING_TAGS, hidden_tokens
from kvbench.task import Doc, Turn
from kvbench.taskkit import prompts
from kvbench.taskkit.vision import Vision

QUESTION = "user-turn-0f3c"  # a placeholder that occurs in no template
ANSWER = "An answer."  # a placeholder, to find the text that the template adds around an answer
THOUGHTS = tuple(f"<{tag}>\nA thought.\n</{tag}>\n\n{ANSWER}" for tag in THINKING_TAGS)


def special_stops(until: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split stop strings (`until`) into plain texts and special tokens that never show in decoded text. Generation
    stops at the ids of these tokens instead."""
    if not until:
        return (), ()
    special = set(hidden_tokens(tokenizer).values())
    return tuple(s for s in until if s not in special), tuple(s for s in until if s in special)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReader:
    """The tokenizer, chat template and context length of a model, as a `kvbench.task.Reader`.

    chat: whether prompts use the chat template. template: a chat template in place of the tokenizer's. variables: the
    template's variables that the user sets. origin: where the template comes from, for messages. vision: the image
    processor; None if the model reads text only, or no question has images.
    """

    tokenizer: Any
    model_type: str
    context: int
    chat: bool
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    origin: str | None = None
    vision: Vision | None = None

    def count(self, text: str) -> int:
        encoded = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return len(encoded["input_ids"])

    def last_id(self, text: str) -> int:
        """Encode a text without special tokens, and return the id of its last token."""
        return int(self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)["input_ids"][-1])

    def wrapping(self, *, thinking: bool | None = None) -> int:
        """Return how many tokens a prompt has besides the user's text: those of the chat template or, without one, the
        special tokens. thinking: the template's thinking switch; None: the template's default."""
        word = "word"
        doc = Doc(doc_id="", turns=(Turn(question=word),), reference=None)
        return len(self.ids(self.text(doc, thinking=thinking))) - self.count(word)

    def reply_header(self, turn: Turn | None = None, *, thinking: bool | None) -> tuple[int, ...]:
        """Return the tokens that the chat template puts between a user's text and the reply.

        The result is () without a template, or if the template changes or refuses the text. turn: the first turn of a
        document, whose messages before the user's text count; None: no message precedes. thinking: as for `wrapping`.
        """
        if not self.chat:
            return ()
        turn = replace(turn or Turn(question=""), context="", question=QUESTION, images=(), answer_prefix="")
        try:
            text = self.text(Doc(doc_id="", turns=(turn,), reference=None), thinking=thinking)
        except UserError:  # a template may refuse a message that no prompt has
            return ()
        _, found, header = text.rpartition(QUESTION)
        return tuple(prompts.encode(self.tokenizer, header, chat=True)) if found else ()

    def text(self, doc: Doc, *, thinking: bool | None, answers: tuple[str, ...] = ()) -> str:
        """Return the text of the prompt for the turn after `answers`: all user messages so far, with the answers
        between them.

        The last turn's answer prefix follows the assistant header, so that the model continues the prefix. Raises
        UserError if the chat template is missing or fails, or if `chat` is False and a turn has a history of
        messages.

        answers: the model's answers to the earlier turns. thinking: as for `wrapping`.
        """
        turns = doc.turns[: len(answers) + 1]
        if not self.chat:
            return _raw(doc.doc_id, turns, answers)
        messages: prompts.Messages = [{"role": "system", "content": turns[0].system}] if turns[0].system else []
        for turn, answer in zip(turns, answers):
            messages += [*prompts.to_model(turn), {"role": "assistant", "content": turn.answer_prefix + answer}]
        messages += prompts.to_model(turns[-1])
        rendered = prompts.apply(self.tokenizer, messages, thinking, self.template, self.variables, self.origin)
        return rendered + turns[-1].answer_prefix

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt."""
        return self.started(prompts.encode(self.tokenizer, text, chat=self.chat))

    def started(self, ids: list[int]) -> list[int]:
        """Return a prompt's ids, with the start token in front if a vision-language model's template omits it (LLaVA).
        transformers' own processors add the token too."""
        start = prompts.encode(self.tokenizer, "", chat=False) if self.vision else []
        return start + ids if start == [self.tokenizer.bos_token_id] and ids[:1] != start else ids

    def with_images(self, ids: list[int], doc: Doc, turns: int = 1) -> tuple[list[int], Images | None]:
        """Return the prompt's ids with each image's tokens inserted, and the images of the document's first `turns`
        turns. ids: the rendered prompt's ids. Raises UserError unless `ids` holds the image token once per image."""
        if self.vision is None:
            return ids, None
        pictures = self.vision.pictures(doc.turns[:turns])
        if (places := ids.count(self.vision.token)) != len(pictures):
            raise UserError(
                f"question {quote(doc.doc_id)}: the prompt made by the chat template {self.origin} holds "
                f"{quote(self.vision.text)} {counted(places, 'time')}, not once per image ({len(pictures)}). Pass "
                "another --chat-template, or take this text out of the question."
            )
        return self.vision.expand(ids, pictures)

    def without_image_tokens(self, answer: str) -> str:
        """Return an answer without the text of the image token. In the next prompt this text would be read as an
        image."""
        return answer.replace(self.vision.text, "") if self.vision else answer

    def cut(self, turn: Turn, limit: int) -> tuple[Turn, int]:
        """Cut the middle out of a turn whose text has more than `limit` tokens; return the turn and the number of
        tokens removed.

        Half of the remaining tokens come from the start and half from the end. As in LongBench's pred.py, the text is
        cut before the chat template is applied, and the count includes the tokenizer's special tokens. If the remaining
        end does not hold the whole question, all remaining text becomes the question and the context is empty. Raises
        UserError if a turn of more than `limit` tokens has images.
        """
        ids = self.tokenizer(turn.user, return_attention_mask=False)["input_ids"]
        length = len(ids) + (self.vision.added([turn]) if self.vision else 0)
        if length <= limit:
            return turn, 0
        if turn.images:
            raise UserError(
                f"a prompt with images has {length} tokens; the limit is {limit} (--max-prompt-tokens or, without it, "
                "the model's context minus the answer's tokens). kvbench does not cut prompts with images. Raise the "
                "limit or leave the question out."
            )
        half = limit // 2
        kept = "".join(self.tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
        context = kept.removesuffix(turn.question)
        question = turn.question if len(context) < len(kept) else kept
        return replace(turn, context=context if question is not kept else "", question=question), len(ids) - 2 * half


def _raw(question: str, turns: tuple[Turn, ...], answers: tuple[str, ...]) -> str:
    """Return the text of a prompt without a chat template. question: the question's id, for messages."""
    if any(turn.history for turn in turns):
        raise UserError(
            f"question {quote(question)} continues a conversation, which only a chat template can render. "
            "Leave out --no-chat-template, give another --prompt-style, or set chat=True in the GenSpec of the task."
        )
    system = f"{turns[0].system}\n\n" if turns[0].system else ""
    parts = [turn.user + turn.answer_prefix + answer for turn, answer in zip(turns, [*answers, ""])]
    return system + "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class Talk:
    """All turns of a document except its first turn, for `kvbench.records.Request`.

    The engine continues each turn from the cache of the turn before if three conditions hold: `keep` is set, no later
    turn has images, and the chat template only appends text (many templates drop the thinking of earlier answers).
    Otherwise each turn is a new prompt.

    read: function that returns the document, so that the document need not stay in memory.
    """

    read: Callable[[], Doc]
    reader: ModelReader
    thinking: bool | None  # the template's thinking switch; None: the template's default
    keep: bool
    thinks: bool | None = None  # as in `kvbench.task.Output.thinking`

    @property
    def doc(self) -> Doc:
        return self.read()

    @property
    def mode(self) -> str:
        """Return "keep" if later turns continue from the cache, and "reset" if the user asked for a new prompt each
        turn. If the user asked for "keep", but a later turn has images or the chat template changes earlier turns,
        return "reset (images)" or "reset (template)". Rows hold the mode in the column `multi_turn_cache`."""
        if not self.keep:
            return "reset"
        if any(turn.images for turn in self.doc.turns[1:]):
            return "reset (images)"
        return "keep" if all(self._appended(n) for n in range(1, len(self.doc.turns))) else "reset (template)"

    def check_images(self) -> None:
        """Raise UserError unless the prompt with all turns of the document holds the image token once per image."""
        if self.reader.vision:
            text = self.reader.text(self.doc, thinking=self.thinking, answers=(ANSWER,) * (len(self.doc.turns) - 1))
            self.reader.with_images(self.reader.ids(text), self.doc, len(self.doc.turns))

    def follow(self, answers: tuple[str, ...]) -> FollowUp | None:
        if len(answers) >= len(self.doc.turns):
            return None
        if self.mode == "keep":
            appended = self._appended(len(answers)) or ""
            return FollowUp(ids=tuple(prompts.encode(self.reader.tokenizer, appended, chat=True)), fresh=False)
        visible = tuple(self.reader.without_image_tokens(after_thinking(answer, self.thinks)) for answer in answers)
        text = self.reader.text(self.doc, thinking=self.thinking, answers=visible)
        ids, images = self.reader.with_images(self.reader.ids(text), self.doc, len(answers) + 1)
        return FollowUp(ids=tuple(ids), fresh=True, images=images)

    def tokens(self) -> int:
        """Return how many tokens all later turns add to the first turn's prompt, with a short placeholder for each
        answer."""
        last = len(self.doc.turns) - 1
        empty = [self.reader.text(self.doc, thinking=self.thinking, answers=(ANSWER,) * n) for n in (0, last)]
        vision = self.reader.vision
        images = vision.added(self.doc.turns[1:]) if vision else 0
        return self.reader.count(empty[-1]) - self.reader.count(empty[0]) + images

    def _appended(self, turn: int) -> str | None:
        """Return the text that the template puts between the answer of turn number `turn` (from 1) and the next answer.
        None if the template also changes text before the end of that answer."""
        appended = None
        for answer in (ANSWER,) if self.thinks is False else (*THOUGHTS, ANSWER):
            answers = (answer,) * turn
            before = self.reader.text(self.doc, thinking=self.thinking, answers=answers[1:]) + answer
            whole = self.reader.text(self.doc, thinking=self.thinking, answers=answers)
            if not whole.startswith(before):
                return None
            appended = whole.removeprefix(before)
        return appended
