"""Prompt styles, chat templates, thinking, and the errors for templates that are missing or broken."""

from __future__ import annotations

import pytest
from support.chat_templates import (
    CHANNELS,
    OPEN,
    OTHER,
    PLAIN,
    SEED,
    STRIPS,
    SWITCH,
    SWITCHED_CHANNELS,
    doc,
    render,
    tokenizer,
)

from kvbench.errors import UserError
from kvbench.task import Doc, Turn
from kvbench.taskkit.prompts import (
    INSTRUCTION,
    STYLES,
    check_template,
    effective_thinking,
    encode,
    encode_to_context,
    load_template,
    template_text,
    uses_chat,
)


def test_styles_hold_the_problem_once_and_the_published_wording():
    for style in STYLES.values():
        turn = style.turn("PROBLEM {x}")
        assert turn.user.count("PROBLEM {x}") == 1
        assert "{{" not in turn.user
    assert STYLES["default"].turn("P") == Turn(question=f"P\n\n{INSTRUCTION}")
    assert STYLES["gkv"].turn("P") == Turn(question="P", system=INSTRUCTION)
    foresight = "Please solve the following problem step by step and put the final answer within \\boxed{}.\nP"
    assert STYLES["foresightkv"].turn("P").user == foresight
    assert STYLES["rkv"].turn("P").user.endswith("Final answer:  \\boxed{}")
    assert STYLES["lm_eval"].turn("P").user == "Question: P\nAnswer:"
    assert "$\\boxed{ANSWER}$. I hope it is correct" in STYLES["lighteval"].turn("P").user
    assert "Answer: $ANSWER" in STYLES["simple_evals"].turn("P").user


def test_uses_chat():
    assert uses_chat(True, "default")
    assert not uses_chat(True, "rkv")
    assert not uses_chat(False, "default")
    assert not uses_chat(True, "default", no_chat_template=True)


def test_chat_prompt_has_system_header_switch_and_prefix():
    tok = tokenizer(SWITCH)
    text = render(doc(system="S", context="C ", answer_prefix="It is"), tok, chat=True, thinking=True)
    assert text == "<|system|>S\n<|user|>C 1+1?\n<|assistant|>\nIt is"
    off = render(doc(answer_prefix="It is"), tok, chat=True, thinking=False)
    assert off.endswith("<|assistant|>\n<think>\n\n</think>\n\nIt is")
    assert render(doc(), tok, chat=True, chat_template=PLAIN) == "<s>[user]1+1?[assistant]"


def test_raw_prompt_needs_no_template():
    tok = tokenizer(None)
    assert render(doc(system="S", context="C "), tok, chat=False) == "S\n\nC 1+1?"
    check_template(tok, chat=False)


def test_earlier_messages_of_a_conversation_stand_before_the_question():
    tok, said = tokenizer(SWITCH), (("user", "Hello 1+1?"), ("assistant", "Hi"))
    asked = doc(system="S", history=said)
    text = render(asked, tok, chat=True)
    assert text == "<|system|>S\n<|user|>Hello 1+1?\n<|assistant|>Hi\n<|user|>1+1?\n<|assistant|>\n"
    _, leading = encode_to_context(tok, text, asked.turns[0], True)
    assert text[:leading].endswith("Hi\n<|user|>")  # a token is a character here
    with pytest.raises(UserError, match=r"^question 'q' continues a conversation, which only a chat template"):
        render(asked, tok, chat=False)


def test_one_start_token_whatever_the_way():
    tok = tokenizer(PLAIN)
    chat = encode(tok, render(doc(), tok, chat=True), chat=True)
    raw = encode(tok, render(doc(), tok, chat=False), chat=False)
    assert chat.count(0) == raw.count(0) == 1
    assert chat[0] == raw[0] == 0
    assert all(type(i) is int for i in chat)


@pytest.mark.parametrize(
    ("template", "asked", "expected"),
    [
        *((SWITCH, True, True), (SWITCH, False, False), (OPEN, True, True), (OPEN, False, True), (PLAIN, True, None)),
        *((OTHER, True, None), (OTHER, False, None), (CHANNELS, True, None), (STRIPS, True, None)),
        *((SWITCHED_CHANNELS, True, None), (SEED, True, None), (SEED, False, False)),
    ],
)
def test_effective_thinking(template: str, asked: bool, expected: bool | None):
    assert effective_thinking(tokenizer(template), asked, chat=True) is expected


def test_effective_thinking_of_raw_text_is_unknown():
    assert effective_thinking(tokenizer(SWITCH), True, chat=False) is None


def test_missing_template_names_the_model():
    with pytest.raises(UserError) as caught:
        check_template(tokenizer(None), chat=True)
    assert str(caught.value) == (
        "the tokenizer of 'org/x' has no chat template, which the prompts need. "
        "Pass --chat-template FILE or --no-chat-template."
    )
    check_template(tokenizer(None), chat=True, chat_template=PLAIN)


def test_template_errors_say_file_and_line(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}\n{{ m.content }}\n{% endfor %}\n{{ } }}", encoding="utf-8")
    with pytest.raises(UserError, match=r"chat template \S*t\.jinja, line 4: unexpected '}'"):
        load_template(file)
    with pytest.raises(UserError, match="fails: 'no system role'"):
        render(doc(), tokenizer("{{ raise_exception('no system role') }}"), chat=True)
    for template in ("{{ 1 / 0 }}", "{{ a.b.c }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"):
        with pytest.raises(UserError, match="chat template from --chat-template fails"):
            render(doc(), tokenizer(None), chat=True, chat_template=template)


@pytest.mark.parametrize(
    "attack",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}"],
)
def test_templates_are_sandboxed(attack: str):
    with pytest.raises(UserError, match="fails"):
        render(doc(), tokenizer(attack), chat=True)


def test_template_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name, what in (("latin", "not UTF-8"), ("none", "cannot read"), (".", "cannot read"), ("a\0b", "cannot read")):
        with pytest.raises(UserError, match=what):
            load_template(tmp_path / name if name != "a\0b" else "a\0b")


def test_template_text_is_what_is_in_force():
    assert template_text(tokenizer(PLAIN)) == PLAIN
    assert template_text(tokenizer(PLAIN), OPEN) == OPEN
    assert template_text(tokenizer(None)) is None


@pytest.mark.parametrize(
    ("template", "chat"),
    [(None, False), (PLAIN, True), (SWITCH, True), (PLAIN.replace("m.content", "m.content | trim"), True)],
)
@pytest.mark.parametrize("context", ["Some facts. ", "  \nfacts: Z\u00fcrich \U0001f600.\n\n", "1+1?"])
def test_the_context_ends_where_the_question_begins(template, chat, context):
    """Also when the template strips blanks, when context and question are equal, and behind a system message."""
    tok = tokenizer(template)
    turn = Turn(context=context, question="1+1?", system="1+1?", answer_prefix=" So")
    text = render(Doc(doc_id="q", turns=(turn,), reference="2"), tok, chat=chat)
    ids, leading = encode_to_context(tok, text, turn, chat)
    assert ids == encode(tok, text, chat=chat)
    before = tok.decode(ids[:leading]).removeprefix("<s>")
    after = tok.decode(ids[leading:])
    assert before.endswith(context if "trim" not in (template or "") else context.lstrip())
    assert after.startswith("1+1?")
    assert after.count("1+1?") == 1


def test_a_token_across_the_border_belongs_to_the_question():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "bc": 3}, merges=[("b", "c")]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tok = PreTrainedTokenizerFast(tokenizer_object=core)
    assert encode_to_context(tok, "abca", Turn(context="ab", question="ca"), False) == ([0, 3, 0], 1)


def test_the_end_of_the_context_must_be_known():
    turn = Turn(context="Facts. ", question="1+1?")
    upper = tokenizer(PLAIN.replace("m.content", "m.content | upper"))
    text = render(Doc(doc_id="q", turns=(turn,), reference="2"), upper, chat=True)
    with pytest.raises(UserError, match="needs the end of the context, but the chat template changes"):
        encode_to_context(upper, text, turn, True)

    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="does not say which text a token covers"):
        encode_to_context(Slow(), turn.user, turn, False)


def test_a_tasks_own_style_goes_through_the_template_and_a_raw_one_does_not() -> None:
    assert uses_chat(True, "lcb_generic")
    assert uses_chat(True, "default")
    assert not uses_chat(True, "rkv")
    assert not uses_chat(True, "lcb_generic", no_chat_template=True)
    assert not uses_chat(False, "default")
