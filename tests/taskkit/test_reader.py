"""The model as tasks see it: lengths, cut texts, later turns."""

from __future__ import annotations

import pytest
import transformers

from kvbench import tiny
from kvbench.task import Doc, Turn
from kvbench.taskkit.reader import ModelReader, Talk

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: with thinking off the new answer gets an empty block that earlier answers do not show.
FORGETS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(tiny.path())


def reader(tokenizer, template=None, chat=True) -> ModelReader:
    return ModelReader(tokenizer=tokenizer, model_type="qwen3", context=1000, chat=chat, template=template)


def two_turns(*questions: str) -> Doc:
    return Doc(doc_id="d", turns=tuple(Turn(question=q) for q in questions), reference=None)


def test_lengths(tokenizer):
    plain, chat = reader(tokenizer, chat=False), reader(tokenizer, CHATML)
    text = "go up two then left"
    assert plain.count(text) == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert plain.wrapping() == 0
    doc = two_turns(text)
    assert len(chat.ids(chat.text(doc, thinking=None))) == chat.wrapping() + chat.count(text)


SWITCH = FORGETS.replace("<think>", "{% if enable_thinking is false %}<think>").replace(
    "</think>\n\n", "</think>\n\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c['type'] == 'text' %}{{ c['text'] }}"
    "{% endif %}{% endfor %}<end>\n{% endfor %}Assistant:"
)
BY_SYSTEM = CHATML.replace(
    "assistant\n", "assistant\n{% if '/no_think' in messages[0]['content'] %}<think></think>{% endif %}"
)
OPENS = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "thinking", "turn", "header"),
    [
        (SWITCH, None, None, OPENS),
        (SWITCH, False, None, OPENS + "<think>\n\n</think>\n\n"),
        (PARTS, None, None, "<end>\nAssistant:"),
        (BY_SYSTEM, None, Turn(question="q", system="/no_think", answer_prefix="A:"), OPENS + "<think></think>"),
        ("{{ messages[0]['content'] | upper }} A:", None, None, ""),
    ],
)
def test_the_reply_header_follows_the_user_s_text(tokenizer, template, thinking, turn, header):
    got = reader(tokenizer, template).reply_header(turn, thinking=thinking)
    assert got == tuple(tokenizer(header, add_special_tokens=False)["input_ids"])
    assert reader(tokenizer, template, chat=False).reply_header(turn, thinking=thinking) == ()


@pytest.mark.parametrize("limit", [40, 41, 7])
def test_a_long_text_keeps_its_first_and_last_half(tokenizer, limit):
    words = [f"k{i % 40}" for i in range(200)]
    turn = Turn(context=" ".join(words[:-2]) + "\n", question=" ".join(words[-2:]))
    ids = tokenizer(turn.user)["input_ids"]
    cut, gone = reader(tokenizer).cut(turn, limit)
    half = limit // 2
    assert cut.user == tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])
    assert gone == len(ids) - 2 * half
    assert (cut.question == turn.question) == cut.user.endswith(turn.question)
    assert reader(tokenizer).cut(turn, len(ids)) == (turn, 0)


def test_a_question_longer_than_half_the_limit_goes_into_the_cut_text(tokenizer):
    turn = Turn(context="k1 k2 k3 k4", question=" ".join(["k5"] * 50))
    cut, _ = reader(tokenizer).cut(turn, 10)
    assert (cut.context, cut.question) == ("", cut.user)


def test_a_template_that_appends_keeps_the_cache(tokenizer):
    made = reader(tokenizer, CHATML)
    talk = Talk(lambda: two_turns("one?", "two?"), made, None, keep=True)
    assert talk.mode == "keep"
    follow = talk.follow(("a very special answer",))
    assert not follow.fresh
    first = made.text(talk.doc, thinking=None)
    appended = tokenizer.decode(follow.ids)
    assert "two?" in appended
    assert "special" not in appended
    whole = made.text(talk.doc, thinking=None, answers=("a very special answer",))
    assert whole == first + "a very special answer" + whole[len(first) + len("a very special answer") :]
    assert tuple(tokenizer(whole[len(first) + len("a very special answer") :])["input_ids"]) == follow.ids
    assert talk.follow(("a", "b")) is None
    assert talk.tokens() >= len(follow.ids)


@pytest.mark.parametrize(("template", "keep", "mode"), [(FORGETS, True, "reset (template)"), (CHATML, False, "reset")])
def test_otherwise_a_turn_is_a_new_prompt_without_earlier_thinking(tokenizer, template, keep, mode):
    made = reader(tokenizer, template)
    talk = Talk(lambda: two_turns("one?", "two?"), made, False, keep=keep)
    assert talk.mode == mode
    follow = talk.follow(("<think>hm</think>seven",))
    assert follow.fresh
    assert follow.ids == tuple(made.ids(made.text(talk.doc, thinking=False, answers=("seven",))))


STRIPS = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")


@pytest.mark.parametrize(("thinks", "mode"), [(True, "reset (template)"), (None, "reset (template)"), (False, "keep")])
def test_a_template_that_drops_thinking_from_earlier_turns_keeps_only_what_had_none(tokenizer, thinks, mode):
    talk = Talk(lambda: two_turns("one?", "two?"), reader(tokenizer, STRIPS), None, keep=True, thinks=thinks)
    assert talk.mode == mode


def test_plain_text_always_appends(tokenizer):
    talk = Talk(lambda: two_turns("one?", "two?", "three?"), reader(tokenizer, chat=False), None, keep=True)
    assert talk.mode == "keep"
    assert [tokenizer.decode(talk.follow(("x",) * n).ids) for n in (1, 2)] == [
        tokenizer.decode(tokenizer("\n\n" + q)["input_ids"]) for q in ("two?", "three?")
    ]
