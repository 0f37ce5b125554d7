"""Parts of the way from a document to a prompt (`reader.ModelReader.text` joins them): prompt styles, chat template,
thinking switch, token ids.

A rendered template normally holds the special tokens, so `encode` adds none (Llama and DeepSeek tokenizers would add a
second start token). Raw text gets the tokenizer's own special tokens. Templates run only in transformers' sandboxed
Jinja. Not covered: few-shot examples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvbench.console.faults import words
from kvbench.errors import UserError, quote
from kvbench.scoring.boxed import thinking_tags
from kvbench.sources.tokenizer import TODAY
from kvbench.task import IMAGE, Turn
from kvbench.taskkit import template_variables

PROBE = "1 + 1 = ?"  # a message that shows how a template renders
Messages = list[dict[str, Any]]  # as chat templates take them
_PROBE: Messages = [{"role": "user", "content": PROBE}]
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

_LIGHTEVAL = (
    "Solve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before answering."
)
_SIMPLE_EVALS = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $ANSWER (without quotes) where $ANSWER is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:", and you do not need to use a \\boxed command.',
)
_FORESIGHTKV = "Please solve the following problem step by step and put the final answer within \\boxed{}."
_RKV = (
    "You are given a math problem.\n\nProblem: ",
    "\n\n You need to solve the problem step by step. First, you need to provide the chain-of-thought, "
    "then provide the final answer."
    "\n\n Provide the final answer in the format: Final answer:  \\boxed{}",
)

_LM_EVAL_STOP = ("Question:", "</s>", "<|im_end|>", "<|eot_id|>")  # `until` of gsm8k and aime24 in lm-eval 0.4.13


@dataclass(frozen=True, slots=True)
class Style:
    """A prompt style: the text before and after a problem.

    system: the system message; None: no message. `chat` False: no chat template, even if the task would use one. stop:
    texts that end an output, in addition to the task's. marker: the text after which the prompt asks for the answer.
    """

    name: str
    before: str
    after: str
    system: str | None = None
    chat: bool = True
    stop: tuple[str, ...] = ()
    marker: str = ""

    def turn(self, problem: str) -> Turn:
        return Turn(question=self.before + problem + self.after, system=self.system)


_STYLES = (
    Style("default", "", f"\n\n{INSTRUCTION}"),
    Style("gkv", "", "", system=INSTRUCTION),
    Style("foresightkv", f"{_FORESIGHTKV}\n", ""),
    Style("rkv", *_RKV, chat=False),
    Style("lighteval", f"{_LIGHTEVAL}\n\n", ""),
    Style("simple_evals", *_SIMPLE_EVALS, marker="Answer:"),
    Style("lm_eval", "Question: ", "\nAnswer:", chat=False, stop=_LM_EVAL_STOP),
    Style("plain", "", ""),
)
STYLES = {style.name: style for style in _STYLES}
PLAIN = STYLES["plain"]


def uses_chat(chat: bool, style: str, *, no_chat_template: bool = False) -> bool:
    """Return whether prompts use the chat template.

    chat: whether the task would use one. style: the prompt style. no_chat_template: whether the user gave
    --no-chat-template.
    """
    raw = style in STYLES and not STYLES[style].chat  # styles outside STYLES belong to one task
    return chat and not raw and not no_chat_template


def chat_cure(chat: bool, *, no_chat_template: bool) -> str:
    """Return what the user can do about prompts that need the chat template, if `uses_chat` is False. The arguments are
    those of `uses_chat`."""
    if no_chat_template:
        return "Leave out --no-chat-template."
    return "Give another --prompt-style." if chat else "Set chat=True in the GenSpec of the task."


def load_template(path: str | Path) -> str:
    """Return the text of a --chat-template file. Raises UserError if it cannot be read or is not Jinja."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"chat template {quote(path)} is not UTF-8 (offset {error.start}). Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read chat template {quote(path)}: {getattr(error, 'strerror', None) or error}. "
            "Check its path and permissions."
        ) from None
    template_variables.check_syntax(text, str(path))
    return text


def template_text(tokenizer: Any, chat_template: str | None = None) -> str | None:
    """Return the text of the chat template that a run uses; None without one. The run records the text's hash.
    chat_template: the text of a template that the user gave in place of the tokenizer's template."""
    if chat_template is not None:
        return chat_template
    try:
        text = tokenizer.get_chat_template()
    except (ValueError, AttributeError):  # no template, or several without a default
        return None
    return str(text) if text else None


def check_template(
    tokenizer: Any,
    *,
    chat: bool,
    chat_template: str | None = None,
    variables: Mapping[str, Any] = NO_VARIABLES,
    origin: str | None = None,
) -> None:
    """Raise UserError if the chat template is missing, cannot render a prompt, or leaves any of `variables` unread.

    chat: whether prompts use the chat template; False: nothing is checked.
    variables: as `template_variables.parse` returns them. origin: the template's file, for messages.
    """
    if chat:
        apply(tokenizer, _PROBE, None, chat_template, variables, origin)
        template = template_text(tokenizer, chat_template)
        if template is not None:
            template_variables.check_names(variables, template, _named(chat_template, origin))


def to_model(turn: Turn) -> Messages:
    """Return a turn's messages before the model's answer: its history and the user's text, without `turn.system`."""
    history = [{"role": role, "content": text} for role, text in turn.history]
    return [*history, {"role": "user", "content": content(turn)}]


def content(turn: Turn) -> str | list[dict[str, str]]:
    """Return a turn's text in the form that a chat template takes: a text or, with images, a list of texts and image
    placeholders."""
    if not turn.images:
        return turn.user
    parts: list[dict[str, str]] = []
    for number, text in enumerate(turn.user.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts


def encode(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Return the token ids of a rendered prompt. chat: whether the chat template rendered it; without the template, the
    tokenizer adds its special tokens."""
    ids = tokenizer(text, add_special_tokens=not chat, return_attention_mask=False)["input_ids"]
    return [int(i) for i in ids]


def encode_to_context(tokenizer: Any, text: str, turn: Turn, chat: bool) -> tuple[list[int], int]:
    """Return the token ids of a rendered prompt, and how many of its first tokens lie before the end of the turn's
    context.

    Raises UserError if the template changed the turn's text, or if the tokenizer does not say which characters a token
    covers.
    """
    end = _context_end(text, turn)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "--compress query-agnostic needs the end of the context, but the tokenizer does not say which text a token "
            "covers. Use --compress query-aware."
        )
    encoded = tokenizer(text, add_special_tokens=not chat, return_attention_mask=False, return_offsets_mapping=True)
    ids, offsets = [int(i) for i in encoded["input_ids"]], encoded["offset_mapping"]
    leading = next((i for i, (_, stop) in enumerate(offsets) if stop > end), len(ids))
    return ids, leading


def _context_end(text: str, turn: Turn) -> int:
    """Return the number of characters of a rendered prompt up to the end of the turn's context. A template writes
    images in its own way. So in a turn with images, only the text after the last image is searched for."""
    context, whole = turn.context, turn.user
    if turn.images:
        context, whole = (text.rpartition(IMAGE)[2] for text in (context, whole))
    user, lead = whole.strip(), len(whole) - len(whole.lstrip())  # templates often strip a turn
    place = text.rfind(user)
    if place < 0:
        raise UserError(
            "--compress query-agnostic needs the end of the context, but the chat template changes the prompt's text. "
            "Use --compress query-aware or another --chat-template."
        )
    return place + len(context) - lead


def effective_thinking(
    tokenizer: Any,
    thinking: bool | None,
    *,
    chat: bool,
    chat_template: str | None = None,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> bool | None:
    """Return whether outputs will hold a thinking block, which the scorer must then expect; None if it is unknown.

    The result is None without a chat template, or if the template has no tags of thinking. Such a model may mark its
    thinking by other means, as GPT-OSS and Gemma 4 do, which scorers cannot tell from the answer. For all other
    templates, the function renders a prompt, and the text after the question decides. The text before it does not
    count, because system messages may describe thinking blocks.

    - The text ends inside an open thinking block: the result is True, even if `thinking` is False, because the template
      then has no switch (R1 distills).
    - The last thinking block of the text is closed: the result is False.
    - The text holds no thinking block, and the template reads `enable_thinking`: the result is `thinking`.
    - It holds none, and the template reads one of `SWITCHES` instead: the result is this variable's value in
      `variables`, or None.
    - It holds none, and the template has no switch: the result is None if `thinking` is True, because the model alone
      decides; otherwise it is `thinking`.
    """
    text = template_text(tokenizer, chat_template) if chat else None
    if text is None or thinking_tags(text) == (-1, -1):
        return None
    prompt = apply(tokenizer, _PROBE, thinking, chat_template, variables, None)
    behind = prompt[max(0, prompt.rfind(PROBE)) :]
    opened, closed = thinking_tags(behind)
    if opened > closed:
        return True
    if closed >= 0:
        return False  # templates with thinking off write an empty, closed block
    if template_variables.reads_thinking(text):
        return thinking
    if template_variables.reads_switch(text):
        return template_variables.switched(variables)
    return None if thinking else thinking


@functools.lru_cache(maxsize=4)
def _needs_parts(tokenizer: Any, chat_template: str | None) -> bool:
    """Return whether a template ignores messages that are plain text and takes only lists of parts, as LLaVA's does."""

    def shows(content: str | list[dict[str, str]]) -> bool:
        messages = [{"role": "user", "content": content}]
        return PROBE in str(tokenizer.apply_chat_template(messages, tokenize=False, chat_template=chat_template))

    with contextlib.suppress(Exception):  # a template may raise any error; `apply` reports it
        return not shows(PROBE) and shows([{"type": "text", "text": PROBE}])
    return False


def with_thinking(variables: Mapping[str, Any], thinking: bool | None) -> dict[str, Any]:
    """Return a template's variables and, unless `thinking` is None, the variable that switches thinking. A template
    that asks for today's date gets `TODAY`, so that a run has the same prompts on every day."""
    switch = {} if thinking is None else {template_variables.THINKING: thinking}
    return {"strftime_now": TODAY.strftime, **variables, **switch}


def _named(chat_template: str | None, origin: str | None) -> str:
    return origin or ("of the tokenizer" if chat_template is None else "from --chat-template")


def apply(
    tokenizer: Any,
    messages: Messages,
    thinking: bool | None,
    chat_template: str | None,
    variables: Mapping[str, Any],
    origin: str | None,
    *,
    continued: bool = False,
) -> str:
    """Return the messages as the chat template renders them. Raises UserError if the template is missing or fails.

    continued: whether the model continues the last message; False: it begins a new one.
    """
    import jinja2

    if _needs_parts(tokenizer, chat_template):
        texts = ([{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else None for m in messages)
        messages = [message | ({"content": text} if text else {}) for message, text in zip(messages, texts)]
    given = with_thinking(variables, thinking)
    name = _named(chat_template, origin)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            chat_template=chat_template,
            **given,
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"chat template {name}, line {error.lineno}: {error.message}.") from None
    except (
        Exception
    ) as error:  # no template, or an error of the template: raise_exception(...), an undefined name, a sandbox refusal
        if template_text(tokenizer, chat_template) is None:
            model = getattr(tokenizer, "name_or_path", "") or "this model"
            raise UserError(
                f"the tokenizer of {quote(model)} has no chat template, which the prompts need. "
                "Pass --chat-template FILE or --no-chat-template."
            ) from None
        why = quote(words(error) or type(error).__name__)
        raise UserError(f"chat template {name} fails: {why}. Correct or replace the template.") from None
    return str(text)
