"""Every form of data file becomes questions; each trains a step; a row of no known form is refused in one line."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import transformers
from support.recipes import change
from tokenizers import Tokenizer, models, pre_tokenizers

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.errors import UserError
from kvbench.sources.data import FILE_LIMIT
from kvbench.taskkit.prompts import STYLES
from kvbench.train import prepare as recipes
from kvbench.train import traces
from kvbench.train.collection import Collection
from kvbench.train.data_file import EMPTY, NO_ROOM, read_questions
from kvbench.train.data_rows import parse_row
from kvbench.train.loop import LOG
from kvbench.train.prompting import Prompting

ASK, SAY = "# Facts: cod 31, bow 46,\nAsk: cod?\nThink:", " cod 31, bow 46,"
TALK = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]
GIVEN = {  # forms whose answer or text comes from the file
    "messages": {"messages": TALK},
    "conversations": {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": SAY}]},
    "prompt and response": {"prompt": ASK, "response": SAY},
    "prompt and completion as messages": {"prompt": TALK[:1], "completion": TALK[1:]},
    "query and response": {"query": ASK, "response": SAY},
    "problem and output": {"problem": ASK, "output": SAY},
    "text": {"text": ASK + SAY},
    "content": {"content": ASK + SAY},
}
ASKED = {  # forms that the model answers
    "question": {"question": ASK},
    "question and answer": {"question": ASK, "answer": 31},
    "problem and solution": {"problem": ASK, "solution": "so \\boxed{31}"},
    "context and question": {"context": "# Facts: cod 31, bow 46,", "question": "Ask: cod?\nThink:"},
    "messages without a reply": {"messages": TALK[:1]},
}


@pytest.fixture
def loaded():
    return load(str(tiny.path()), device="cpu")


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSON lines."""

    def as_lines(*rows, name="data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return as_lines


@pytest.fixture
def chatting(loaded):
    """The built-in model with a tokenizer that has a chat template with a switch for thinking."""
    words = [*"abcdefgh", "<think>", "</think>", "U:", "A:", "S:", "."]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "</s>", *words])}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0]|upper + ': ' + m['content'] + ' ' }}{% endfor %}A: "
        "{% if enable_thinking is defined and not enable_thinking %}<think> </think> {% endif %}"
    )
    return replace(loaded, tokenizer=tokenizer, stop_ids=frozenset({0, 1}))


@pytest.mark.parametrize("form", [*GIVEN, *ASKED])
@pytest.mark.parametrize("name", ["retention", "lookaheadkv"])
def test_every_form_trains_a_step(name, form, write, tmp_path, monkeypatch, capsys):
    change(monkeypatch, name, held_out=1)
    monkeypatch.setattr(traces, "judge", lambda *known: lambda text: True)
    data = write(*[(GIVEN | ASKED)[form]] * 3)
    small = ["rows=2", "rank=2"] if name == "lookaheadkv" else ["width=4", "budget=8", "interval=4"]
    options = [word for text in [*small, "max_tokens=24"] for word in ("--opt", text)]
    command = ["train", name, "--data", str(data), "--steps", "1", "--batch", "2", *options, "-q"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert len((tmp_path / "out" / LOG).read_text().splitlines()) == 1
    model_wrote = name == "lookaheadkv" or form in ASKED
    assert (tmp_path / "out" / recipes.ANSWERS).exists() == model_wrote


def test_the_command_reads_folders_and_files_of_any_size(write, tmp_path, monkeypatch, capsys):
    change(monkeypatch, "retention", held_out=1)
    (folder := tmp_path / "folder").mkdir()
    data = write(*[GIVEN["text"]] * 2).rename(folder / "a.jsonl")
    with data.open("ab") as file:  # a hole that the training never reads: a larger file than a run takes
        file.seek(FILE_LIMIT)
        file.write(b"\n")
    small = [word for text in ("width=4", "budget=8", "interval=4", "max_tokens=24") for word in ("--opt", text)]
    command = ["train", "retention", "--data", str(folder), "--samples", "1", "--steps", "1", "--batch", "2", *small]
    assert main([*command, "-q", "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("form", GIVEN)
def test_given_answers_are_trained_on_as_they_are(form, write, loaded):
    [question] = read_questions(write(GIVEN[form]), loaded, Collection())
    encode = lambda text: tuple(loaded.tokenizer(text)["input_ids"])  # noqa: E731
    if form in ("text", "content"):
        assert question.ids + question.given == encode(ASK + SAY)
        assert len(question.ids) == 1
    else:
        assert question.ids == encode(ASK + "\n")  # the built-in model's chat template
        assert question.given[:-1] == encode(SAY)
        assert {question.given[-1]} <= loaded.stop_ids
    [trace] = traces.collect(loaded, [question])
    assert (trace.prompt, trace.answer) == (question.ids, question.given)
    [asked] = read_questions(write(GIVEN[form]), loaded, Collection(answers="model", max_tokens=9))
    assert asked.given is None


def test_a_wrong_column_is_one_line(write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipes, "load", lambda *args, **how: pytest.fail("the model was loaded"))
    data = write({"frage": "?", "antwort": "!", "prompt": None})
    assert main(["train", "trimkv", "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: {data}:1: no column with a question or text; found 'frage', 'antwort', 'prompt'; accepted: messages "
        "or conversations; question, problem, query, prompt (with answer or solution, response, completion or output, "
        "context, system); text or content."
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": 3}, "'problem' must be text; got number"),
        ({"question": "a", "answer": True}, "'answer' must be text; got true/false"),
        ({"question": "a", "answer": ["b", "c"]}, "'answer' must be text; got list"),
        ({"question": "a", "response": TALK}, "'response' must be a text, or a list of one message of the assistant"),
        ({"messages": "a"}, "'messages' must be a list of messages: objects with role and content"),
        ({"messages": []}, "the messages of 'messages' must alternate between user and assistant.*; got none"),
        ({"messages": TALK[1:]}, ".*; got assistant"),
        ({"messages": [*TALK, *TALK[1:]]}, ".*; got user, assistant, assistant"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "message 1 of 'messages' has the role 'tool'; accepted: "),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "message 1 of 'messages' has the role '.*'; accepted: "),
        ({"messages": [{"role": "user", "content": None}]}, "the content of message 1 .* must be text; got null"),
    ],
)
def test_a_row_of_a_wrong_form_is_one_line(row, message):
    with pytest.raises(UserError, match=rf"^f\.jsonl:7: {message}.*\.$"):
        parse_row(row, "f.jsonl:7", Prompting())


def test_the_right_answer_of_a_row():
    def reference(**row):
        return parse_row({"problem": "a"} | row, "f", Prompting()).reference

    assert reference(answer="\\frac{1}{2}", solution="\\boxed{3}") == "\\frac{1}{2}"
    assert reference(answer=["7"]) == "7"
    assert reference(answer=2.5) == "2.5"
    assert reference(answer=" ", solution="x so \\boxed{3}") == "3"
    assert reference(answer=None, solution="no box") is reference() is None


def test_tables_of_every_kind_hold_the_same_rows(write, tmp_path, loaded):
    rows = [{"problem": f"{ASK} {i}", "answer": str(i)} for i in range(600)]
    expected = list(read_questions(write(*rows), loaded, Collection()))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    with (tmp_path / "t.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["problem", "answer"])
        table.writeheader()
        table.writerows(rows)
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, start in enumerate(range(0, 600, 200)):
        part = pyarrow.Table.from_pylist(rows[start : start + 200])
        pyarrow.parquet.write_table(part, folder / f"train-{number}.parquet")
    for path in (tmp_path / "list.json", tmp_path / "t.parquet", tmp_path / "t.csv", folder):
        found = list(read_questions(path, loaded, Collection()))
        assert [(q.name, q.ids, q.reference) for q in found] == [(q.name, q.ids, q.reference) for q in expected], path
    broken = tmp_path / "b.parquet"
    broken.write_bytes(b"PAR1")
    for path, message in [
        (broken, "not parquet"),
        (tmp_path / "no.csv", "does not exist"),
        (tmp_path / "e", "without"),
    ]:
        (tmp_path / "e").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            list(read_questions(path, loaded, Collection()))


def test_conversations_in_parquet(tmp_path, loaded):
    """Every row has every column there; those that it lacks are null."""
    path = tmp_path / "t.parquet"
    rows = [{"messages": TALK, "text": None}, {"messages": None, "text": ASK}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    talk, text = read_questions(path, loaded, Collection())
    assert (len(talk.ids) > 1, len(text.ids)) == (True, 1)


def read(loaded, row, write, prompting=None, **settings):
    [question] = read_questions(write(row), loaded, Collection(**settings), prompting)
    decode = loaded.tokenizer.decode
    return decode(question.ids), None if question.given is None else decode(question.given)


def test_prompts_are_worded_as_in_a_run(write, chatting):
    ask = {"question": "a b"}
    assert read(chatting, ask, write) == ("U: a b A:", None)
    assert read(chatting, ask, write, Prompting(thinking=False))[0] == "U: a b A: <think> </think>"
    assert read(chatting, ask, write, Prompting(system="c d"))[0] == "S: c d U: a b A:"
    assert read(chatting, ask | {"system": "e"}, write, Prompting(system="c d"))[0] == "S: e U: a b A:"
    assert read(chatting, ask | {"context": "g h ."}, write)[0] == "U: g h . a b A:"
    assert read(chatting, ask, write, Prompting(prompt_style="rkv"))[0].endswith("<unk>")  # no chat template
    assert read(chatting, ask, write, Prompting(prompt_style="gkv"))[0].startswith("S: <unk>")


@pytest.mark.parametrize(
    ("style", "reference", "text"),
    [
        ("simple_evals", "5\\sqrt{2}", "The side is 5.\n\nAnswer: 5\\sqrt{2}"),
        ("lm_eval", "18", "The answer is 18.\n\nQuestion: And twice?\nAnswer: The answer is 3."),
    ],
)
def test_questions_are_judged_and_ended_as_in_a_run(style, reference, text, write, chatting):
    rows = {"question": "a", "answer": reference}, {"messages": TALK[:1], "answer": reference}
    prompting = Prompting(prompt_style=style, thinking=False)
    question, talk = read_questions(write(*rows), chatting, Collection(), prompting)
    assert (question.is_right(text), talk.is_right(text)) == (True, False)  # a conversation has no style
    assert question.request("q").stop_strings == STYLES[style].stop
    assert talk.request("q").stop_strings == ()


def test_a_conversation_keeps_its_turns(write, chatting):
    talk = [("system", "e"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": text} for role, text in talk]}
    styled = Prompting(system="g", prompt_style="foresightkv")  # a conversation has its own wording and system message
    assert read(chatting, row, write, styled) == ("S: e U: a A: b U: c A:", "d </s>")
    assert read(chatting, row, write, answers="model") == ("S: e U: a A: b U: c A:", None)
    row["messages"].pop()
    assert read(chatting, row, write) == ("S: e U: a A: b U: c A:", None)


def test_a_thinking_tag_that_the_prompt_opens_is_not_opened_twice(write, chatting):
    row = {"prompt": "a", "response": "<think>\nb </think> c"}
    assert read(chatting, row, write) == ("U: a A:", "<think> b </think> c </s>")
    chatting.tokenizer.chat_template = "U: {{ messages[0]['content'] }} A: <think>\n"
    assert read(chatting, row, write) == ("U: a A: <think>", "b </think> c </s>")


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_that_the_template_does_not_switch_is_refused(thinking, write, chatting):
    chatting.tokenizer.chat_template = "U: {{ messages[0]['content'] }} A:" + " <think>\n" * (not thinking)
    with pytest.raises(UserError, match=f"cannot turn thinking {'on' if thinking else 'off'}; omit --"):
        read(chatting, {"question": "a"}, write, Prompting(thinking=thinking))
    with pytest.raises(UserError, match=f"; --preset paper asks for it: add --{'no-' if thinking else ''}thinking"):
        read(chatting, {"question": "a"}, write, Prompting(thinking=thinking, preset="paper"))


def test_a_template_that_switches_thinking_without_tags_is_taken(write, chatting):
    chatting.tokenizer.chat_template = "U: {{ messages[0]['content'] }} A:{% if enable_thinking %} e{% endif %}"
    assert read(chatting, {"question": "a"}, write, Prompting(thinking=True))[0] == "U: a A: e"


def test_settings_of_prompts_that_would_have_no_effect_are_refused(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    for command, message in [
        (["lookaheadkv", "--no-thinking"], "error: --no-thinking needs --data: problems of built-in tasks"),
        (["duo", "--system", "a"], "duo makes its own training texts; leave out --data, --thinking, --no-thinking"),
        (["headkv", "--prompt-style", "gkv"], "headkv is estimated, not trained; it takes no --prompt-style"),
        (["trimkv", "--prompt-style", "gvk"], "unknown prompt style 'gvk'. Did you mean 'gkv'?"),
    ]:
        assert main(["train", *command, *out]) == 2
        assert message in capsys.readouterr().err


def test_settings_of_collection_are_checked_before_the_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recipes, "load", lambda *args, **more: pytest.fail("the model is loaded"))
    assert main(["train", "retention", "--opt", "min_tokens=-1", "--out", str(tmp_path)]) == 2
    assert "--opt min_tokens must be 0 or more; got -1." in capsys.readouterr().err


def test_long_prompts_are_skipped_and_long_texts_cut(write, loaded):
    short, long = {"question": "cod 31"}, {"question": "cod 31, " * 30}
    path = write(short, long)
    assert [q.name for q in read_questions(path, loaded, Collection(max_prompt=20))] == ["line-1"]
    assert [q.name for q in read_questions(path, loaded, Collection())] == ["line-1", "line-2"]
    path = write({"text": "cod 31, " * 30})
    ids = tuple(loaded.tokenizer("cod 31, " * 30)["input_ids"])
    [cut] = read_questions(path, loaded, Collection(answers="model", max_prompt=20))
    assert cut.ids == ids[:20]
    [cut] = read_questions(path, replace(loaded, context=50), Collection(answers="model", max_tokens=40))
    assert (cut.ids, cut.max_new_tokens) == (ids[:10], 40)
    [given] = read_questions(path, replace(loaded, context=50), Collection(max_tokens=100))
    [trace] = traces.collect(loaded, [given])
    assert trace.ids == ids[:50]
    assert traces.collect(loaded, [given], Collection(unfinished="drop")) == []
    assert list(read_questions(path, replace(loaded, context=50), Collection(answers="model", max_tokens=50))) == []


def test_skipped_rows_have_a_reason(write, loaded):
    path, small = write({"question": "cod 31, " * 30}, {"text": "7"}), replace(loaded, context=50)

    def skipped(**settings):
        reasons = []
        assert list(read_questions(path, small, Collection(**settings), on_skip=reasons.append)) == []
        return reasons

    assert skipped() == [NO_ROOM, EMPTY]
    assert skipped(max_prompt=20) == ["with a prompt of more than 20 tokens", EMPTY]
    assert skipped(answers="model", max_tokens=50) == [NO_ROOM, NO_ROOM]


def said(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("row", "without"),
    [
        ({"question": "", "context": "cod 31", "response": "31"}, ("data", "model")),
        ({"text": "\n"}, ("data", "model")),
        ({"messages": said("cod?", " ", "bow?", "46")}, ("data", "model")),
        ({"messages": said("cod?", "")}, ("data",)),
        ({"prompt": said("cod?"), "completion": "<think>\n"}, ("data",)),
        ({"question": "cod?", "output": "\n"}, ("data",)),
    ],
    ids=str,
)
def test_a_row_with_blank_text_that_training_needs_is_left_out(row, without, write, chatting):
    chatting.tokenizer.chat_template = "U: {{ messages[0]['content'] }} A: <think>\n"
    for answers in ("data", "model"):
        reasons, how = [], Collection(answers=answers, max_tokens=9)
        assert len(list(read_questions(write(row), chatting, how, on_skip=reasons.append))) == 1 - len(reasons)
        assert reasons == [EMPTY] * (answers in without)


def test_a_file_of_blank_rows_is_refused(write, tmp_path, capsys):
    data = write(*[{"question": "cod?", "output": ""}] * 3)
    assert main(["train", "retention", "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert f"left out: 3 rows of --data (3 {EMPTY})" in capsys.readouterr().err
