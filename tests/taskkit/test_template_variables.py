"""--template-option: variables of chat templates, in their types, in prompts and in what the scorer expects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import ANNOUNCED, EFFORT, OPEN, OTHER, PREFIX, doc, render, tokenizer

from kvbench.config.parsers import BadValue, assignments
from kvbench.errors import UserError
from kvbench.taskkit.prompts import check_template, effective_thinking
from kvbench.taskkit.template_variables import names, parse


def test_values_have_types() -> None:
    texts = ("a=high", "b=False", "c=512", "d=null", 'e=["x"]', "f=a=b", "g=TRUE", "h=1e3")
    values = {"a": "high", "b": False, "c": 512, "d": None, "e": ["x"], "f": "a=b", "g": True, "h": 1000.0}
    assert parse(assignments(texts)) == values


@pytest.mark.parametrize("text", ["high", "=high", "a=", "1a=2", "a b=2", "ä=2"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(BadValue) as caught:
        assignments([text])
    assert caught.value.sentence("--template-option").startswith("--template-option must be NAME=VALUE; got ")


def test_a_name_comes_once() -> None:
    with pytest.raises(BadValue, match="gives 'a' twice"):
        assignments(["a=1", "a=2"])


@pytest.mark.parametrize(
    ("text", "why"),
    [("enable_thinking=false", "use --thinking or --no-thinking"), ("messages=[]", "kvbench sets 'messages' itself")],
)
def test_variables_that_others_set_are_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse([text])


def test_a_variable_reaches_the_prompt() -> None:
    text = render(doc(), tokenizer(EFFORT), chat=True, variables={"reasoning_effort": "high"})
    assert text == "1+1? effort high"


def test_a_variable_that_the_template_does_not_read_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        check_template(tokenizer(EFFORT), chat=True, variables={"reasoning_efort": "high"})
    assert str(caught.value) == (
        "--template-option reasoning_efort: chat template of the tokenizer does not read this variable. "
        "Did you mean 'reasoning_effort'? It reads reasoning_effort."
    )
    check_template(tokenizer(EFFORT), chat=False, variables={"reasoning_efort": "high"})
    with pytest.raises(UserError, match=r"It reads no variables of its own\.$"):
        check_template(tokenizer(OPEN), chat=True, variables={"x": 1})


def test_a_template_with_unknown_tags_is_not_checked() -> None:
    assert names("{% strange %}{{ a }}{% endstrange %}") is None
    assert names("{% generation %}{{ a }}{% endgeneration %}") == {"a"}


@pytest.mark.parametrize(
    ("template", "thinking", "variables", "expected"),
    [
        *((OTHER, None, {"thinking": True}, True), (OTHER, None, {"thinking": False}, False), (OTHER, None, {}, None)),
        *(
            (PREFIX, None, {"thinking": True}, True),
            (PREFIX, None, {"thinking": False}, False),
            (PREFIX, True, {}, False),
        ),
        *((ANNOUNCED, True, {}, True), (ANNOUNCED, False, {}, False)),
    ],
)
def test_effective_thinking(
    template: str, thinking: bool | None, variables: dict[str, Any], expected: bool | None
) -> None:
    assert effective_thinking(tokenizer(template), thinking, chat=True, variables=variables) is expected


def test_today_is_the_same_on_every_day() -> None:
    dated = tokenizer("Today {{ strftime_now('%Y-%m-%d') }}: {{ messages[0].content }}")
    assert render(doc(), dated, chat=True) == "Today 2026-01-01: 1+1?"
    check_template(dated, chat=True)
    either = tokenizer("{{ date_string or strftime_now('%d %b %Y') }}")
    assert render(doc(), either, chat=True) == "01 Jan 2026"
    assert render(doc(), either, chat=True, variables=parse(["date_string=2 May"])) == "2 May"


def test_a_run_asks_with_the_variable_and_resumes_with_it(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}\nEffort {{ effort }}{{ mark }}")
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"id": "1", "question": "1+1?", "answer": "2"}\n')

    def kvbench(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvbench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)

    run = ("run", "--method", "full", "--task-file", "q.jsonl", "--chat-template", "t.jinja", "--max-new-tokens", "4")
    done = kvbench(*run, "--template-option", "effort=high", "--template-option", "mark=.", "--run-name", "r")
    assert done.returncode == 0, done.stderr
    shown = kvbench("show", "r", "--sample", "1")
    assert "Effort high." in shown.stdout
    again = kvbench(*run, "--template-option", "effort=low", "--run-name", "r")
    assert again.returncode == 2
    assert "template_option" in again.stderr
    wrong = kvbench(*run, "--template-option", "efort=low", "--run-name", "s")
    assert wrong.returncode == 2
    assert "Did you mean 'effort'?" in wrong.stderr
    raw = kvbench(
        *run[:5], "--no-chat-template", "--max-new-tokens", "4", "--template-option", "effort=low", "--run-name", "u"
    )
    assert raw.returncode == 0
    assert "uses no chat template; --template-option has no effect on it." in raw.stderr
